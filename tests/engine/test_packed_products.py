"""Products with matrices in the block formats of GGUF, in C and in torch."""

from __future__ import annotations

from collections.abc import Iterator
from fractions import Fraction
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor

from draftgate.backends.engine.gguf.blocks import unpack
from draftgate.backends.engine.operators import compiler, packed
from draftgate.backends.engine.operators.compiler import compiler_version
from draftgate.backends.engine.operators.packed import PACKED_TYPES, PackedMatrix, multiply
from draftgate.backends.engine.operators.packed_ref import (
    fused,
    packed_product,
    round_rows,
    unpack_blocks,
)
from draftgate.backends.engine.quantisation.packed import quantised
from tests.engine.packed_blocks import KINDS, random_rows

ROWS = (*range(1, 21), 33)
SHAPES = ((50, 512), (16, 256), (3, 768))
"""Outputs that do and do not fill groups of 4, 8 or 16, and inputs."""

FLAGS = {"x86-64-v2": "sse4_2", "x86-64-v3": "avx2", "x86-64-v4": "avx512bw"}

needs_gcc = pytest.mark.skipif(compiler_version() is None, reason="needs gcc")


def supports(march: str) -> bool:
    """Return whether this processor runs code for an architecture."""
    info = Path("/proc/cpuinfo")
    return march == "native" or (info.exists() and f" {FLAGS[march]} " in info.read_text())


