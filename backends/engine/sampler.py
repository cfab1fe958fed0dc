"""From logits to emitted tokens: sample every row, walk each draft, read log probabilities."""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from backends.core.steps import StepPlan
from backends.engine.kernels.sample_verify_ref import RowSampling, accept_walk, sample
from backends.types import SamplingParams, TokenLogprob

_SIGN_BIT = 1 << 63

_MAX_INT32 = (1 << 31) - 1
"""A `top_k` beyond any vocabulary, and the largest that its tensor holds."""

_MIN_TEMPERATURE = 1e-30
"""Dividing logits by less overflows float32; no noise matters there, so less is greedy."""


def emit(plan: StepPlan, logits: Tensor) -> list[tuple[int, ...]]:
    """Return the tokens each part of the plan emits: accepted drafts and the token behind them.

    Args:
        logits: float32 [rows, vocab_size]; the rows of each part in order, `num_samples` each.
    """
    if not len(logits):
        return [()] * len(plan.work)
    if all(work.sequence.request.sampling.temperature == 0 for work in plan.work):
        sampled = logits.argmax(dim=1).tolist()
    else:
        sampled = sample(logits, row_sampling(plan)).tolist()
    emitted, first = [], 0
    for work in plan.work:
        rows = sampled[first : first + work.num_samples]
        accepted = accept_walk(rows, work.draft_ids) if rows else -1
        emitted.append(tuple(rows[: accepted + 1]))
        first += work.num_samples
    return emitted


def row_sampling(plan: StepPlan) -> RowSampling:
    """Return the sampling parameters of every row, drafts' rows included."""
    rows = [
        (work, position)
        for work in plan.work
        # The token behind position p is drawn with the noise of position p + 1.
        for position in range(work.context_tokens - work.num_samples + 1, work.context_tokens + 1)
    ]
    params = [work.sequence.request.sampling for work, _ in rows]
    return RowSampling(
        temperature=torch.tensor([_temperature(p) for p in params], dtype=torch.float32),
        top_k=torch.tensor([min(p.top_k, _MAX_INT32) for p in params], dtype=torch.int32),
        top_p=torch.tensor([p.top_p for p in params], dtype=torch.float32),
        min_p=torch.tensor([p.min_p for p in params], dtype=torch.float32),
        seed=torch.tensor([_as_int64(p.seed) for p in params], dtype=torch.int64),
        choice=torch.tensor([work.sequence.choice for work, _ in rows], dtype=torch.int32),
        position=torch.tensor([position for _, position in rows], dtype=torch.int32),
    )


def read_logprobs(
    plan: StepPlan, logits: Tensor, emitted: Many[tuple[int, ...]]
) -> list[tuple[TokenLogprob, ...]]:
    """Return log probabilities of the emitted tokens, before temperature and filters."""
    found: list[tuple[TokenLogprob, ...]] = []
    first = 0
    for work, tokens in zip(plan.work, emitted, strict=True):
        wanted = work.sequence.request.sampling.logprobs
        if wanted is None or not tokens:
            found.append(())
        else:
            found.append(_logprobs_of(logits[first : first + len(tokens)], tokens, wanted))
        first += work.num_samples
    return found


def _logprobs_of(logits: Tensor, tokens: tuple[int, ...], wanted: int) -> tuple[TokenLogprob, ...]:
    # One row at a time: bits must not depend on how many rows a step happened to emit.
    entries = []
    for row, token in zip(logits, tokens, strict=True):
        logprobs = torch.log_softmax(row, dim=-1)
        top = logprobs.topk(wanted) if wanted else None
        pairs = zip(top.indices.tolist(), top.values.tolist(), strict=True) if top else ()
        entries.append(TokenLogprob(token, float(logprobs[token]), tuple(pairs)))
    return tuple(entries)


def _temperature(sampling: SamplingParams) -> float:
    return sampling.temperature if sampling.temperature >= _MIN_TEMPERATURE else 0.0


def _as_int64(seed: int) -> int:
    """Return the signed integer with the bits of an unsigned 64-bit one."""
    return seed - (1 << 64) if seed & _SIGN_BIT else seed
