"""Attention, compiled for Hopper and Blackwell without a GPU: spills and equal rounding."""

from __future__ import annotations

import re
from collections import Counter

import pytest
import torch
from _pytest.mark import ParameterSet

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

_TARGETS = pytest.mark.parametrize("target", [HOPPER, BLACKWELL], ids=["sm_90", "sm_100"])


def _long(value: object) -> ParameterSet:
    return pytest.param(value, marks=pytest.mark.long)


# Without a cache, compiling a variant takes ten seconds.
_HOPPER_FIRST = pytest.mark.parametrize(
    "target", [HOPPER, _long(BLACKWELL)], ids=["sm_90", "sm_100"]
)


def _launches(
    dtype: torch.dtype,
    heads: tuple[int, int, int],
    *,
    trees: bool = True,
    window: int | None = None,
    softcap: float | None = None,
    slots: int = 1 << 20,
    kv_dtype: torch.dtype | None = None,
    target: GPUTarget = HOPPER,
) -> list[Launch]:
    """Return the kernels for 64 sequences of 5 tokens, with heads as (query, kv, dimensions).

    The kernels are those of the work list, of attention and of the merge.
    """
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


def _is_quick(model: _Model, window: int | None) -> bool:
    """Select the variant whose launches the other quick tests share."""
    return model == _MODELS[0] and window is not None


@_TARGETS
@pytest.mark.parametrize(("model", "window"), grid(_MODELS, (None, 4096), quick=_is_quick))
def test_attention_in_16_bits_leaves_space_for_two_programs(
    model: _Model, window: int | None, target: GPUTarget
) -> None:
    """No 16-bit kernel spills, and a multiprocessor runs two programs, so loads overlap
    products. The engine always compiles the kernel with trees."""
    launches = _launches(*model, window=window, target=target)
    assert_lean(launches, programs=2)
    names = [launch.name for launch in launches]
    assert names == ["_work_kernel", "_attention_kernel", "_merge_kernel"]


@pytest.mark.parametrize(
    ("dtype", "head_dim"),
    [
        (torch.float16, 32),
        pytest.param(torch.float32, 20, marks=pytest.mark.long),
        pytest.param(torch.float32, 64, marks=pytest.mark.long),
        (torch.float32, 128),
    ],
)
def test_small_heads_and_float32_do_not_spill(dtype: torch.dtype, head_dim: int) -> None:
    """Kernels with small heads, and float32 kernels with their own tiles, do not spill
    registers."""
    assert_lean(_launches(dtype, (8, 2, head_dim)))


@_HOPPER_FIRST
@pytest.mark.parametrize("window", [_long(None), 4096])
def test_large_heads_hardly_spill(window: int | None, target: GPUTarget) -> None:
    """Kernels with heads of 256 spill at most 12 registers (see `tiles`)."""
    _, attention, _ = _launches(torch.bfloat16, (8, 2, 256), window=window, target=target)
    assert attention.usage.stack_bytes <= 48


@_HOPPER_FIRST
@pytest.mark.parametrize(
    ("head_dim", "stack_bytes"), [(128, 0), pytest.param(256, 32, marks=pytest.mark.long)]
)
def test_bounded_scores_hardly_spill(head_dim: int, stack_bytes: int, target: GPUTarget) -> None:
    """Kernels with a bound on the scores spill at most eight registers, with heads of 256."""
    _, attention, _ = _launches(
        torch.bfloat16, (16, 8, head_dim), window=4096, softcap=50.0, target=target
    )
    assert attention.usage.stack_bytes <= stack_bytes


@_HOPPER_FIRST
@pytest.mark.parametrize(
    ("dtype", "head_dim", "programs"),
    [
        (torch.bfloat16, 128, 2),
        pytest.param(torch.bfloat16, 64, 2, marks=pytest.mark.long),
        pytest.param(torch.float16, 80, 2, marks=pytest.mark.long),
        pytest.param(torch.bfloat16, 256, 1, marks=pytest.mark.long),
    ],
)
def test_fp8_caches_hardly_spill(
    dtype: torch.dtype, head_dim: int, programs: int, target: GPUTarget
) -> None:
    """Kernels that read FP8 convert it in hardware, two programs with heads up to 128 share a
    multiprocessor, and only heads of 80 spill on sm_100: at most 12 registers."""
    _, attention, _ = _launches(dtype, (32, 8, head_dim), kv_dtype=FP8, target=target)
    assert "e4m3x2" in attention.ptx
    assert attention.programs() >= programs
    spills = target == BLACKWELL and head_dim == 80
    assert attention.usage.stack_bytes <= (48 if spills else 0)


def test_merge_loads_several_splits_at_once() -> None:
    """The merge has the three loads of eight splits in its loop."""
    _, _, merge = _launches(torch.bfloat16, (32, 8, 128), window=4096)
    assert merge.ptx.count("ld.global") >= 3 * 8


def test_offsets_beyond_32_bits_are_computed_in_64() -> None:
    """A kernel computes an offset beyond 32 bits in 64 bits without spilling."""
    _, wide, _ = _launches(torch.bfloat16, (4, 2, 32), trees=True, slots=1 << 27)
    _, narrow, _ = _launches(torch.bfloat16, (4, 2, 32), trees=True, slots=1 << 20)
    assert_lean([wide])
    assert wide.ptx.count("mul.wide") != narrow.ptx.count("mul.wide")


def _float_operations(launch: Launch) -> Counter[str]:
    """Count the instructions that round or compare float32, including products."""
    pattern = r"^\s*(?:@%p\d+ )?((?!selp|setp)\w+\.\S*f32\S*)"
    return Counter(re.findall(pattern, launch.ptx, re.MULTILINE))


@pytest.mark.parametrize("window", [_long(None), 4096])
def test_all_variants_have_the_same_float_operations(window: int | None) -> None:
    """Rows have the same arithmetic with and without trees and windows, whole and cut.

    A verified row of a tree would otherwise differ from its decode. The plain kernel has one loop
    over tiles, and trees have this loop twice. The remaining operations add a split to the sums of
    a whole pair, as the merge of a cut pair does. A product that is fused in only one variant would
    change these sums.
    """
    heads = (torch.bfloat16, (32, 8, 128))
    _, plain, merge = _launches(*heads, trees=False)
    _, windowed, _ = _launches(*heads, trees=False, window=window)
    _, trees, _ = _launches(*heads, window=window)
    assert _float_operations(windowed) == _float_operations(plain)
    tiles = _float_operations(trees) - _float_operations(plain)
    assert any(name.startswith("wgmma") for name in tiles)
    assert tiles <= _float_operations(plain)
    assert (_float_operations(plain) - tiles).keys() == _float_operations(merge).keys()


@_TARGETS
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_merge_does_not_spill(dtype: torch.dtype, target: GPUTarget) -> None:
    """A multiprocessor runs 25 programs of the merge, 32 on sm_90."""
    launches = launches_of(
        lambda: merge_splits(
            meta_tensor(64, 32, 128, dtype=dtype),
            meta_tensor(1024, 32, 128),
            meta_tensor(1024, 32, 2),
            meta_tensor(64, 2, dtype=torch.int32),
        ),
        target,
    )
    assert_lean(launches, programs=32 if target == HOPPER else 25)
