"""The layer kernels compile for a Hopper GPU, on machines without one: shapes of an 8B Llama."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels.kv_move import kv_move
from draftgate.backends.engine.kernels.rms_norm import add_rms_norm, rms_norm
from draftgate.backends.engine.kernels.rope_kv import rope_kv
from draftgate.backends.engine.kernels.swiglu import swiglu
from tests.kernels.compiling import Launch, assert_lean, launches_of, on_paper

_ROWS = 320
_DTYPES = [torch.bfloat16, torch.float32]


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("hidden", "programs"), [(576, 8), (4096, 4), (8192, 2)])
def test_norms_do_not_spill(hidden: int, programs: int, dtype: torch.dtype) -> None:
    """A row fits the registers, alone and with the residual; others' loads hide its sum."""
    x, weight = on_paper(_ROWS, hidden, dtype=dtype), on_paper(hidden, dtype=dtype)
    assert_lean(launches_of(lambda: rms_norm(x, weight, 1e-5)), programs)
    assert_lean(launches_of(lambda: add_rms_norm(x, x, weight, 1e-5)), programs)


def _rope_launches(dtype: torch.dtype, head_dim: int, *, normed: bool) -> list[Launch]:
    table = on_paper(8192, head_dim // 2, dtype=dtype)
    index = on_paper(_ROWS, dtype=torch.int64)
    return launches_of(
        lambda: rope_kv(
            on_paper(_ROWS, 48 * head_dim, dtype=dtype),
            index,
            index,
            table,
            table,
            on_paper(16, 1 << 20, head_dim, dtype=dtype),
            qk_norm=on_paper(40, head_dim, dtype=dtype) if normed else None,
            eps=1e-6,
        )
    )


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("head_dim", [64, 80, 128])
@pytest.mark.parametrize("normed", [False, True])
def test_rotation_does_not_spill(dtype: torch.dtype, head_dim: int, normed: bool) -> None:
    """Heads fit the registers with and without their norms, 16 programs at a time."""
    assert_lean(_rope_launches(dtype, head_dim, normed=normed), programs=16)


def test_rotation_rounds_its_products() -> None:
    """With the options of the launch no product of the rotation is fused into a sum."""
    (launch,) = _rope_launches(torch.bfloat16, 128, normed=False)
    assert "fma.rn" not in launch.ptx


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("intermediate", [1536, 14336])
def test_gate_does_not_spill(dtype: torch.dtype, intermediate: int) -> None:
    """The gated activation fills a multiprocessor with warps."""
    gate_up = on_paper(_ROWS, 2 * intermediate, dtype=dtype)
    assert_lean(launches_of(lambda: swiglu(gate_up)), programs=16)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("slots", [1 << 20, 1 << 25])
@pytest.mark.parametrize("max_depth", [4, 64])
def test_moves_do_not_spill(max_depth: int, slots: int, dtype: torch.dtype) -> None:
    """The walk of moves is lean, also where a strip has more than 2**31 elements."""
    memory = on_paper(512, slots, 128, dtype=dtype)
    places = on_paper(64, max_depth, dtype=torch.int64)
    assert_lean(launches_of(lambda: kv_move(memory, places, places)), programs=8)
