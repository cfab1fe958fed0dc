"""From logits to emitted tokens: draw a token for every row, then walk each draft."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Literal

import torch
from torch import Tensor

from backends.core.steps import SequenceWork, StepPlan
from backends.engine.kernels import rejection_ref
from backends.engine.kernels.sample_verify_ref import RowSampling, accept_walk, sample
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
    if not len(logits) or all(
        _temperature(work.sequence.request.sampling) == 0 for work in plan.work
    ):
        return logits.argmax(dim=1)
    rows = row_sampling(plan, logits.device)
    if verify == "rejection" and any(map(_settles_drafts, plan.work)):
        return _draw_by_rejection(plan, logits, rows)
    return sample(logits, rows)


def walk(plan: StepPlan, tokens: Many[int]) -> tuple[tuple[int, ...], ...]:
    """Return the tokens each part emits: accepted drafts and the token behind them.

    Args:
        tokens: the token of every row.
    """
    emitted: list[tuple[int, ...]] = []
    first = 0
    for work in plan.work:
        rows = tokens[first : first + work.num_samples]
        accepted = accept_walk(rows, work.draft_ids) if rows else -1
        emitted.append(tuple(rows[: accepted + 1]))
        first += work.num_samples
    return tuple(emitted)


def row_sampling(plan: StepPlan, device: torch.device) -> RowSampling:
    """Return the sampling parameters of every row, drafts' rows included."""
    rows = [
        (work, position)
        for work in plan.work
        # The token behind position p is drawn with the noise of position p + 1.
        for position in range(work.context_tokens - work.num_samples + 1, work.context_tokens + 1)
    ]
    params = [work.sequence.request.sampling for work, _ in rows]

    def column(values: list[float] | list[int], dtype: torch.dtype) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=device)

    return RowSampling(
        temperature=column([_temperature(p) for p in params], torch.float32),
        top_k=column([min(p.top_k, _MAX_INT32) for p in params], torch.int32),
        top_p=column([p.top_p for p in params], torch.float32),
        min_p=column([p.min_p for p in params], torch.float32),
        seed=column([_as_int64(p.seed) for p in params], torch.int64),
        choice=column([work.sequence.choice for work, _ in rows], torch.int32),
        position=column([position for _, position in rows], torch.int32),
    )


def _settles_drafts(work: SequenceWork) -> bool:
    """Return whether rejection has drafts to decide on; without noise both ways are the same."""
    return work.num_drafts > 0 and _temperature(work.sequence.request.sampling) > 0


def _draw_by_rejection(plan: StepPlan, logits: Tensor, rows: RowSampling) -> Tensor:
    """Settle the drafts verified with noise; draw all other rows as coupled verification does."""
    settling = [work for work in plan.work if _settles_drafts(work)]
    has_draft = [
        _settles_drafts(work) and slot < work.num_drafts
        for work in plan.work
        for slot in range(work.num_samples)
    ]
    drafted = torch.tensor([i for i, has in enumerate(has_draft) if has], device=logits.device)
    plain = torch.tensor([i for i, has in enumerate(has_draft) if not has], device=logits.device)
    drafts = [token for work in settling for token in work.draft_ids]

    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    tokens[plain] = sample(logits[plain], rows.select(plain))
    tokens[drafted] = rejection_ref.settle(
        logits[drafted],
        rows.select(drafted),
        torch.tensor(drafts, device=logits.device),
        torch.cat([_draft_law(work, logits) for work in settling]),
    )
    return tokens


def _draft_law(work: SequenceWork, logits: Tensor) -> Tensor:
    """Return the laws the drafts were drawn from: float32 [num_drafts, vocab_size]."""
    law = work.draft_law
    if isinstance(law, Tensor):
        return law[: work.num_drafts]
    drafts = torch.tensor(work.draft_ids, device=logits.device)
    return logits.new_zeros(work.num_drafts, logits.shape[1]).scatter_(1, drafts[:, None], 1.0)


def _temperature(sampling: SamplingParams) -> float:
    return sampling.temperature if sampling.temperature >= _MIN_TEMPERATURE else 0.0


def _as_int64(seed: int) -> int:
    """Return the signed integer with the bits of an unsigned 64-bit one."""
    return seed - (1 << 64) if seed & _SIGN_BIT else seed
