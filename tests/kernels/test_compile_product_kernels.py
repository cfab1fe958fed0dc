"""The products with quantised weights, compiled for GPUs without a GPU."""

from __future__ import annotations

from functools import partial

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from draftgate.backends.engine.kernels.fp8_product import fp8_product, fp8_rows
from draftgate.backends.engine.kernels.int4_product import int4_product
from tests.kernels.compiling import (
    BLACKWELL,
    HOPPER,
    Launch,
    assert_lean,
    launches_of,
    meta_tensor,
    variants_of,
)

# Outputs and inputs of the four products of a layer of Llama-3.1-8B.
_WEIGHTS = [(6144, 4096), (4096, 4096), (28672, 4096), (4096, 14336)]
_ROWS = [1, 64, 512]
_TARGETS = pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["sm_90", "sm_100"])


def _fp8(rows: int, outputs: int, inputs: int, group: int) -> None:
    groups, fp8 = -(-inputs // group), torch.float8_e4m3fn
    fp8_product(
        meta_tensor(rows, inputs, dtype=fp8),
        meta_tensor(rows, groups),
        meta_tensor(outputs, inputs, dtype=fp8),
        meta_tensor(outputs, groups),
        group,
        None,
        torch.bfloat16,
    )


def _int4(rows: int, outputs: int, inputs: int, dtype: torch.dtype) -> None:
    groups = inputs // 128
    int4_product(
        meta_tensor(rows, inputs, dtype=dtype),
        meta_tensor(outputs, inputs // 2, dtype=torch.uint8),
        meta_tensor(outputs, groups, dtype=torch.float16),
        meta_tensor(outputs, groups, dtype=torch.uint8),
        128,
        meta_tensor(outputs),
        dtype,
    )


def _assert_on_tensor_cores(launch: Launch, rows: int, target: GPUTarget) -> None:
    """Tiles of 64 rows have the instructions of the GPU's generation, and share multiprocessors."""
    assert_lean([launch], 2 if rows <= 64 else 1)
    own = "wgmma" if target is HOPPER else "tcgen05"
    assert own in launch.ptx or "mma.sync" in launch.ptx
    assert rows < 64 or own in launch.ptx


@_TARGETS
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), _WEIGHTS)
@pytest.mark.parametrize("blocks", [True, False])
def test_fp8_products_do_not_spill(
    blocks: bool, outputs: int, inputs: int, rows: int, target: GPUTarget
) -> None:
    """Products in FP8 fit the registers, with scales per block and per output."""
    group = 128 if blocks else inputs
    (launch,) = launches_of(partial(_fp8, rows, outputs, inputs, group), target)
    _assert_on_tensor_cores(launch, rows, target)
    assert ("e4m3" if target is HOPPER else "kind::f8f6f4") in launch.ptx


@_TARGETS
@pytest.mark.parametrize("rows", _ROWS)
@pytest.mark.parametrize(("outputs", "inputs"), _WEIGHTS)
@pytest.mark.parametrize(
    "dtype",
    [torch.bfloat16, pytest.param(torch.float16, marks=pytest.mark.long), torch.float32],
)
def test_int4_products_do_not_spill(
    dtype: torch.dtype, outputs: int, inputs: int, rows: int, target: GPUTarget
) -> None:
    """Products with 4 bits fit the registers in every dtype of the rows."""
    (launch,) = launches_of(partial(_int4, rows, outputs, inputs, dtype), target)
    if dtype is torch.float32:
        assert_lean([launch], 2)
    else:
        _assert_on_tensor_cores(launch, rows, target)


@_TARGETS
@pytest.mark.parametrize("width", [4096, 14336])
@pytest.mark.parametrize("blocks", [True, False])
def test_rounding_to_fp8_does_not_spill(blocks: bool, width: int, target: GPUTarget) -> None:
    """The rounding of rows fits the registers, with a scale per block and per row."""
    x = meta_tensor(64, width, dtype=torch.bfloat16)
    assert_lean(launches_of(partial(fp8_rows, x, 128 if blocks else width), target), 2)


def test_products_have_few_variants() -> None:
    """The number of rows selects one of two or three tiles, and no other kernel."""
    sizes = (1, 2, 15, 16, 17, 48, 64, 65, 512, 2048)
    assert variants_of(lambda rows: _fp8(rows, 4096, 4096, 128), sizes) == {
        "_fp8_product_kernel": 2
    }
    assert variants_of(lambda rows: _int4(rows, 4096, 4096, torch.bfloat16), sizes) == {
        "_int4_product_kernel": 3
    }
