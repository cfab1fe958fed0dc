"""The operators of a CPU over keys and values in FP8 (E4M3)."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import AttentionSpans, StepInputs
from draftgate.backends.engine.operators.base import Operators, rotary_tables
from draftgate.backends.engine.operators.native import native_operators
from draftgate.backends.engine.operators.reference import TorchOperators
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from tests.engine.test_attention_in_c import PAGES, SHAPES, SPANS, queries_of, shaped, step_of
from tests.engine.test_operators import DTYPES, needs_gcc, random

SLOTS = (PAGES + 16) * 16


def operators_of(config: ModelConfig, dtype: torch.dtype, in_c: bool) -> Operators:
    """Return the operators in C or in torch."""
    tables = rotary_tables(config, 64, dtype)
    if not in_c:
        return TorchOperators(config, tables)
    native = native_operators(config, tables, dtype)
    assert native is not None
    return native


def numbers() -> Tensor:
    """Return the finite numbers of E4M3, ascending, as float32."""
    codes = torch.arange(256, dtype=torch.uint8)
    found = codes.view(FP8).float()
    return found[found.isfinite()].sort().values


in_torch_and_c = pytest.mark.parametrize("in_c", [False, pytest.param(True, marks=needs_gcc)])


@in_torch_and_c
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("shape", SHAPES[:3], ids=str)
def test_attention_to_fp8_has_the_bits_of_attention_to_the_same_numbers(
    shape: tuple[int, int, int], dtype: torch.dtype, window: int | None, in_c: bool
) -> None:
    """Attention reads every number of E4M3 exactly."""
    config = replace(shaped(shape), windows=(window,))
    memory_shape = (2 * config.num_kv_heads, SLOTS, config.head_dim)
    found = numbers()
    picked = torch.randint(len(found), memory_shape, generator=torch.Generator().manual_seed(1))
    memory = found[picked].to(FP8)
    assert len(memory.float().unique()) == len(found) - 1  # 0 and -0 are equal
    inputs = step_of(*SPANS)
    queries = queries_of(config, len(inputs.positions), dtype) / 64
    operators = operators_of(config, dtype, in_c)
    step = operators.begin(inputs)
    rounded, wide = (
        operators.attend(step, queries, kv, window) for kv in (memory, memory.to(dtype))
    )
    assert torch.equal(rounded, wide)


@in_torch_and_c
@pytest.mark.parametrize("normed", [False, True])
def test_keys_and_values_are_rounded_once_as_they_are_written(in_c: bool, normed: bool) -> None:
    """The memory holds the nearest numbers of E4M3 to the float32 keys and values.

    The values are ties, neighbours of ties, subnormals, and numbers beyond the largest one.
    """
    config = shaped((8, 4, 32))
    exact = numbers()
    ties = (exact[1:] + exact[:-1]) / 2
    around = [torch.nextafter(ties, torch.tensor(sign * torch.inf)) for sign in (-1, 1)]
    beyond = torch.tensor([1e-9, 449.0, 464.0, 465.0, 1e30, -1e30])
    values = torch.cat([exact, ties, *around, beyond])
    rows = -(-len(values) // (4 * 32))
    fused = random(rows, 16 * 32, dtype=torch.float32, scale=3.0)
    padded = torch.nn.functional.pad(values, (0, rows * 128 - len(values)))
    fused[:, -128:] = padded.view(-1, 128)
    places = torch.arange(rows)
    inputs = StepInputs(places, places, places.flip(0), AttentionSpans(), places[:0], 0)
    weight = random(12, 32, dtype=torch.float32) if normed else None
    operators = operators_of(config, torch.float32, in_c)
    found = []
    for dtype in (FP8, torch.float32):
        layer_kv = torch.full((8, 16, 32), 7.0).to(dtype)
        queries = operators.rotate_and_store(
            operators.begin(inputs), fused.clone(), layer_kv, weight
        )
        found.append((queries, layer_kv))
    (queries, stored), (expected_queries, kv) = found
    expected = kv.clamp(-448, 448).to(FP8)
    assert torch.equal(queries, expected_queries)
    assert torch.equal(stored.view(torch.uint8), expected.view(torch.uint8))
    assert (stored[:, rows:].float() == 7.0).all()
