"""Samples a token for every row, and walks along drafts to find the emitted tokens."""

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
from draftgate.backends.engine.operators import drawing
from draftgate.backends.engine.transfer import to_device
from draftgate.backends.types import SamplingParams

Verify = Literal["coupled", "rejection"]
"""The verification method.

`coupled` accepts a draft that equals the token of its position. `rejection` accepts a draft with
probability p/q.
"""

_SIGN_BIT = 1 << 63

_MAX_INT32 = (1 << 31) - 1
"""The largest `top_k` that an int32 tensor can hold, beyond any vocabulary."""

_MIN_TEMPERATURE = 1e-30
"""Minimum sampling temperature. Lower values are greedy, because the division would overflow."""

_MAX_TEMPERATURE = 1e38
"""Maximum temperature, about the largest float32. Logits vanish at this temperature."""


def draw_tokens(plan: StepPlan, logits: Tensor, verify: Verify) -> Tensor:
    """Return the token of every row, on the device of the logits: int64 [rows].

    Both verification methods accept a draft that equals the token of its row.

    Args:
        plan: the work of each sequence.
        logits: float32 [rows, vocab_size], contiguous, with `num_samples` rows for each sequence.
        verify: the verification method.
    """
    greedy = all(_temperature(work.sequence.request.sampling) == 0 for work in plan.work)
    # On a GPU argmax may return any of several equal logits.
    if not len(logits) or (greedy and not logits.is_cuda):
        return logits.argmax(dim=1)
    rows = row_sampling(plan, logits.device)
    if verify == "rejection" and needs_rejection(plan):
        return _draw_by_rejection(plan, logits, rows)
    return _sample(logits, rows)


def needs_rejection(plan: StepPlan) -> bool:
    """Return whether a plan has sampled drafts, for which rejection differs from coupling."""
    return any(map(_needs_rejection, plan.work))


def _sample(logits: Tensor, rows: RowSampling) -> Tensor:
    if logits.is_cuda:
        from draftgate.backends.engine.kernels import sample_verify

        return sample_verify.sample(logits, rows)
    return sample(logits, rows, drawing.draw)


class Walks(NamedTuple):
    """The emitted tokens of each sequence of a step.

    Attributes:
        accepted: as for `StepResult`.
        emitted: the tokens of the first row and of the rows of accepted drafts.
    """

    accepted: list[tuple[int, ...]]
    emitted: list[tuple[int, ...]]


def walk_drafts(plan: StepPlan, tokens: Many[int]) -> Walks:
    """Return the tokens that each sequence emits: its accepted drafts and the token after them.

    Args:
        plan: the work of each sequence.
        tokens: the token of every row.
    """
    if plan.decodes_only:
        return Walks([()] * len(tokens), list(zip(tokens)))
    accepted: list[tuple[int, ...]] = []
    emitted: list[tuple[int, ...]] = []
    first = 0
    for work in plan.work:
        own = tokens[first : first + work.num_samples]
        path: tuple[int, ...] = ()
        if work.draft.token_ids:  # most sequences have no draft
            path = work.draft.accepted_places(own, per_row=True)
        accepted.append(path)
        emitted.append((*own[:1], *[own[place + 1] for place in path]))
        first += work.num_samples
    return Walks(accepted, emitted)


def row_sampling(plan: StepPlan, device: torch.device) -> RowSampling:
    """Return the sampling parameters of every row, including the rows of drafts."""
    # `torch.tensor` takes five times as long as NumPy.
    columns = SamplingColumns().of_plan(plan).items()
    return RowSampling(**{name: to_device(torch.from_numpy(c), device) for name, c in columns})


Columns = dict[str, npt.NDArray[Any]]
"""Fields of `RowSampling` as arrays in main memory."""


class SamplingColumns:
    """The sampling parameters of steps.

    Consecutive steps mostly have the same sequences, whose parameters do not change.
    """

    def __init__(self) -> None:
        self._sequences: tuple[list[SamplingParams], list[int]] = [], []
        self._by_sequence: Columns = _parameters([], [])

    def of_plan(self, plan: StepPlan) -> Columns:
        """Return the columns of a step, with an entry for each sampled row."""
        sampling = [work for work in plan.work if work.samples]
        sequences = (
            [work.sequence.request.sampling for work in sampling],
            [work.sequence.choice for work in sampling],
        )
        # The lists mostly have the same objects, which Python compares by identity first.
        if sequences != self._sequences:
            self._sequences, self._by_sequence = sequences, _parameters(*sequences)
        columns = self._by_sequence
        # The token after position p uses the noise of position p + 1.
        if plan.decodes_only:
            positions = [work.start + 1 for work in sampling]
        else:
            positions, repeats = [], []
            for work in sampling:
                end, draft, rows = work.confirmed_end, work.draft, work.num_samples
                repeats.append(rows)
                if draft.is_chain:
                    positions += range(end, end + rows)
                else:
                    positions += (end, *[end + depth for depth in draft.depths])
            columns = {name: np.repeat(column, repeats) for name, column in columns.items()}
        return columns | {"position": np.array(positions, dtype=np.int32)}


def _parameters(params: list[SamplingParams], choices: list[int]) -> Columns:
    """Return the columns with an entry for each sequence."""
    return {
        "temperature": np.array([_temperature(p) for p in params], np.float32),
        "top_k": np.array([min(p.top_k, _MAX_INT32) for p in params], np.int32),
        "top_p": np.array([p.top_p for p in params], np.float32),
        "min_p": np.array([p.min_p for p in params], np.float32),
        "seed": np.array([_as_int64(p.seed) for p in params], np.int64),
        "choice": np.array(choices, np.int32),
    }


def _needs_rejection(work: SequenceWork) -> bool:
    # A draft that was not sampled has all the mass of its distribution, so p/q is p. Coupled
    # verification accepts such a draft if it equals a token drawn from p, which has the same
    # probability.
    sampled = isinstance(work.draft.distributions, Tensor)
    return sampled and _temperature(work.sequence.request.sampling) > 0


def _draw_by_rejection(plan: StepPlan, logits: Tensor, rows: RowSampling) -> Tensor:
    """Verify sampled drafts by rejection, and draw all other rows as coupled verification does."""
    rejectable = [work for work in plan.work if _needs_rejection(work)]
    has_draft = [
        _needs_rejection(work) and slot < work.num_drafts
        for work in plan.work
        for slot in range(work.num_samples)
    ]
    drafted = torch.tensor([i for i, has in enumerate(has_draft) if has], device=logits.device)
    plain = torch.tensor([i for i, has in enumerate(has_draft) if not has], device=logits.device)
    drafts = [token for work in rejectable for token in work.draft.token_ids]
    distributions = [work.draft.distributions[: work.num_drafts] for work in rejectable]  # type: ignore[index]

    tokens = torch.empty(len(logits), dtype=torch.int64, device=logits.device)
    tokens[plain] = _sample(logits[plain], rows.select(plain))
    tokens[drafted] = rejection_ref.rejection_sample(
        logits[drafted],
        rows.select(drafted),
        torch.tensor(drafts, device=logits.device),
        torch.cat(distributions),
    )
    return tokens


def _temperature(sampling: SamplingParams) -> float:
    if sampling.temperature < _MIN_TEMPERATURE:
        return 0.0
    return min(sampling.temperature, _MAX_TEMPERATURE)


def _as_int64(seed: int) -> int:
    """Return the signed 64-bit integer that has the same bits as this unsigned integer."""
    return seed - (1 << 64) if seed & _SIGN_BIT else seed
