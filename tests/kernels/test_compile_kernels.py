"""Every Triton kernel compiles for a Hopper GPU, on machines without one."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("triton")

from backends.engine.kernels import noise_triton, paged_attention, sample_verify
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


def test_accept_walk_kernel_compiles() -> None:
    """The walk along a chain of drafts compiles."""
    types = {
        "sampled_ptr": "*i64",
        "draft_ptr": "*i64",
        "cu_rows_ptr": "*i32",
        "accepted_ptr": "*i32",
        "emitted_ptr": "*i64",
    }
    compile_for_hopper(sample_verify._accept_walk_kernel, types, {"TILE": 64}, num_warps=1)


_ATTENTION_SIZES = {"GROUP": 4, "BLOCK_SIZE": 16, "KEY_TILE": 64, "SPLIT": 512, "ROWS": 64}


# Large float32 tiles take LLVM ten seconds, so that type is compiled for a small head.
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_pad"), [("*bf16", 128, 128), ("*bf16", 80, 128), ("*fp32", 20, 32)]
)
def test_attention_kernel_compiles(
    dtype: str, head_dim: int, head_pad: int, parallel: bool
) -> None:
    """Attention compiles in bfloat16 and float32, with splits in parallel and in a loop."""
    data = ("out_ptr", "query_ptr", "key_ptr", "value_ptr")
    indices = ("cu_query_lens_ptr", "context_lens_ptr", "block_tables_ptr")
    sizes = (
        "num_sequences",
        "num_splits",
        "table_stride",
        "query_token_stride",
        "query_head_stride",
        "block_stride",
        "token_stride",
        "head_stride",
        "num_query_heads",
    )
    types = {
        **dict.fromkeys(data, dtype),
        **dict.fromkeys(indices, "*i32"),
        **dict.fromkeys(sizes, "i32"),
        "scratch_ptr": "*fp32",
        "scratch_stats_ptr": "*fp32",
        "score_scale": "fp32",
    }
    constants: dict[str, Any] = {
        **_ATTENTION_SIZES,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "PARALLEL": parallel,
        "UPCAST": False,
    }
    compile_for_hopper(paged_attention._attention_kernel, types, constants)


@pytest.mark.parametrize("out", ["*bf16", "*fp32"])
def test_merge_kernel_compiles(out: str) -> None:
    """The merge of splits compiles."""
    types = {
        "out_ptr": out,
        "scratch_ptr": "*fp32",
        "scratch_stats_ptr": "*fp32",
        "cu_query_lens_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "num_sequences": "i32",
        "num_splits": "i32",
        "num_query_heads": "i32",
    }
    constants = {"HEAD_DIM": 80, "HEAD_PAD": 128, "SPLIT": 512}
    compile_for_hopper(paged_attention._merge_kernel, types, constants, num_warps=1)
