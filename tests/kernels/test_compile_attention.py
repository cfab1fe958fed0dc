"""Attention, compiled for a Hopper GPU without a GPU: no spills and equal rounding."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch

pytest.importorskip("triton")

from triton.backends.compiler import GPUTarget

from draftgate.backends.engine.kernels.merge_splits import merge_splits
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables, DraftTrees
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from tests.examples import grid
from tests.kernels.compiling import (
    BLACKWELL,
    HOPPER,
    Launch,
    assert_lean,
    launches_of,
    meta_tensor,
)

_HALVES = (torch.bfloat16, torch.float16)


def _launches(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    *,
    trees: bool,
    parallel: bool,
    window: int | None = None,
    softcap: float | None = None,
    slots: int = 1 << 20,
    kv_dtype: torch.dtype | None = None,
    target: GPUTarget = HOPPER,
) -> list[Launch]:
    """Return the kernels for 64 sequences of 5 tokens, with heads as (query, kv, dimensions)."""
    query_heads, kv_heads, head_dim = heads
    tokens, index = 320, torch.int32
    drafts = DraftTrees(
        meta_tensor(tokens, dtype=torch.int64),
        meta_tensor(64, dtype=index),
        meta_tensor(tokens, dtype=torch.int64),
    )
    return launches_of(
        lambda: paged_attention(
            meta_tensor(tokens, query_heads, head_dim, dtype=dtype),
            meta_tensor(2 * kv_heads, slots, head_dim, dtype=kv_dtype or dtype),
            meta_tensor(65, dtype=index),
            meta_tensor(64, dtype=index),
            BlockTables(meta_tensor(64 * 512, dtype=index), meta_tensor(64, dtype=index), 512),
            block_size=16,
            scale=1.0,
            window=window,
            softcap=softcap,
            trees=drafts if trees else None,
            parallel_splits=parallel,
        ),
        target,
    )


_Model = tuple[torch.dtype, tuple[int, int, int]]
_MODELS: list[_Model] = [
    (torch.bfloat16, (32, 8, 128)),
    (torch.bfloat16, (28, 4, 128)),
    (torch.bfloat16, (32, 32, 128)),
    (torch.float16, (32, 32, 80)),
    (torch.bfloat16, (14, 2, 64)),
]


def _is_quick(model: _Model, parallel: bool, trees: bool, window: int | None) -> bool:
    """Select the engine's variants of the first model, and one variant of a model in float16."""
    another = parallel and window is None and model[0] == torch.float16
    return trees and (model == _MODELS[0] or another)


@pytest.mark.parametrize(
    ("model", "parallel", "trees", "window"),
    grid(_MODELS, (False, True), (False, True), (None, 4096), quick=_is_quick),
)
def test_attention_in_16_bits_leaves_space_for_two_programs(
    model: _Model, parallel: bool, trees: bool, window: int | None
) -> None:
    """No 16-bit kernel spills, and a multiprocessor runs two programs, so loads overlap
    products."""
    dtype, heads = model
    launches = _launches(dtype, heads, trees=trees, parallel=parallel, window=window)
    assert_lean(launches, programs=2)
    assert len(launches) == 1 + parallel


# The engine always compiles the kernel with trees.
@pytest.mark.parametrize("trees", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize("parallel", [pytest.param(False, marks=pytest.mark.long), True])
@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.float16, 32),
        pytest.param(torch.float32, 20, marks=pytest.mark.long),
        pytest.param(torch.float32, 64, marks=pytest.mark.long),
        (torch.float32, 128),
    ],
)
def test_small_heads_and_float32_do_not_spill(
    dtype: torch.dtype, head_dim: int, parallel: bool, trees: bool
) -> None:
    """Kernels with small heads, and float32 kernels with their own tiles, do not spill
    registers."""
    assert_lean(_launches(dtype, (8, 2, head_dim), trees=trees, parallel=parallel))


@pytest.mark.parametrize(
    ("trees", "parallel"),
    [
        pytest.param(False, False, marks=pytest.mark.long),
        pytest.param(False, True, marks=pytest.mark.long),
        (True, True),
    ],
)
def test_large_heads_do_not_spill(trees: bool, parallel: bool) -> None:
    """Kernels with heads of 256 do not spill registers, except for trees in a loop over splits (see
    `tiles`)."""
    assert_lean(_launches(torch.bfloat16, (8, 2, 256), trees=trees, parallel=parallel))


@pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["sm_90", "sm_100"])
@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("dtype", "head_dim", "programs"),
    [
        (torch.bfloat16, 128, 2),
        (torch.bfloat16, 64, 2),
        (torch.float16, 80, 2),
        (torch.bfloat16, 256, 1),
    ],
)
def test_fp8_caches_hardly_spill(
    dtype: torch.dtype, head_dim: int, programs: int, parallel: bool, target: GPUTarget
) -> None:
    """Kernels that read FP8 convert it in hardware, two programs with heads up to 128 share a
    multiprocessor, and at most eight registers spill (see `tiles`)."""
    (launch, *_) = _launches(
        dtype, (32, 8, head_dim), trees=True, parallel=parallel, kv_dtype=FP8, target=target
    )
    assert "e4m3x2" in launch.ptx
    assert launch.programs() >= programs
    spilled = {(HOPPER, 128, False): 16, (BLACKWELL, 256, True): 32}
    assert launch.usage.stack_bytes <= spilled.get((target, head_dim, parallel), 0)


def test_merge_loads_several_splits_at_once() -> None:
    """The merge has the three loads of eight splits in its loop, and does not spill."""
    _, merge = _launches(torch.bfloat16, (32, 8, 128), trees=True, parallel=True)
    assert merge.ptx.count("ld.global") >= 3 * 8
    assert_lean([merge], programs=32)


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize("head_dim", [128, 256])
def test_bounded_scores_hardly_spill(head_dim: int, parallel: bool) -> None:
    """Kernels with a bound on the scores spill at most two registers: with heads of 256 in a loop
    over splits."""
    (launch, *_) = _launches(
        torch.bfloat16, (16, 8, head_dim), trees=True, parallel=parallel, window=4096, softcap=50.0
    )
    assert launch.usage.stack_bytes <= (8 if head_dim == 256 and not parallel else 0)


def test_offsets_beyond_32_bits_are_computed_in_64() -> None:
    """A kernel computes an offset beyond 32 bits in 64 bits without spilling."""
    wide = _launches(torch.bfloat16, (4, 2, 32), trees=True, parallel=False, slots=1 << 27)
    narrow = _launches(torch.bfloat16, (4, 2, 32), trees=True, parallel=False, slots=1 << 20)
    assert_lean(wide)
    assert wide[0].ptx.count("mul.wide") != narrow[0].ptx.count("mul.wide")


def _float_operations(launch: Launch) -> Counter[str]:
    """Count the instructions that round or compare float32, including products."""
    pattern = r"^\s*(?:@%p\d+ )?((?!selp|setp)\w+\.\S*f32\S*)"
    return Counter(re.findall(pattern, launch.ptx, re.MULTILINE))


@pytest.mark.parametrize("window", [None, 4096])
def test_all_variants_have_the_same_float_operations(window: int | None) -> None:
    """Rows have the same arithmetic with and without trees, windows and parallel splits.

    A verified row of a tree would otherwise differ from its decode. The plain kernel with parallel
    splits has one loop over tiles. Trees have this loop twice, and loops over splits add the merge.
    A product that is fused in only one variant would change these sums.
    """
    plain, tiles, trees, loops, merged = (
        _float_operations(
            _launches(torch.bfloat16, (32, 8, 128), trees=tree, parallel=parallel, window=width)[0]
        )
        for width, tree, parallel in (
            (None, False, True),
            (window, False, True),
            (window, True, True),
            (window, True, False),
            (None, False, False),
        )
    )
    merge = merged - plain
    assert any(name.startswith("wgmma") for name in plain)
    assert tiles == plain
    assert trees == plain + plain
    assert loops == trees + merge


@pytest.mark.parametrize("positions", [False, True])
@pytest.mark.parametrize("dtype", [*_HALVES, torch.float32])
def test_merge_does_not_spill(dtype: torch.dtype, positions: bool) -> None:
    """A multiprocessor runs its maximum of 32 programs of the merge."""
    rows, index = (64, 32), torch.int32
    launches = launches_of(
        lambda: merge_splits(
            meta_tensor(*rows, 80, dtype=dtype),
            meta_tensor(*rows, 16, 80),
            meta_tensor(*rows, 16, 2),
            meta_tensor(65, dtype=index),
            meta_tensor(64, dtype=index),
            meta_tensor(64, dtype=torch.int64) if positions else None,
            window=4096 if positions else None,
        )
    )
    assert_lean(launches, programs=32)
