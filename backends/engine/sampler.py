"""From logits to emitted tokens: draw a token for every row, then walk each draft."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Final, Literal, NamedTuple

import torch
from torch import Tensor

from backends.core.steps import SequenceWork, StepPlan
from backends.engine.kernels import rejection_ref
from backends.engine.kernels.sample_verify_ref import RowSampling, sample
from backends.engine.transfer import to_device
from backends.types import SamplingParams

Verify = Literal["coupled", "rejection"]
"""How drafts are verified: a draft is kept if it equals the token of its position (`coupled`), or
with probability p/q (`rejection`)."""

_SIGN_BIT = 1 << 63

_MAX_INT32 = (1 << 31) - 1
"""A `top_k` beyond any vocabulary, and the largest that its tensor holds."""

_MIN_TEMPERATURE = 1e-30
"""Dividing logits by less overflows float32; no noise matters there, so less is greedy."""


def draw(plan: StepPlan, logits: Tensor, verify: Verify) -> Tensor:
    """Return the token of every row, on the device of the logits: int64 [rows].

    A draft that equals the token of its row is accepted, whichever way it is verified.

    Args:
        logits: float32 [rows, vocab_size], contiguous; the rows of each part in order,
            `num_samples` each.
    """
    greedy = all(_temperature(work.sequence.request.sampling) == 0 for work in plan.work)
    # Of equal logits a GPU's argmax may find any.
    if not len(logits) or (greedy and not logits.is_cuda):
        return logits.argmax(dim=1)
    rows = row_sampling(plan, logits.device)
    if verify == "rejection" and settles_drafts(plan):
        return _draw_by_rejection(plan, logits, rows)
    return _sample(logits, rows)


def settles_drafts(plan: StepPlan) -> bool:
    """Return whether rejection has something to decide on: drafts that were drawn."""
    return any(map(_settles_drafts, plan.work))


def _sample(logits: Tensor, rows: RowSampling) -> Tensor:
    if logits.is_cuda:
        from backends.engine.kernels import sample_verify

        return sample_verify.sample(logits, rows)
    return sample(logits, rows)


class Walk(NamedTuple):
    """How far a part of a step came.

    Attributes:
        rows: the rows of the part whose tokens stand: the first, and those behind accepted drafts.
        token_ids: the tokens of these rows.
    """

    rows: tuple[int, ...]
    token_ids: tuple[int, ...]


def walk(plan: StepPlan, tokens: Many[int]) -> list[Walk]:
    """Return what each part emits: accepted drafts and the token behind them.

    Args:
        tokens: the token of every row.
    """
    walks: list[Walk] = []
    first = 0
    for work in plan.work:
        drawn = tokens[first : first + work.num_samples]
        rows = (0, *(place + 1 for place in work.draft.accepted(drawn))) if drawn else ()
        walks.append(Walk(rows, tuple(drawn[row] for row in rows)))
        first += work.num_samples
    return walks


class SamplingColumns(NamedTuple):
    """The fields of `RowSampling` in the same order, as lists of the rows' values."""

    temperature: list[float]
    top_k: list[int]
    top_p: list[float]
    min_p: list[float]
    seed: list[int]
    choice: list[int]
    position: list[int]


COLUMN_DTYPES: Final = (
    torch.float32,
    torch.int32,
    torch.float32,
    torch.float32,
    torch.int64,
    torch.int32,
    torch.int32,
)
"""Dtypes of `RowSampling`, field by field."""


def row_sampling(plan: StepPlan, device: torch.device) -> RowSampling:
    """Return the sampling parameters of every row, drafts' rows included."""
    columns = zip(sampling_columns(plan), COLUMN_DTYPES, strict=True)
    tensors = (to_device(torch.tensor(values, dtype=dtype), device) for values, dtype in columns)
    return RowSampling(*tensors)


def sampling_columns(plan: StepPlan) -> SamplingColumns:
    """Return the sampling parameters of every row as lists."""
    # The token behind position p is drawn with the noise of position p + 1.
    rows = [
        (work, work.confirmed_end + depth)
        for work in plan.work
        if work.samples
        for depth in (0, *work.draft.depths)
    ]
    params = [work.sequence.request.sampling for work, _ in rows]
    return SamplingColumns(
        temperature=[_temperature(p) for p in params],
        top_k=[min(p.top_k, _MAX_INT32) for p in params],
        top_p=[p.top_p for p in params],
        min_p=[p.min_p for p in params],
        seed=[_as_int64(p.seed) for p in params],
        choice=[work.sequence.choice for work, _ in rows],
        position=[position for _, position in rows],
    )


def _settles_drafts(work: SequenceWork) -> bool:
    """Return whether rejection has something to decide on.

    Drafts that were not drawn have all their law's mass: p/q is p, and accepting the token if it
    equals the one drawn from p, as coupled verification does, is the same law.
    """
    drawn = isinstance(work.draft.law, Tensor)
    return drawn and _temperature(work.sequence.request.sampling) > 0


def _draw_by_rejection(plan: StepPlan, logits: Tensor, rows: RowSampling) -> Tensor:
    """Settle the drafts that were drawn; draw all other rows as coupled verification does."""
    settling = [work for work in plan.work if _settles_drafts(work)]
    has_draft = [
        _settles_drafts(work) and slot < work.num_drafts
        for work in plan.work
        for slot in range(work.num_samples)
    ]
    drafted = torch.tensor([i for i, has in enumerate(has_draft) if has], device=logits.device)
    plain = torch.tensor([i for i, has in enumerate(has_draft) if not has], device=logits.device)
    drafts = [token for work in settling for token in work.draft.token_ids]
    laws = [work.draft.law[: work.num_drafts] for work in settling]  # type: ignore[index]

    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    tokens[plain] = _sample(logits[plain], rows.select(plain))
    tokens[drafted] = rejection_ref.settle(
        logits[drafted],
        rows.select(drafted),
        torch.tensor(drafts, device=logits.device),
        torch.cat(laws),
    )
    return tokens


def _temperature(sampling: SamplingParams) -> float:
    return sampling.temperature if sampling.temperature >= _MIN_TEMPERATURE else 0.0


def _as_int64(seed: int) -> int:
    """Return the signed integer with the bits of an unsigned 64-bit one."""
    return seed - (1 << 64) if seed & _SIGN_BIT else seed
