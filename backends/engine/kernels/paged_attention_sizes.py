"""Constants, tile sizes and argument checks of paged attention."""

from __future__ import annotations

import os
from functools import cache
from typing import Final, NamedTuple

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.paged_attention_ref import DraftTrees
from draftgate.backends.engine.quantisation.fp8_kv import FP8

SPLIT_SIZE: Final = 512
"""Keys per split, a part of the numerics class."""

KEY_TILE: Final = 64
"""Keys per product, a part of the numerics class."""

# The slots of 31 rows of 32 heads of 128 with contexts of 131,072 tokens. Not timed on a GPU yet.
_SCRATCH_BYTES: Final = 128 << 20

# Of Triton's interpreter, which runs one program after the other.
_INTERPRETED_PROGRAMS: Final = 8


def padded_head(head_dim: int) -> int:
    """Return the columns of a tile that holds a head, at least 16 for a product."""
    return max(16, _power_of_2(head_dim))


class AttentionTiles(NamedTuple):
    """The tile sizes of a program, a part of the numerics class.

    Attributes:
      query_rows: rows of a program, query heads of a group x query tokens.
      num_warps: warps of a program.
      num_stages: stages of the pipeline of key tiles. The block table takes one stage. Half of the
        other stages is the number of prefetched tiles. 5 stages prefetch 2 tiles, in three buffers
        of 32 KiB (16 bits, heads of 128).
      programs: programs that share a multiprocessor. They divide the work of a step.
      max_registers: maximum registers of a thread. The default of ptxas would spill registers to
        fit another program on a multiprocessor.
    """

    query_rows: int
    num_warps: int
    num_stages: int
    programs: int
    max_registers: int | None = None


def tiles(dtype: torch.dtype, kv_dtype: torch.dtype, head_dim: int, group: int) -> AttentionTiles:
    """Return tile sizes that compile for sm_90 without spilling a register.

    The sizes follow the reports of ptxas (Triton 3.7, 2026-11-27), and are not timed on a GPU yet.
    In 16 bits, two programs share a multiprocessor with heads up to 128. One program computes while
    the other waits. In float32, products have no tensor cores, and their operands take many
    registers. With trees, heads beyond 128 (Gemma) spill up to 32 bytes per thread on sm_90 and 48
    bytes on sm_100, and heads of 128 in float32 spill 8 bytes on sm_100.

    Keys and values in FP8 are converted in registers. Heads of 80 in float16 then spill 48 bytes on
    sm_100, and heads of 128 in 16 bits up to 16 bytes, or 48 bytes with a bound on the scores.
    Heads of 256 spill nothing with 32 rows. Heads of 128 in float32 spill up to 224 bytes.

    Args:
      dtype: dtype of the query.
      kv_dtype: dtype of keys and values.
      head_dim: dimensions of a head.
      group: query heads per key-value head.
    """
    if dtype == torch.float32:
        chosen = AttentionTiles(
            query_rows=16, num_warps=8, num_stages=3, programs=1, max_registers=255
        )
    elif padded_head(head_dim) <= 128:
        chosen = AttentionTiles(query_rows=64, num_warps=4, num_stages=5, programs=2)
    else:
        rows, stages = (32, 2) if kv_dtype is FP8 else (64, 3)
        chosen = AttentionTiles(query_rows=rows, num_warps=8, num_stages=stages, programs=1)
    return chosen._replace(query_rows=max(chosen.query_rows, _power_of_2(group)))


def is_wide(layer_kv: Tensor) -> bool:
    """Return whether offsets inside a strip of keys or values need more than 32 bits."""
    return layer_kv.shape[1] * layer_kv.stride(1) >= 1 << 31


def resident_programs(device: torch.device, tiles: AttentionTiles) -> int:
    """Return the number of programs that a device runs at once."""
    if device.type != "cuda":
        return _INTERPRETED_PROGRAMS
    return tiles.programs * _multiprocessors(device)


@cache
def _multiprocessors(device: torch.device) -> int:
    return int(torch.cuda.get_device_properties(device).multi_processor_count)


def scratch_slots(tokens: int, num_splits: int, query_heads: int, head_dim: int) -> int:
    """Return the slots of partial results, each with the rows of a token and of a split.

    Args:
      tokens: query tokens of a step.
      num_splits: splits of the longest context. A single split has no partial results.
      query_heads: rows of a token.
      head_dim: dimensions of a head.
    """
    if num_splits == 1:
        return 0
    return min(tokens * num_splits, _SCRATCH_BYTES // (query_heads * (head_dim + 2) * 4))


def check_arguments(
    query: Tensor,
    layer_kv: Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    softcap: float | None,
    trees: DraftTrees | None,
    split_size: int,
) -> None:
    """Raise ValueError for arguments that the kernel does not support."""
    strips, slots, head_dim = layer_kv.shape
    if strips % 2 or query.shape[1] % (strips // 2):
        raise ValueError(
            f"{query.shape[1]} query heads do not divide among {strips} strips of keys and values"
        )
    if query.shape[2] != head_dim or layer_kv.dtype not in {query.dtype, FP8}:
        raise ValueError("query and cache need the same head_dim and dtype, or a cache in FP8")
    if query.stride(2) != 1 or layer_kv.stride(2) != 1:
        raise ValueError("query and cache need unit stride along the head dimension")
    if not 0 < block_size <= slots:
        raise ValueError(f"block_size must be from 1 to {slots} slots, not {block_size}")
    if scale <= 0:
        raise ValueError(f"scale must be positive, not {scale}")
    if softcap is not None and softcap <= 0:
        raise ValueError(f"softcap must be positive, not {softcap}")
    if split_size % KEY_TILE:
        raise ValueError(f"split_size must be a multiple of {KEY_TILE}, not {split_size}")
    if window is not None and window < 1:
        raise ValueError(f"window must be at least 1, not {window}")
    if trees is not None:
        _check_trees(trees, query.shape[0])


def _check_trees(trees: DraftTrees, tokens: int) -> None:
    """Raise ValueError for masks of another width and for fields that end early."""
    if trees.ancestors.dtype != torch.int64:
        raise ValueError(f"ancestors must be int64, not {trees.ancestors.dtype}")
    if min(trees.ancestors.shape[0], trees.positions.shape[0]) < tokens:
        raise ValueError(f"ancestors and positions have fewer than {tokens} tokens")
    if any(field.stride(0) != 1 for field in trees):
        raise ValueError("ancestors, draft_starts and positions need unit stride")


def _power_of_2(number: int) -> int:
    """Return the least power of two that is at least `number`."""
    return 1 << (number - 1).bit_length()


def interpreting() -> bool:
    """Return whether Triton interprets.

    The bfloat16 ``tl.dot`` of the interpreter is wrong, so the kernels upcast their inputs.
    """
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
