"""Sequences that are embedded: a prompt and nothing behind it.

They are planned, chunked, shared, preempted and cancelled as all others; what differs is their end.
The step that feeds the last token of the prompt, which no cache holds (`Sequence.sharable_hashes`),
gives that token's hidden state, and no token is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.types import Delta, FinishReason


def pooling_plan(plan: StepPlan) -> StepPlan:
    """Return the step in which embeddings pool where all others sample."""
    pooled = tuple(
        place for place, part in enumerate(plan.work) if part.samples and part.sequence.embeds
    )
    parts = list(plan.work)
    for place in pooled:
        parts[place] = parts[place]._replace(samples=False)
    return replace(plan, work=tuple(parts), pooled=pooled)


def embedded(
    plan: StepPlan, result: StepResult, finish: Callable[[Sequence, FinishReason], None]
) -> Iterator[Sequence]:
    """Yield the sequences whose embedding a step gave, with it; those that left are passed over.

    Args:
        plan, result: the step.
        finish: ends each (`Scheduler.finish`).
    """
    if result.pooled is None:
        return
    for place, pooled in zip(plan.pooled, result.pooled, strict=True):
        sequence = plan.work[place].sequence
        if sequence.state is SequenceState.RUNNING:
            sequence.embedding = pooled
            finish(sequence, FinishReason.STOP)
            yield sequence


def embedding_delta(sequence: Sequence) -> Delta:
    """Return the one delta of a sequence that was embedded."""
    reason, cached = sequence.finish_reason, sequence.cached_tokens
    return Delta(
        sequence.choice,
        (),
        "",
        finish_reason=reason,
        cached_tokens=cached,
        embedding=sequence.embedding,
    )
