"""Inputs shared by the tests of kernels, from seeded generators, and how results are compared."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch

from backends.engine.kernels import noise
from backends.engine.kernels.sample_verify_ref import RowSampling, filtered_scores


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
    """Returns equal parameters for rows at consecutive positions."""
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
    """Returns rows with independently drawn parameters: greedy, plain and filtered ones mixed."""
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
    """Returns logits of which every second row has many ties and every fifth forbidden tokens."""
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn((rows, vocab), generator=generator) * 3
    logits[::2] = (logits[::2] * 2).round() / 2
    forbidden = torch.rand((rows, vocab), generator=generator) < 0.5
    forbidden[:, vocab // 2] = False
    logits[::5] = logits[::5].masked_fill(forbidden[::5], -torch.inf)
    return logits


def to_device(value: Any, device: str) -> Any:
    """Moves a tensor, or a tuple of tensors, to a device."""
    if isinstance(value, torch.Tensor):
        return value.to(device)
    if isinstance(value, RowSampling):
        return RowSampling(*(tensor.to(device) for tensor in value))
    return tuple(to_device(item, device) for item in value)


def score_gap(logits: torch.Tensor, rows: RowSampling, row: int, other: int) -> float:
    """Returns by how much a token falls short of the best score of a row (CPU tensors)."""
    index = torch.tensor([row])
    one = rows.select(index)
    if float(one.temperature) == 0:
        scores = logits[index]
    else:
        scores = filtered_scores(logits[index], one) + noise.gumbel(
            one.seed, one.choice, one.position, noise.PURPOSE_OUTPUT, logits.shape[1]
        )
    return float(scores.max() - scores[0, other])


@dataclass(frozen=True)
class AttentionCase:
    """Arguments of paged attention on the CPU; unused cache slots hold NaN."""

    query: torch.Tensor
    key_cache: torch.Tensor
    value_cache: torch.Tensor
    cu_query_lens: torch.Tensor
    context_lens: torch.Tensor
    block_tables: torch.Tensor

    def arguments(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """Returns the positional arguments on a device."""
        fields = (
            self.query,
            self.key_cache,
            self.value_cache,
            self.cu_query_lens,
            self.context_lens,
            self.block_tables,
        )
        return tuple(field.to(device) for field in fields)

    @property
    def scale(self) -> float:
        """The usual scale of the scores."""
        return float(self.query.shape[2]) ** -0.5

    def decode_of(self, sequence: int, index: int) -> AttentionCase:
        """Returns the batch that has only query token ``index`` of a sequence, as a decode."""
        begin, end = self.cu_query_lens[sequence : sequence + 2].tolist()
        context = int(self.context_lens[sequence]) - (end - begin) + index + 1
        return AttentionCase(
            self.query[begin + index : begin + index + 1],
            self.key_cache,
            self.value_cache,
            torch.tensor([0, 1], dtype=torch.int32),
            torch.tensor([context], dtype=torch.int32),
            self.block_tables[sequence : sequence + 1],
        )


def attention_case(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    *,
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    block_size: int = 16,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> AttentionCase:
    """Returns a ragged batch whose sequences own shuffled blocks."""
    generator = torch.Generator().manual_seed(seed)
    blocks_of = [-(-context // block_size) for context in context_lens]
    total = sum(blocks_of)
    shuffled = torch.randperm(total + 3, generator=generator)
    tables = torch.full((len(context_lens), max(blocks_of)), -1, dtype=torch.int32)
    shape = (total + 3, block_size, kv_heads, head_dim)
    caches = [torch.full(shape, torch.nan, dtype=dtype) for _ in range(2)]
    used = 0
    for sequence, (context, count) in enumerate(zip(context_lens, blocks_of, strict=True)):
        own = shuffled[used : used + count]
        used += count
        tables[sequence, :count] = own.to(torch.int32)
        slots = torch.arange(context)
        for cache in caches:
            data = torch.randn((context, kv_heads, head_dim), generator=generator)
            cache[own[slots // block_size], slots % block_size] = data.to(dtype)
    query = torch.randn((sum(query_lens), query_heads, head_dim), generator=generator).to(dtype)
    cu_query_lens = torch.tensor([0, *query_lens]).cumsum(0).to(torch.int32)
    context = torch.tensor(context_lens, dtype=torch.int32)
    return AttentionCase(query, caches[0], caches[1], cu_query_lens, context, tables)
