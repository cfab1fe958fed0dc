"""Every Triton kernel compiles for a Hopper GPU, on machines without one."""

from __future__ import annotations

import pytest

pytest.importorskip("triton")

from backends.engine.kernels import noise_triton, sample_verify
from tests.kernels.compiling import compile_for_hopper

_ROW_PARAMETERS = {"temperature_ptr": "*fp32", "row_stride": "i32", "vocab": "i32"}


@pytest.mark.parametrize(("kind", "out"), [(0, "*i64"), (1, "*fp32"), (2, "*fp32")])
def test_noise_kernel_compiles(kind: int, out: str) -> None:
    """The noise kernel compiles for words, uniforms and Gumbel noise."""
    types = {
        "out_ptr": out,
        "seed_ptr": "*i64",
        "choice_ptr": "*i32",
        "position_ptr": "*i32",
        "purpose": "i32",
        "num_tokens": "i32",
    }
    compile_for_hopper(noise_triton._noise_kernel, types, {"KIND": kind, "TILE": 1024})


def test_gumbel_uses_an_accurate_logarithm() -> None:
    """The compiled noise has no lg2.approx, whose error near u = 1 would make infinities."""
    types = {
        "out_ptr": "*fp32",
        "seed_ptr": "*i64",
        "choice_ptr": "*i32",
        "position_ptr": "*i32",
        "purpose": "i32",
        "num_tokens": "i32",
    }
    compiled = compile_for_hopper(noise_triton._noise_kernel, types, {"KIND": 2, "TILE": 1024})
    assert "lg2.approx" not in compiled.asm["ptx"]


def test_cutoff_kernel_compiles() -> None:
    """The search for cut-offs compiles."""
    types = {
        **_ROW_PARAMETERS,
        "logits_ptr": "*fp32",
        "top_k_ptr": "*i32",
        "top_p_ptr": "*fp32",
        "min_p_ptr": "*fp32",
        "cut_logit_ptr": "*fp32",
        "cut_id_ptr": "*i32",
        "floor_ptr": "*fp32",
    }
    constants = {"PIVOTS": 8, "TILE": 2048}
    compile_for_hopper(sample_verify._cutoff_kernel, types, constants, num_warps=8)


def test_tile_winner_kernel_compiles() -> None:
    """The race inside a vocabulary tile compiles."""
    types = {
        **_ROW_PARAMETERS,
        "logits_ptr": "*fp32",
        "seed_ptr": "*i64",
        "choice_ptr": "*i32",
        "position_ptr": "*i32",
        "cut_logit_ptr": "*fp32",
        "cut_id_ptr": "*i32",
        "floor_ptr": "*fp32",
        "tile_max_ptr": "*fp32",
        "tile_arg_ptr": "*i32",
    }
    compiled = compile_for_hopper(
        sample_verify._tile_winner_kernel, types, {"TILE": 4096}, num_warps=8
    )
    assert "lg2.approx" not in compiled.asm["ptx"]


def test_row_winner_kernel_compiles() -> None:
    """The race between the tiles of a row compiles."""
    types = {
        "tile_max_ptr": "*fp32",
        "tile_arg_ptr": "*i32",
        "num_tiles": "i32",
        "token_ptr": "*i64",
    }
    compile_for_hopper(sample_verify._row_winner_kernel, types, {"TILES": 64})
