"""Log probabilities of emitted tokens: of the model's own law, before bias, penalties and filters.

Three stages around sampling: the logits are read before anything changes them, the drawn tokens
are looked up on the device, and the host reads what was emitted.
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
    """Log probabilities in the rows of one sequence, on the device.

    Attributes:
        drawn: float32 [rows], of the token drawn in each row.
        top, top_ids: float32 and int64 [rows, wanted], of the likeliest tokens, falling.
    """

    drawn: Tensor
    top: Tensor
    top_ids: Tensor


def model_logprobs(plan: StepPlan, logits: Tensor) -> list[Tensor | None]:
    """Return the log-softmax of the rows of each part that asks for it: [num_samples, vocab_size].

    Args:
        logits: float32 [rows, vocab_size], as the model gave them; not modified.
    """
    found: list[Tensor | None] = []
    first = 0
    for work in plan.work:
        if work.samples and work.sequence.request.sampling.logprobs is not None:
            rows = logits[first : first + work.num_samples]
            # One row at a time: bits must not depend on how many rows a step happens to have.
            found.append(torch.stack([torch.log_softmax(row, dim=-1) for row in rows]))
        else:
            found.append(None)
        first += work.num_samples
    return found


def look_up(
    plan: StepPlan, logprobs: Many[Tensor | None], tokens: Tensor
) -> tuple[RowLogprobs | None, ...]:
    """Return what each part wants to know of its rows.

    Args:
        logprobs: of `model_logprobs`.
        tokens: int64 [rows], drawn in every row of the step.
    """
    found: list[RowLogprobs | None] = []
    first = 0
    for work, law in zip(plan.work, logprobs, strict=True):
        if law is None:
            found.append(None)
        else:
            drawn = law.gather(1, tokens[first : first + work.num_samples, None])[:, 0]
            top = law.topk(work.sequence.request.sampling.logprobs or 0)
            found.append(RowLogprobs(drawn, top.values, top.indices))
        first += work.num_samples
    return tuple(found)


def read(
    found: Many[RowLogprobs | None] | None, walks: Walks
) -> tuple[tuple[TokenLogprob, ...], ...]:
    """Fetch the log probabilities of the emitted tokens; waits for the device where any are.

    Args:
        found: of `look_up`; None if no part asks.
    """
    if found is None:
        return ((),) * len(walks.rows)
    return tuple(
        () if looked_up is None else tuple(_entries(looked_up, rows, emitted))
        for looked_up, rows, emitted in zip(found, *walks, strict=True)
    )


def _entries(
    found: RowLogprobs, rows: tuple[int, ...], emitted: tuple[int, ...]
) -> Iterator[TokenLogprob]:
    drawn, top, top_ids = (column.tolist() for column in found)
    for row, token in zip(rows, emitted, strict=True):
        yield TokenLogprob(token, drawn[row], tuple(zip(top_ids[row], top[row], strict=True)))
