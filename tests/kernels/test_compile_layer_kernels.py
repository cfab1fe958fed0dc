"""The layer kernels at the shapes of an 8B Llama, compiled for a Hopper GPU without a GPU."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from draftgate.backends.engine.kernels.kv_move import kv_move
from draftgate.backends.engine.kernels.rms_norm import add_rms_norm, rms_norm
from draftgate.backends.engine.kernels.rope_kv import rope_kv
from draftgate.backends.engine.kernels.swiglu import geglu, swiglu
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from tests.kernels.compiling import (
    BLACKWELL,
    HOPPER,
    Launch,
    assert_lean,
    launches_of,
    meta_tensor,
)

_ROWS = 320
_DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("hidden", "programs"), [(576, 8), (4096, 4), (8192, 2)])
def test_norms_do_not_spill(hidden: int, programs: int, dtype: torch.dtype) -> None:
    """A row with and without its residual fits the registers, and programs run concurrently."""
    x, weight = meta_tensor(_ROWS, hidden, dtype=dtype), meta_tensor(hidden, dtype=dtype)
    assert_lean(launches_of(lambda: rms_norm(x, weight, 1e-5)), programs)
    assert_lean(launches_of(lambda: add_rms_norm(x, x, weight, 1e-5)), programs)


def _rope_launches(
    dtype: torch.dtype,
    head_dim: int,
    *,
    normed: bool,
    turned: int | None = None,
    kv_dtype: torch.dtype | None = None,
    target: GPUTarget = HOPPER,
) -> list[Launch]:
    table = meta_tensor(8192, (turned or head_dim) // 2, dtype=dtype)
    index = meta_tensor(_ROWS, dtype=torch.int64)
    return launches_of(
        lambda: rope_kv(
            meta_tensor(_ROWS, 48 * head_dim, dtype=dtype),
            index,
            index,
            table,
            table,
            meta_tensor(16, 1 << 20, head_dim, dtype=kv_dtype or dtype),
            qk_norm=meta_tensor(40, head_dim, dtype=dtype) if normed else None,
            eps=1e-6,
        ),
        target,
    )


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128, 256])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_does_not_spill(dtype: torch.dtype, head_dim: int, normed: bool) -> None:
    """A multiprocessor runs 16 programs of the rotation with and without head norms."""
    assert_lean(_rope_launches(dtype, head_dim, normed=normed), programs=16)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_partial_rotation_does_not_spill(dtype: torch.dtype) -> None:
    """A multiprocessor runs 16 programs of the rotation of 96 of 128 dimensions (Phi-4-mini)."""
    assert_lean(_rope_launches(dtype, 128, normed=False, turned=96), programs=16)


@pytest.mark.parametrize(
    ("dtype", "target"),
    [(torch.bfloat16, HOPPER), (torch.float32, HOPPER), (torch.bfloat16, BLACKWELL)],
)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_rotation_to_fp8_does_not_spill(
    head_dim: int, dtype: torch.dtype, target: GPUTarget
) -> None:
    """A multiprocessor runs 16 programs that round keys and values to FP8."""
    launches = _rope_launches(dtype, head_dim, normed=True, kv_dtype=FP8, target=target)
    assert_lean(launches, programs=16)


def test_rotation_rounds_its_products() -> None:
    """The launch options keep the compiler from fusing products of the rotation with sums."""
    (launch,) = _rope_launches(torch.bfloat16, 128, normed=False)
    assert "fma.rn" not in launch.ptx


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("intermediate", [1536, 14336])
@pytest.mark.parametrize("gate", [swiglu, geglu])
def test_gate_does_not_spill(
    gate: Callable[[torch.Tensor], torch.Tensor], dtype: torch.dtype, intermediate: int
) -> None:
    """A multiprocessor runs 16 programs of the gated activation."""
    gate_up = meta_tensor(_ROWS, 2 * intermediate, dtype=dtype)
    assert_lean(launches_of(lambda: gate(gate_up)), programs=16)


@pytest.mark.parametrize("dtype", [*_DTYPES, torch.uint8])
@pytest.mark.parametrize("slots", [1 << 20, 1 << 25])
@pytest.mark.parametrize("max_depth", [4, 64])
def test_moves_do_not_spill(max_depth: int, slots: int, dtype: torch.dtype) -> None:
    """A multiprocessor runs 8 programs of the moves, also with strips of over 2**31 elements or
    bytes."""
    memory = meta_tensor(512, slots, 128, dtype=dtype)
    places = meta_tensor(64, max_depth, dtype=torch.int64)
    assert_lean(launches_of(lambda: kv_move(memory, places, places)), programs=8)
