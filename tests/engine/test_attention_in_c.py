"""Attention in C, compared with torch, and its rows alone and together."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.inputs import AttentionSpan, AttentionSpans, StepInputs
from tests.engine.test_operators import DTYPES, needs_gcc, torch_and_native

SHAPES = ((4, 2, 16), (8, 4, 32), (3, 1, 48), (9, 3, 64), (2, 2, 80), (4, 1, 256))
"""Query heads, KV heads and head_dim."""

PAGES, PAGE_TOKENS, TILE = 48, 16, 256

pytestmark = needs_gcc


def shaped(shape: tuple[int, int, int]) -> ModelConfig:
    """Return the shipped model's configuration with other heads."""
    heads, kv_heads, head_dim = shape
    config = read_model_config(SHIPPED_MODEL)
    return replace(config, num_heads=heads, num_kv_heads=kv_heads, head_dim=head_dim)


def step_of(*spans: AttentionSpan) -> StepInputs:
    """Return the inputs of a step, of which attention reads the spans only."""
    columns = AttentionSpans()
    for span in spans:
        columns.add(span)
    rows = torch.zeros(sum(span.rows for span in spans), dtype=torch.int64)
    return StepInputs(rows, rows, rows, columns, rows[:0], 0)


def memory_of(config: ModelConfig, dtype: torch.dtype) -> Tensor:
    """Return a layer's keys and values of all slots."""
    generator = torch.Generator().manual_seed(config.head_dim)
    slots = PAGES * PAGE_TOKENS + TILE
    shape = (2 * config.num_kv_heads, slots, config.head_dim)
    return torch.randn(shape, generator=generator).to(dtype)


def queries_of(config: ModelConfig, rows: int, dtype: torch.dtype) -> Tensor:
    """Return scaled queries that depend only on the shape."""
    generator = torch.Generator().manual_seed(rows)
    shape = (rows, config.num_heads, config.head_dim)
    return (torch.randn(shape, generator=generator) * config.head_dim**-0.5).to(dtype)


def pages_of(seed: int, count: int) -> list[int]:
    """Return pages in no order."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randperm(PAGES, generator=generator)[:count].tolist()


SPANS = (
    AttentionSpan(70, 230, pages_of(1, 19)),  # crosses the border of a tile
    AttentionSpan(1, 517, pages_of(2, 33)),
    AttentionSpan(9, 0, pages_of(3, 1)),
    AttentionSpan(3, 261, pages_of(4, 17), 258, (700, 655, 690, 702, 641, 666)),  # a branch
)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_attention_equals_that_of_torch(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    """A prefill, decodes and a branch of a draft tree have the attention of torch."""
    config = replace(shaped(shape), windows=(window,))
    inputs, memory = step_of(*SPANS), memory_of(config, dtype)
    queries = queries_of(config, len(inputs.positions), dtype)
    expected, found = (
        operators.attend(operators.begin(inputs), queries, memory, window)
        for operators in torch_and_native(config, dtype)
    )
    tolerance = 1e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(found, expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_rows_of_attention_have_the_same_bits_in_chunks_of_any_size(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None
) -> None:
    """A row has the same bits alone, with few rows, and with the rows of a long prefill."""
    config = shaped(shape)
    rows, start, pages = 90, 220, pages_of(5, 20)
    memory, queries = memory_of(config, dtype), queries_of(config, rows, dtype)
    _, native = torch_and_native(config, dtype)

    def in_chunks(size: int) -> Tensor:
        parts = []
        for first in range(0, rows, size):
            count = min(size, rows - first)
            inputs = step_of(AttentionSpan(count, start + first, pages))
            own = queries[first : first + count].contiguous()
            parts.append(native.attend(native.begin(inputs), own, memory, window))
        return torch.cat(parts)

    alone = in_chunks(1)
    for size in (2, 3, 7, 16, 33, rows):
        assert torch.equal(in_chunks(size), alone)
