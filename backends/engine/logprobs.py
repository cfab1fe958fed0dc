"""Log probabilities of emitted tokens under the model, before bias, penalties and filters.

The computation has three stages. The first takes the log-softmax before anything changes the
logits. The second selects the sampled tokens on the device. The third selects the emitted tokens on
the host.
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from typing import NamedTuple

import torch
from torch import Tensor

from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.sampler import Walks
from draftgate.backends.types import TokenLogprob


class RowLogprobs(NamedTuple):
    """Log probabilities in the rows of one sequence.

    Attributes:
        sampled: float32 [rows], of the token of each row.
        top, top_ids: float32 and int64 [rows, wanted], of the likeliest tokens, descending.
    """

    sampled: Tensor
    top: Tensor
    top_ids: Tensor


def log_softmax_rows(logits: Tensor) -> Tensor:
    """Return the log-softmax of each row: float32 [rows, vocab_size]."""
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


def model_logprobs(plan: StepPlan, logits: Tensor) -> list[Tensor | None]:
    """Return the log-softmax of each sequence that requests log probabilities.

    Args:
        plan: the work of each sequence.
        logits: float32 [rows, vocab_size], from the model, not modified.

    Returns:
        One [num_samples, vocab_size] per sequence, None for sequences that request none.
    """
    found: list[Tensor | None] = []
    first = 0
    for work in plan.work:
        if work.samples and work.sequence.request.sampling.logprobs is not None:
            rows = logits[first : first + work.num_samples]
            found.append(log_softmax_rows(rows))
        else:
            found.append(None)
        first += work.num_samples
    return found


def row_logprobs(
    plan: StepPlan, logprobs: Many[Tensor | None], tokens: Tensor
) -> tuple[RowLogprobs | None, ...]:
    """Return the log probabilities that each sequence requests.

    Args:
        plan: the work of each sequence.
        logprobs: the result of `model_logprobs`.
        tokens: int64 [rows], sampled in every row of the step.
    """
    found: list[RowLogprobs | None] = []
    first = 0
    for work, own in zip(plan.work, logprobs, strict=True):
        if own is None:
            found.append(None)
        else:
            own_tokens = tokens[first : first + work.num_samples]
            wanted = work.sequence.request.sampling.logprobs or 0
            found.append(select_logprobs(own, own_tokens, wanted))
        first += work.num_samples
    return tuple(found)


def emitted_logprobs(
    found: Many[RowLogprobs | None] | None, walks: Walks
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Return the log probabilities of the emitted tokens.

    The function waits for the device if a sequence requests log probabilities.

    Args:
        found: the result of `row_logprobs`, None if no sequence requests any.
        walks: the rows that emit a token.
    """
    if found is None:
        return ((),) * len(walks.rows)
    return tuple(
        () if own is None else tuple(_entries(own, rows, emitted))
        for own, rows, emitted in zip(found, *walks, strict=True)
    )


def _entries(
    found: RowLogprobs, rows: tuple[int, ...], emitted: tuple[int, ...]
) -> Iterator[TokenLogprob]:
    sampled, top, top_ids = (column.tolist() for column in found)
    for row, token in zip(rows, emitted, strict=True):
        yield TokenLogprob(token, sampled[row], tuple(zip(top_ids[row], top[row], strict=True)))
