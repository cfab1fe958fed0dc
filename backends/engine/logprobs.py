"""Log probabilities of emitted tokens under the model, before bias, penalties and filters.

The computation has three stages. The first takes the log-softmax before anything changes the
logits. The second selects the sampled tokens on the device. The third selects the emitted tokens on
the host. Each stage handles all sequences together, because a launch or a copy for each of them
would take the host longer than a step.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.sampler import Walks
from draftgate.backends.engine.transfer import to_device
from draftgate.backends.types import TokenLogprob


class RowLogprobs(NamedTuple):
    """Log probabilities in some rows.

    Attributes:
        sampled: float32 [rows], of the token of each row.
        top, top_ids: float32 and int64 [rows, wanted], of the likeliest tokens, descending.
    """

    sampled: Tensor
    top: Tensor
    top_ids: Tensor


def log_softmax_rows(logits: Tensor) -> Tensor:
    """Return the log-softmax of each row: float32 [rows, vocab_size]."""
    if logits.is_cuda:  # each row has its own block of threads
        return torch.log_softmax(logits, dim=-1)
    # Compute one row at a time, because bits must not depend on the number of rows.
    return torch.stack([torch.log_softmax(row, dim=-1) for row in logits])


def select_logprobs(logprobs: Tensor, tokens: Tensor, alternatives: int) -> RowLogprobs:
    """Return the log probabilities of the tokens and of the likeliest tokens.

    Args:
        logprobs: float32 [rows, vocab_size], from `log_softmax_rows`.
        tokens: int64 [rows].
        alternatives: number of likeliest tokens.
    """
    top = logprobs.topk(alternatives)
    return RowLogprobs(logprobs.gather(1, tokens[:, None])[:, 0], top.values, top.indices)


@dataclass(frozen=True, slots=True)
class StepLogprobs:
    """Log probabilities of a step, in the rows of all sequences that request them.

    Attributes:
        alternatives: number of likeliest tokens that each part of the plan requests, None for parts
            that request no log probabilities.
        starts: the first row of each part in `found`.
        found: all rows of these parts in order, by number of alternatives. Of equal logits, another
            number may select other tokens, and the result must not depend on other sequences.
    """

    alternatives: tuple[int | None, ...]
    starts: tuple[int, ...]
    found: Mapping[int, RowLogprobs]

    def moved(self, move: Callable[[Tensor], Tensor]) -> StepLogprobs:
        """Return the log probabilities with each tensor passed through a function."""
        found = {wanted: RowLogprobs(*map(move, rows)) for wanted, rows in self.found.items()}
        return replace(self, found=found)


def model_logprobs(plan: StepPlan, logits: Tensor) -> Tensor | None:
    """Return the log-softmax of the rows of all sequences that request log probabilities.

    Args:
        plan: the work of each sequence.
        logits: float32 [rows, vocab_size], from the model, not modified.

    Returns:
        [requested rows, vocab_size], None if no sequence requests any.
    """
    rows = _requested_rows(plan)
    if not rows:
        return None
    if len(rows) < len(logits):
        logits = logits[to_device(torch.tensor(rows), logits.device)]
    return log_softmax_rows(logits)


def row_logprobs(plan: StepPlan, logprobs: Tensor | None, tokens: Tensor) -> StepLogprobs | None:
    """Return the log probabilities that each sequence requests.

    Args:
        plan: the work of each sequence.
        logprobs: the result of `model_logprobs`.
        tokens: int64 [rows], sampled in every row of the step.
    """
    if logprobs is None:
        return None
    alternatives = _alternatives(plan)
    counts = [
        0 if wanted is None else work.num_samples
        for work, wanted in zip(plan.work, alternatives, strict=True)
    ]
    if len(logprobs) < len(tokens):
        tokens = tokens[to_device(torch.tensor(_requested_rows(plan)), tokens.device)]
    different = {wanted for wanted in alternatives if wanted is not None}
    found = {wanted: select_logprobs(logprobs, tokens, wanted) for wanted in different}
    return StepLogprobs(alternatives, tuple(accumulate(counts, initial=0)), found)


def emitted_logprobs(
    step: StepLogprobs | None, walks: Walks
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Return the log probabilities of the emitted tokens.

    The function waits for the device if a sequence requests log probabilities.

    Args:
        step: the result of `row_logprobs`, None if no sequence requests any.
        walks: the emitted tokens.
    """
    if step is None:
        return ((),) * len(walks.emitted)
    columns = {
        wanted: tuple(column.tolist() for column in rows) for wanted, rows in step.found.items()
    }

    def entries(
        start: int, wanted: int, path: tuple[int, ...], emitted: tuple[int, ...]
    ) -> Iterator[TokenLogprob]:
        sampled, top, top_ids = columns[wanted]
        rows = (start, *(start + place + 1 for place in path))
        for row, token in zip(rows, emitted, strict=True):
            pairs = zip(top_ids[row], top[row], strict=True)
            yield TokenLogprob(token, sampled[row], tuple(pairs))

    parts = zip(step.starts, step.alternatives, *walks, strict=False)
    return tuple(
        () if wanted is None else tuple(entries(start, wanted, path, emitted))
        for start, wanted, path, emitted in parts
    )


def _alternatives(plan: StepPlan) -> tuple[int | None, ...]:
    return tuple(
        work.sequence.request.sampling.logprobs if work.samples else None for work in plan.work
    )


def _requested_rows(plan: StepPlan) -> list[int]:
    """Return the sampled rows of all sequences that request log probabilities."""
    rows: list[int] = []
    first = 0
    for work, wanted in zip(plan.work, _alternatives(plan), strict=True):
        if wanted is not None:
            rows += range(first, first + work.num_samples)
        first += work.num_samples
    return rows
