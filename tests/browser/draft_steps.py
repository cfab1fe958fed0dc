"""Deltas for the page with steps, drafts, prices and proposers that a test sets."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import cycle

from draftgate.backends.core.detokenize import TextStream
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, FinishReason, SpeculationOutcome, StepTrace

TEXT = 'def area(self):\n    return self.width * self.height  # "é😀"\n\n'

PATTERN = (
    StepTrace(1),
    StepTrace(3, "ngram", 5, (), 2, (0.91, 0.74, 0.41, 0.18), 0.25),
    StepTrace(2, "draft_model", 1, (), 1, (0.62,), 0.25),
    StepTrace(1, "ngram", 2, (), 0, (0.4, 0.3), 0.25),
    StepTrace(2, "sparse_self", 1, (), 1, (0.8,), 0.2),
    StepTrace(3, "grammar", 2, (), 2, (1.0, 1.0), 0.2),
    StepTrace(2, "prediction", 1, (), 1, (0.7,), 0.2),
    StepTrace(2, "medusa", 1, (), 1, (0.8,), 0.2),
)
"""Steps with their number of tokens and their draft statistics, but without the drafts."""

WRONG = " wrong"


def in_steps(
    tokenizer: Tokenizer, text: str, pattern: Sequence[StepTrace] = PATTERN
) -> list[Delta]:
    """Return a text as deltas whose steps repeat the pattern. The last delta ends the choice."""
    ids = tokenizer.encode(text)
    texts = TextStream(tokenizer.decode)
    wrong = tokenizer.encode(WRONG)[0]
    deltas = []
    for step in cycle(pattern):
        taken, ids = ids[: step.tokens], ids[step.tokens :]
        accepted = min(step.accepted, len(taken))
        refused = max(len(step.survivals) - 1, accepted) - accepted if step.offered > 1 else 0
        drafts = (*taken[:accepted], *[wrong] * refused)
        filled_step = step._replace(tokens=len(taken), draft_ids=drafts, accepted=accepted)
        added = "".join(texts.add(token) for token in taken)
        deltas.append(Delta(0, tuple(taken), added, steps=(filled_step,)))
        if not ids:
            break
    last = deltas[-1]
    deltas[-1] = last._replace(
        text=last.text + texts.flush(),
        finish_reason=FinishReason.STOP,
        outcome=_outcome(deltas),
    )
    return deltas


def _outcome(deltas: Sequence[Delta]) -> SpeculationOutcome:
    steps = [delta.steps[0] for delta in deltas if delta.steps[0].draft_ids]
    return SpeculationOutcome(
        len(steps),
        sum(len(step.draft_ids) for step in steps),
        sum(step.accepted for step in steps),
    )