@pytest.fixture(
    params=[
        "native",
        "x86-64-v3",
        pytest.param("x86-64-v4", marks=pytest.mark.long),
        pytest.param("x86-64-v2", marks=pytest.mark.long),
    ]
)
def march(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Compile the operators for an architecture."""
    if not supports(request.param):
        pytest.skip(f"this processor does not run code for {request.param}")
    monkeypatch.setattr(compiler, "march", lambda: request.param)
    caches = (compiler.compiled, packed._library)
    for cache in caches:
        cache.cache_clear()
    yield
    for cache in caches:
        cache.cache_clear()


def rows_of(count: int, width: int) -> Tensor:
    """Return rows with blocks of zeros, of tiny and of large numbers."""
    x = torch.randn(count, width, generator=torch.Generator().manual_seed(count))
    x[:, :32] = 0
    x[0, 32:64] *= 1e-36
    x[-1, 64:96] *= 1e12
    return x


@pytest.mark.parametrize("name", sorted(PACKED_TYPES))
def test_numbers_of_blocks_are_the_weights(name: str) -> None:
    """Codes times scales plus minima are the weights, without a rounding error."""
    rows = random_rows(KINDS[name], 7, 512)
    blocks = unpack_blocks(KINDS[name], rows)
    scales = blocks.scales.repeat_interleave(512 // blocks.scales.shape[1], 1)
    found = blocks.codes * scales
    if blocks.minima is not None:
        found += blocks.minima.repeat_interleave(32, 1)
    assert torch.equal(found, unpack(KINDS[name], rows))


@needs_gcc
@pytest.mark.usefixtures("march")
@pytest.mark.parametrize("name", sorted(PACKED_TYPES))
def test_products_in_c_have_the_bits_of_the_reference(name: str) -> None:
    """Products of any number of rows and outputs are those of the reference, bit for bit, on every
    instruction set. So a row does not depend on the other rows."""
    for outputs, width in SHAPES:
        rows = random_rows(KINDS[name], outputs, width)
        bias = torch.linspace(-1, 1, outputs)
        matrix = PackedMatrix(KINDS[name], rows, torch.float32, bias)
        blocks = unpack_blocks(KINDS[name], rows)
        for count in ROWS:
            x = rows_of(count, width)
            expected = packed_product(x, blocks, bias)
            assert torch.equal(multiply(x, [matrix], wide=False), expected)


@needs_gcc
@pytest.mark.parametrize("name", ["Q4_1", "Q8_0"])
def test_products_of_bfloat16_rows_are_rounded_once(name: str) -> None:
    """Rows in bfloat16 have the float32 product of their numbers, or this product rounded."""
    rows, x = random_rows(KINDS[name], 50, 512), rows_of(9, 512).bfloat16()
    matrix = PackedMatrix(KINDS[name], rows, torch.bfloat16)
    expected = packed_product(x, unpack_blocks(KINDS[name], rows))
    assert torch.equal(multiply(x, [matrix], wide=True), expected)
    assert torch.equal(multiply(x, [matrix], wide=False), expected.bfloat16())


@needs_gcc
def test_bits_do_not_depend_on_threads() -> None:
    """One thread and three threads compute the same bits, for few rows and for many."""
    matrix = PackedMatrix(KINDS["Q5_0"], random_rows(KINDS["Q5_0"], 96, 256), torch.float32)
    threads, found = torch.get_num_threads(), []
    try:
        for count in (1, 3):
            torch.set_num_threads(count)
            found.append([multiply(rows_of(n, 256), [matrix], wide=True) for n in (1, 5, 40)])
    finally:
        torch.set_num_threads(threads)
    for one, other in zip(*found, strict=True):
        assert torch.equal(one, other)


@needs_gcc
def test_matrices_side_by_side_have_the_bits_of_each() -> None:
    """Matrices of different block types share the rounded rows."""
    parts = [
        PackedMatrix(KINDS[name], random_rows(KINDS[name], outputs, 256), torch.float32)
        for name, outputs in (("Q5_0", 40), ("Q8_0", 7), ("Q4_K", 33))
    ]
    for count in (1, 6, 19):
        x = rows_of(count, 256)
        each = [multiply(x, [part], wide=True) for part in parts]
        assert torch.equal(multiply(x, parts, wide=True), torch.cat(each, 1))


@needs_gcc
@pytest.mark.usefixtures("march")
@pytest.mark.parametrize("name", sorted(PACKED_TYPES))
def test_embedding_rows_are_the_unpacked_weights(name: str) -> None:
    """Rows of a packed embedding have the bits of the unpacked matrix."""
    rows = random_rows(KINDS[name], 50, 512)
    token_ids = torch.tensor([49, 0, 17, 17, 31])
    found = PackedMatrix(KINDS[name], rows, torch.float32).rows(token_ids)
    assert torch.equal(found, unpack(KINDS[name], rows)[token_ids])


@pytest.mark.parametrize("name", sorted(PACKED_TYPES))
def test_products_are_close_to_those_of_float32(name: str) -> None:
    """Rounding rows to int8 changes a product by less than a hundredth of its size."""
    rows, x = random_rows(KINDS[name], 64, 768), rows_of(8, 768)[:, 96:].repeat(1, 8)[:, :768]
    expected = x @ unpack(KINDS[name], rows).T
    error = packed_product(x, unpack_blocks(KINDS[name], rows)) - expected
    assert error.norm() < 0.01 * expected.norm()


def test_rows_are_rounded_to_nearest_even() -> None:
    """The largest number of a block becomes 127, and ties go to even codes."""
    x = torch.zeros(1, 32)
    x[0, :5] = torch.tensor([127.0, 0.5, 1.5, -2.5, -126.6])
    codes, scales = round_rows(x)
    assert codes[0, 0, :5].tolist() == [127, 0, 2, -2, -127]
    assert scales.tolist() == [[1.0]]


def test_fused_rounds_once() -> None:
    """The emulated instruction rounds the exact a * b + c, also where float64 lies halfway."""
    random = torch.Generator().manual_seed(0)
    a, b = (torch.randn(2000, generator=random) for _ in range(2))
    c = -a * b * (1 + torch.randn(2000, generator=random) * 2.0 ** torch.arange(-30, 10).repeat(50))
    a[:2], b[:2] = torch.tensor([1 + 2.0**-12, 1 + 2.0**-12]), 1 + 2.0**-12
    c[:2] = torch.tensor([2.0**-60, -(2.0**-60)])
    columns = (column.tolist() for column in (a, b, c, fused(a, b, c)))
    for one, other, third, found in zip(*columns, strict=True):
        exact = Fraction(one) * Fraction(other) + Fraction(third)
        near = np.float32(found)
        others = (np.nextafter(near, np.float32(way)) for way in (-np.inf, np.inf))
        error = abs(Fraction(float(near)) - exact)
        assert all(error <= abs(Fraction(float(next_to)) - exact) for next_to in others)


@pytest.mark.parametrize("name", ["Q8_0", "Q4_0"])
def test_quantised_weights_are_those_of_llama_cpp(name: str) -> None:
    """Weights are quantised to the bytes of the `gguf` package."""
    quants = pytest.importorskip("gguf.quants")
    constants = pytest.importorskip("gguf.constants")
    weights = torch.randn(40, 96, generator=torch.Generator().manual_seed(1))
    weights[0, :32], weights[1, 32:64] = 0.0, torch.arange(-16.0, 16.0)
    expected = quants.quantize(weights.numpy(), constants.GGMLQuantizationType[name])
    assert np.array_equal(quantised(KINDS[name], weights).numpy(), expected)
