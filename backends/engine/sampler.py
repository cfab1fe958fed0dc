"""From logits to emitted tokens: draw a token for every row, then walk each draft."""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import Any, Literal, NamedTuple

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.kernels import rejection_ref
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling, sample
from draftgate.backends.engine.transfer import to_device
from draftgate.backends.types import SamplingParams

Verify = Literal["coupled", "rejection"]
"""How drafts are verified: a draft is kept if it equals the token of its position (`coupled`), or
with probability p/q (`rejection`)."""

_SIGN_BIT = 1 << 63

_MAX_INT32 = (1 << 31) - 1
"""A `top_k` beyond any vocabulary, and the largest that its tensor holds."""

_MIN_TEMPERATURE = 1e-30
"""Dividing logits by less overflows float32; no noise matters there, so less is greedy."""

_MAX_TEMPERATURE = 1e38
"""The largest float32 or so: nothing is left of logits there, so more is the same."""


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
        from draftgate.backends.engine.kernels import sample_verify

        return sample_verify.sample(logits, rows)
    return sample(logits, rows)


class Walks(NamedTuple):
    """How far each part of a step came.

    Attributes:
        rows: the rows of each part whose tokens stand: the first, and those behind accepted drafts.
        emitted: the tokens of these rows.
    """

    rows: list[tuple[int, ...]]
    emitted: list[tuple[int, ...]]


def walk(plan: StepPlan, tokens: Many[int]) -> Walks:
    """Return what each part emits: accepted drafts and the token behind them.

    Args:
        tokens: the token of every row.
    """
    if all(work.samples and not work.draft.token_ids for work in plan.work):
        return Walks([(0,)] * len(tokens), list(zip(tokens)))
    stand: list[tuple[int, ...]] = []
    emitted: list[tuple[int, ...]] = []
    first = 0
    for work in plan.work:
        rows: tuple[int, ...] = (0,) if work.samples else ()
        if work.draft.token_ids:  # most of a batch has none
            drawn = tokens[first : first + work.num_samples]
            rows = (0, *(place + 1 for place in work.draft.accepted_places(drawn, per_row=True)))
        stand.append(rows)
        emitted.append(tuple([tokens[first + row] for row in rows]))
        first += work.num_samples
    return Walks(stand, emitted)


def row_sampling(plan: StepPlan, device: torch.device) -> RowSampling:
    """Return the sampling parameters of every row, drafts' rows included."""
    # Through numpy: `torch.tensor` takes five times as long.
    columns = sampling_columns(plan).items()
    return RowSampling(**{name: to_device(torch.from_numpy(c), device) for name, c in columns})


def sampling_columns(plan: StepPlan) -> dict[str, npt.NDArray[Any]]:
    """Return the fields of `RowSampling` in main memory, drafts' rows included."""
    # The token behind position p is drawn with the noise of position p + 1.
    sampling = [work for work in plan.work if work.samples]
    positions: list[int] = []
    for work in sampling:
        end = work.confirmed_end
        positions.append(end)
        if work.draft.token_ids:  # most of a batch has none
            positions.extend(end + depth for depth in work.draft.depths)
    repeats = [work.num_samples for work in sampling]
    params = [work.sequence.request.sampling for work in sampling]

    def column(values: list[float] | list[int], dtype: npt.DTypeLike) -> npt.NDArray[Any]:
        return np.repeat(np.array(values, dtype=dtype), repeats)

    return {
        "temperature": column([_temperature(p) for p in params], np.float32),
        "top_k": column([min(p.top_k, _MAX_INT32) for p in params], np.int32),
        "top_p": column([p.top_p for p in params], np.float32),
        "min_p": column([p.min_p for p in params], np.float32),
        "seed": column([_as_int64(p.seed) for p in params], np.int64),
        "choice": column([work.sequence.choice for work in sampling], np.int32),
        "position": np.array(positions, dtype=np.int32),
    }


def _settles_drafts(work: SequenceWork) -> bool:
    """Return whether rejection has something to decide on.

    Drafts that were not drawn have all their law's mass: p/q is p, and accepting the token if it
    equals the one drawn from p, as coupled verification does, is the same law.
    """
    drawn = isinstance(work.draft.distributions, Tensor)
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
    laws = [work.draft.distributions[: work.num_drafts] for work in settling]  # type: ignore[index]

    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    tokens[plain] = _sample(logits[plain], rows.select(plain))
    tokens[drafted] = rejection_ref.rejection_sample(
        logits[drafted],
        rows.select(drafted),
        torch.tensor(drafts, device=logits.device),
        torch.cat(laws),
    )
    return tokens


def _temperature(sampling: SamplingParams) -> float:
    if sampling.temperature < _MIN_TEMPERATURE:
        return 0.0
    return min(sampling.temperature, _MAX_TEMPERATURE)


def _as_int64(seed: int) -> int:
    """Return the signed integer with the bits of an unsigned 64-bit one."""
    return seed - (1 << 64) if seed & _SIGN_BIT else seed
