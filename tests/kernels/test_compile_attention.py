"""Attention compiles for a Hopper GPU that need not be there, and rounds alike in all variants."""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest

pytest.importorskip("triton")

from backends.engine.kernels import merge_splits, paged_attention
from tests.kernels.compiling import compile_for_hopper

_DATA = ("out_ptr", "query_ptr", "key_ptr", "value_ptr")
_INDICES = ("cu_query_lens_ptr", "context_lens_ptr", "block_tables_ptr")
_SIZES = (
    "num_sequences",
    "num_splits",
    "table_stride",
    "query_token_stride",
    "query_head_stride",
    "strip_stride",
    "token_stride",
    "num_query_heads",
)
_TREES = {"ancestors_ptr": "*i64", "draft_starts_ptr": "*i32", "positions_ptr": "*i32"}
_SCRATCH = {"scratch_ptr": "*fp32", "scratch_stats_ptr": "*fp32"}
_TILES = {"GROUP": 4, "BLOCK_SIZE": 16, "KEY_TILE": 64, "SPLIT": 512, "ROWS": 64}


def _ptx(
    dtype: str, head_dim: int, head_pad: int, window: int, *, trees: bool, parallel: bool
) -> str:
    types = {
        **dict.fromkeys(_DATA, dtype),
        **dict.fromkeys(_INDICES, "*i32"),
        **dict.fromkeys(_SIZES, "i32"),
        "score_scale": "fp32",
    }
    constants: dict[str, Any] = {
        **_TILES,
        "HEAD_DIM": head_dim,
        "HEAD_PAD": head_pad,
        "WINDOW": window,
        "TREES": trees,
        "PARALLEL": parallel,
        "UPCAST": False,
    }
    for pointers, there in ((_TREES, trees), (_SCRATCH, parallel)):
        if there:
            types |= pointers
        else:
            constants |= dict.fromkeys(pointers)
    compiled = compile_for_hopper(paged_attention._attention_kernel, types, constants)
    return str(compiled.asm["ptx"])


# Large float32 tiles take LLVM ten seconds, so that type is compiled for a small head.
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "head_pad"), [("*bf16", 80, 128), ("*fp16", 64, 64), ("*fp32", 20, 32)]
)
def test_attention_kernel_compiles(
    dtype: str, head_dim: int, head_pad: int, parallel: bool
) -> None:
    """Attention compiles for other heads and types, with splits in parallel and in a loop."""
    _ptx(dtype, head_dim, head_pad, 0, trees=False, parallel=parallel)


def _float_operations(ptx: str) -> Counter[str]:
    """Returns how often each instruction occurs that rounds or compares float32, products too."""
    return Counter(re.findall(r"^\s*(?:@%p\d+ )?((?!selp|setp)\w+\.\S*f32\S*)", ptx, re.MULTILINE))


@pytest.mark.parametrize("window", [0, 4096])
def test_variants_round_alike(window: int) -> None:
    """Rows meet the same arithmetic with and without trees, windows and parallel splits.

    Only then does a row that is verified among trees have the bits of its decode. The plain kernel
    with parallel splits has one loop over tiles, trees have it twice; loops over splits add the
    merge. A product that the compiler fused in one variant alone would not add up.
    """
    plain, tiles, trees, loops = (
        _float_operations(_ptx("*bf16", 128, 128, width, trees=tree, parallel=parallel))
        for width, tree, parallel in (
            (0, False, True),
            (window, False, True),
            (window, True, True),
            (window, True, False),
        )
    )
    merge = _float_operations(_ptx("*bf16", 128, 128, 0, trees=False, parallel=False)) - plain
    assert any(name.startswith("wgmma") for name in plain)
    assert tiles == plain
    assert trees == plain + plain
    assert loops == trees + merge


@pytest.mark.parametrize("trees", [False, True])
@pytest.mark.parametrize("out", ["*bf16", "*fp32"])
def test_merge_kernel_compiles(out: str, trees: bool) -> None:
    """The merge of splits compiles."""
    types = {
        "out_ptr": out,
        "weighted_ptr": "*fp32",
        "stats_ptr": "*fp32",
        "cu_query_lens_ptr": "*i32",
        "context_lens_ptr": "*i32",
        "num_sequences": "i32",
        "num_splits": "i32",
        "num_query_heads": "i32",
    }
    constants: dict[str, Any] = {"HEAD_DIM": 80, "HEAD_PAD": 128, "SPLIT": 512}
    constants |= {"WINDOW": 4096 if trees else 0, "TREES": trees}
    if trees:
        types["positions_ptr"] = "*i64"
    else:
        constants["positions_ptr"] = None
    compile_for_hopper(merge_splits._merge_kernel, types, constants, num_warps=1)
