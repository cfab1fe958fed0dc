"""Blocks of GGUF files against the reference of the `gguf` package."""

from __future__ import annotations

import gguf
import numpy as np
import pytest
import torch
from torch import Tensor

from draftgate.backends.engine.gguf.blocks import unpack
from draftgate.backends.gguf.block_types import BLOCK_TYPES, UNSUPPORTED_TYPES, BlockType

TYPES = list(BLOCK_TYPES.values())


def random_rows(kind: BlockType, rows: int, blocks: int, seed: int) -> Tensor:
    """Return uint8 [rows, row_bytes] of any bits, scales that are no numbers among them."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(
        256, (rows, blocks * kind.num_bytes), dtype=torch.uint8, generator=generator
    )


def reference(kind: BlockType, rows: Tensor) -> Tensor:
    """Return the values of rows as the `gguf` package computes them."""
    with np.errstate(invalid="ignore", over="ignore"):
        values = gguf.quants.dequantize(rows.numpy(), gguf.GGMLQuantizationType(kind.number))
    return torch.from_numpy(np.array(values, dtype=np.float32))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
@pytest.mark.parametrize("seed", range(3))
def test_values_have_the_bits_of_the_reference(kind: BlockType, seed: int) -> None:
    """Every value of random blocks equals that of `gguf.quants.dequantize`, NaN for NaN."""
    rows = random_rows(kind, 64, 12, seed)
    values, expected = unpack(kind, rows), reference(kind, rows)
    assert values.dtype is torch.float32
    assert values.shape == (64, 12 * kind.values) == expected.shape
    known = ~expected.isnan()
    assert known.float().mean() > 0.9
    assert torch.equal(values.isnan(), ~known)
    assert torch.equal(values[known].view(torch.int32), expected[known].view(torch.int32))


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_rows_are_independent(kind: BlockType) -> None:
    """A slice of rows, at any address, has the values of these rows of the matrix."""
    memory = torch.cat((torch.zeros(2, dtype=torch.uint8), random_rows(kind, 8, 2, 3).flatten()))
    rows = memory[2:].view(8, -1)
    values = unpack(kind, rows)[[5, 2]].nan_to_num()
    assert torch.equal(unpack(kind, rows[[5, 2]]).nan_to_num(), values)


@pytest.mark.parametrize("kind", TYPES, ids=lambda kind: kind.name)
def test_sizes_of_blocks_are_those_of_the_reference(kind: BlockType) -> None:
    """Number, name, values and bytes of each type are those of the `gguf` package."""
    known = gguf.GGMLQuantizationType(kind.number)
    assert known.name == kind.name
    assert gguf.GGML_QUANT_SIZES[known] == (kind.values, kind.num_bytes)
    assert kind.row_bytes(3 * kind.values) == 3 * kind.num_bytes


def test_every_type_of_the_reference_has_its_name() -> None:
    """A type that the engine does not support has a name for its error message."""
    names = {t.number: t.name for t in TYPES} | dict(UNSUPPORTED_TYPES)
    known = {t.value: t.name for t in gguf.GGMLQuantizationType}
    assert {number: names.get(number) for number in known} == known
