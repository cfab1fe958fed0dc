"""Seeded inputs for the tests of sampling, and a comparison of sampled tokens."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from draftgate.backends.engine.kernels import noise
from draftgate.backends.engine.kernels.sample_verify_ref import RowSampling, filtered_scores


def row_sampling(
    rows: int,
    *,
    temperature: float = 1.0,
    top_k: int = 0,
    top_p: float = 1.0,
    min_p: float = 0.0,
    seed: int = 0,
    first_position: int = 0,
) -> RowSampling:
    """Return equal parameters for rows at consecutive positions."""
    return RowSampling(
        temperature=torch.full((rows,), temperature),
        top_k=torch.full((rows,), top_k, dtype=torch.int32),
        top_p=torch.full((rows,), top_p),
        min_p=torch.full((rows,), min_p),
        seed=torch.full((rows,), seed, dtype=torch.int64),
        choice=torch.zeros(rows, dtype=torch.int32),
        position=torch.arange(first_position, first_position + rows, dtype=torch.int32),
    )


def mixed_row_sampling(rows: int, seed: int) -> RowSampling:
    """Return rows with random parameters, in which greedy, plain and filtered rows alternate."""
    generator = torch.Generator().manual_seed(seed)

    def pick(values: Sequence[float], dtype: torch.dtype) -> torch.Tensor:
        index = torch.randint(len(values), (rows,), generator=generator)
        return torch.tensor(values, dtype=dtype)[index]

    return RowSampling(
        temperature=pick([0.0, 0.7, 1.0, 2.5], torch.float32),
        top_k=pick([0, 0, 1, 5, 300, 2000, 1 << 20], torch.int32),
        top_p=pick([1.0, 1.0, 0.9, 0.5, 0.999, 1e-6, 0.0], torch.float32),
        min_p=pick([0.0, 0.0, 0.05, 0.5, 1.0], torch.float32),
        seed=torch.randint(-(2**63), 2**63 - 1, (rows,), generator=generator),
        choice=torch.randint(4, (rows,), generator=generator, dtype=torch.int32),
        position=torch.randint(1 << 20, (rows,), generator=generator, dtype=torch.int32),
    )


def random_logits(rows: int, vocab: int, seed: int) -> torch.Tensor:
    """Return logits with many ties in every second row and forbidden tokens in every fifth."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, vocab), generator=generator) * 3
    logits[::2] = (logits[::2] * 2).round() / 2
    forbidden = torch.rand((rows, vocab), generator=generator) < 0.5
    forbidden[:, vocab // 2] = False
    logits[::5] = logits[::5].masked_fill(forbidden[::5], -torch.inf)
    return logits


def to_device(value: Any, device: str) -> Any:
    """Move a tensor, or a tuple of tensors, to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, RowSampling):
        return RowSampling(*(tensor.to(device) for tensor in value))
    return tuple(to_device(item, device) for item in value)


def score_gap(logits: torch.Tensor, rows: RowSampling, row: int, other: int) -> float:
    """Return the difference between the best score of a row and the score of a token, on
    the CPU."""
    index = torch.tensor([row])
    one = rows.select(index)
    if float(one.temperature) == 0:
        scores = logits[index]
    else:
        scores = filtered_scores(logits[index], one) + noise.gumbel(
            one.seed, one.choice, one.position, noise.PURPOSE_OUTPUT, logits.shape[1]
        )
    return float(scores.max() - scores[0, other])


def random_masks(rows: int, words: int, seed: int) -> torch.Tensor:
    """Return random token masks, int32 [rows, words], with words of only zeros and only ones."""
    generator = torch.Generator().manual_seed(seed)
    limits = torch.iinfo(torch.int32)
    masks = torch.randint(limits.min, limits.max, (rows, words), generator=generator)
    masks[:, 1::5], masks[:, 2::5] = 0, -1
    return masks.to(torch.int32)
