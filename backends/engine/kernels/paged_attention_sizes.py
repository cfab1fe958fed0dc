"""What a launch of paged attention needs besides its tensors: constants, scratch, checks.

Scratch is read and written by splits in parallel: per query row (token x query head) and split the
weighted values, float32 [head_dim], and two numbers of the softmax. It takes

    4 * tokens * query_heads * ceil(max_context / split_size) * (head_dim + 2) bytes,

e.g. 65 MiB for 64 tokens, 32 heads of 128 and 32768 tokens of context. Of those a launch touches
what its rows reach: written once and read once. Prefill with loops over the splits needs none.
"""

from __future__ import annotations

import os
from typing import Final, NamedTuple

import torch

from draftgate.backends.engine.kernels.paged_attention_ref import DraftTrees

SPLIT_SIZE: Final = 512
"""Keys per split; part of the numerics class."""

KEY_TILE: Final = 64
"""Keys multiplied at once; part of the numerics class."""

_MASK_BITS: Final = 64
# Two waves on a GPU of 132 multiprocessors: with as many programs splits need no parallelism.
_ENOUGH_PROGRAMS: Final = 264


def padded_head(head_dim: int) -> int:
    """Returns the columns of a tile that holds a head; products need 16."""
    return max(16, _power_of_2(head_dim))


class Tiles(NamedTuple):
    """What a program computes with; part of the numerics class."""

    query_rows: int
    """Rows (query heads of a group x query tokens) of a program."""
    num_warps: int
    num_stages: int
    """Of the pipeline of key tiles. One is spent on the block table, half of the rest is how many
    tiles are ahead: with 5 stages 2, in three buffers of 32 KiB (16 bits, heads of 128)."""
    max_registers: int | None = None
    """Of a thread; ptxas would rather spill than have one program less on a multiprocessor."""


def tiles(dtype: torch.dtype, head_dim: int, group: int) -> Tiles:
    """Returns tiles that compile for sm_90 without spilling a register.

    Chosen by what ptxas reports (Triton 3.6 and 3.7, 2026-11-21); not timed on a GPU yet. In 16
    bits two programs share a multiprocessor with heads up to 128: one computes while the other
    waits. In float32 products have no tensor cores, and their operands take many registers. One
    variant does spill, 56 bytes a thread: heads beyond 128 with trees, looping over splits. No
    supported model has such heads.

    Args:
      dtype: of the query.
      head_dim: dimensions of a head.
      group: query heads per key-value head.
    """
    if dtype == torch.float32:
        chosen = Tiles(query_rows=16, num_warps=8, num_stages=3, max_registers=255)
    elif padded_head(head_dim) <= 128:
        chosen = Tiles(query_rows=64, num_warps=4, num_stages=5)
    else:
        chosen = Tiles(query_rows=64, num_warps=8, num_stages=3)
    return chosen._replace(query_rows=max(chosen.query_rows, _power_of_2(group)))


def is_wide(layer_kv: torch.Tensor) -> bool:
    """Whether offsets inside a strip of keys or values need more than 32 bits."""
    return layer_kv.shape[1] * layer_kv.stride(1) >= 1 << 31


def runs_parallel(num_splits: int, programs: int) -> bool:
    """Whether splits get programs of their own, given how many there would be without."""
    return num_splits > 1 and programs < _ENOUGH_PROGRAMS


def scratch_floats(
    tokens: int, query_heads: int, head_dim: int, max_context: int, split_size: int = SPLIT_SIZE
) -> int:
    """Returns the float32 elements of scratch for splits in parallel."""
    return tokens * query_heads * -(-max_context // split_size) * (head_dim + 2)


def scratch_views(
    scratch: torch.Tensor | None, query: torch.Tensor, num_splits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Returns scratch as float32 ``[tokens, query_heads, num_splits, head_dim]`` and ``[.., 2]``.

    Args:
      scratch: flat float32 of at least ``scratch_floats``; None allocates.
      query: ``[tokens, query_heads, head_dim]``.
      num_splits: of the longest context.
    """
    tokens, query_heads, head_dim = query.shape
    rows = tokens * query_heads * num_splits
    needed = rows * (head_dim + 2)
    if scratch is None:
        scratch = torch.empty(needed, dtype=torch.float32, device=query.device)
    if scratch.dtype != torch.float32 or scratch.dim() != 1 or scratch.stride(0) != 1:
        raise ValueError("scratch must be flat, contiguous and float32")
    if scratch.device != query.device:
        raise ValueError(f"scratch is on {scratch.device}, the query on {query.device}")
    if scratch.numel() < needed:
        raise ValueError(f"scratch has {scratch.numel()} elements, this launch needs {needed}")
    shape = (tokens, query_heads, num_splits, -1)
    border = rows * head_dim
    return scratch[:border].view(shape), scratch[border:needed].view(shape)


def check_arguments(
    query: torch.Tensor,
    layer_kv: torch.Tensor,
    block_size: int,
    scale: float,
    window: int | None,
    trees: DraftTrees | None,
    split_size: int,
) -> None:
    """Raises ValueError for what the kernel would read wrongly."""
    strips, slots, head_dim = layer_kv.shape
    if strips % 2 or query.shape[1] % (strips // 2):
        raise ValueError(f"{query.shape[1]} query heads over {strips} strips of keys and values")
    if query.shape[2] != head_dim or query.dtype != layer_kv.dtype:
        raise ValueError("query and cache need the same head_dim and dtype")
    if query.stride(2) != 1 or layer_kv.stride(2) != 1:
        raise ValueError("query and cache need unit stride along the head dimension")
    if not 0 < block_size <= slots:
        raise ValueError(f"block_size {block_size} of {slots} slots")
    if scale <= 0:
        raise ValueError(f"scale {scale} is not positive")
    if split_size % KEY_TILE:
        raise ValueError(f"split_size {split_size} is not a multiple of {KEY_TILE}")
    if window is not None and window < 1:
        raise ValueError(f"window {window} shows nothing")
    if trees is not None:
        _check_trees(trees, query.shape[0])


def _check_trees(trees: DraftTrees, tokens: int) -> None:
    """Raises ValueError for masks of another width, and fields that end early."""
    if trees.ancestors.dtype != torch.int64:
        raise ValueError(f"ancestors are int64, {_MASK_BITS} bits, not {trees.ancestors.dtype}")
    if min(trees.ancestors.shape[0], trees.positions.shape[0]) < tokens:
        raise ValueError(f"ancestors and positions of fewer than {tokens} tokens")
    if any(field.stride(0) != 1 for field in trees):
        raise ValueError("fields of trees need unit stride")


def _power_of_2(number: int) -> int:
    """Returns the least power of two that is not smaller."""
    return 1 << (number - 1).bit_length()


def interpreting() -> bool:
    """Whether Triton interprets; its bfloat16 ``tl.dot`` is wrong, so inputs are upcast there."""
    return os.environ.get("TRITON_INTERPRET", "0") == "1"
