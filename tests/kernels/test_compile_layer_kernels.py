"""The layer kernels compile for a Hopper GPU, on machines without one: shapes of an 8B Llama."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

import triton
from triton.compiler import ASTSource

from backends.engine.kernels import kv_move, rms_norm, rope_kv, swiglu
from tests.kernels.compiling import HOPPER, compile_for_hopper

_DTYPES = ["*bf16", "*fp32"]
_ROPE_SIZES = {"NUM_HEADS": 32, "KV_HEADS": 8, "HALF": 64, "HALF_PAD": 64, "HEADS": 8}


def _rope_arguments(dtype: str, *, normed: bool) -> tuple[dict[str, str], dict[str, Any]]:
    """Returns types and constants of the kernel that rotates."""
    data = ("query_ptr", "layer_kv_ptr", "qkv_ptr", "cos_ptr", "sin_ptr")
    types = {
        **dict.fromkeys(data, dtype),
        **dict.fromkeys(("positions_ptr", "slots_ptr"), "*i64"),
        **dict.fromkeys(("eps", "query_scale"), "fp32"),
        "strip_stride": "i32",
    }
    if normed:
        return types | {"qk_norm_ptr": dtype}, dict(_ROPE_SIZES)
    return types, _ROPE_SIZES | {"qk_norm_ptr": None}


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("hidden", [576, 4096])
def test_norm_kernels_compile(dtype: str, hidden: int) -> None:
    """The norm compiles alone and with the residual, also for sizes that are no power of two."""
    constants = {"HIDDEN": hidden, "BLOCK": triton.next_power_of_2(hidden)}
    types = dict.fromkeys(("out_ptr", "x_ptr", "weight_ptr"), dtype) | {"eps": "fp32"}
    compile_for_hopper(rms_norm._rms_norm_kernel, types, constants, num_warps=8)
    types |= dict.fromkeys(("summed_ptr", "residual_ptr"), dtype)
    compile_for_hopper(rms_norm._add_rms_norm_kernel, types, constants, num_warps=8)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("normed", [False, True])
def test_rope_kernel_compiles(dtype: str, normed: bool) -> None:
    """The rotation compiles with and without head norms."""
    compile_for_hopper(rope_kv._rope_kv_kernel, *_rope_arguments(dtype, normed=normed), num_warps=2)


@pytest.mark.parametrize("dtype", _DTYPES)
def test_swiglu_kernel_compiles(dtype: str) -> None:
    """The gated activation compiles."""
    types = {"out_ptr": dtype, "gate_up_ptr": dtype, "intermediate": "i32"}
    compile_for_hopper(swiglu._swiglu_kernel, types, {"TILE": 1024})


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("stride", ["i32", "i64"])
def test_move_kernel_compiles(dtype: str, stride: str) -> None:
    """The walk of moves compiles, also where a strip has more than 2**31 elements."""
    types = {
        "memory_ptr": dtype,
        "sources_ptr": "*i64",
        "targets_ptr": "*i64",
        "num_strips": "i32",
        "strip_stride": stride,
    }
    constants = {"MAX_DEPTH": 9, "DEPTH_PAD": 16, "HEAD_DIM": 128, "HEAD_PAD": 128, "STRIPS": 16}
    compile_for_hopper(kv_move._kv_move_kernel, types, constants)


def test_rotation_rounds_its_products() -> None:
    """With the options of the launch no product of the rotation is fused into a sum."""
    types, constants = _rope_arguments("*bf16", normed=False)
    names = [parameter.name for parameter in rope_kv._rope_kv_kernel.params]
    source = ASTSource(
        fn=rope_kv._rope_kv_kernel,
        signature={name: types.get(name, "constexpr") for name in names},
        constexprs=constants,
    )
    compiled = triton.compile(source, target=HOPPER, options=rope_kv.LAUNCH_OPTIONS)
    assert "fma.rn" not in compiled.asm["ptx"]
