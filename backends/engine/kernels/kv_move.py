"""Compaction of accepted paths in Triton. ``kv_move_ref`` is the definition.

A program owns ``_STRIPS`` strips of one sequence and performs its moves by depth. It reads a
source, writes the target, and continues with the next move. The reference instead reads all sources
before it writes any target. Both leave the same memory if the moves are those of a path in a tree
draft:

* A draft stores every parent before its children, so the places of a path ascend:
  place(0) < place(1) < ..., all integers from 0. Therefore place(e) >= e.
* Move d goes from place(d) to place d. For every later move e > d, place(e) >= e > d, so move d
  overwrites no later source.
* Sequences own different slots, and programs own different strips.

A source may be the target of the same or a later move. The order of reads and writes stays correct,
because a write depends on the read of its value and the writes of a program are sequential.

A move transfers 2 * strips * head_dim * element size bytes and the indices. A move of an 8B Llama
(512 strips of 128) in bfloat16 is 0.26 MB, which takes at least 0.055 us at 4.8 TB/s. For a
sequence without moves, each program reads only the indices.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

from draftgate.backends.engine.kernels.kv_move_ref import NO_MOVE

_NO_MOVE: Final = tl.constexpr(NO_MOVE)

# A thread moves 32 bytes of bfloat16 per move with 128 dimensions.
_STRIPS: Final = 16

# Moves that a program reads at once, more than any policy drafts. Every number of moves up to it
# has the same kernel, so that no new length of a tree compiles one while the worker serves.
_MOVES: Final = 128


@triton.jit(do_not_specialize=["max_depth"])
def _kv_move_kernel(
    memory_ptr,
    sources_ptr,
    targets_ptr,
    num_strips,
    strip_stride,
    max_depth,
    DEPTH_PAD: tl.constexpr,
    HEAD_DIM: tl.constexpr,
    HEAD_PAD: tl.constexpr,
    STRIPS: tl.constexpr,
):
    """Perform the moves of a sequence in order.

    The grid is (sequences, groups of STRIPS strips).
    """
    first = tl.program_id(0) * max_depth
    depths = tl.arange(0, DEPTH_PAD)
    listed = depths < max_depth
    sources = tl.load(sources_ptr + first + depths, mask=listed, other=_NO_MOVE)
    targets = tl.load(targets_ptr + first + depths, mask=listed, other=_NO_MOVE)
    moves = (targets != _NO_MOVE) & (targets != sources)
    # The walk ends after the last move.
    end = tl.max(tl.where(moves, depths + 1, 0), axis=0)

    strip = tl.program_id(1) * STRIPS + tl.arange(0, STRIPS)[:, None]
    dims = tl.arange(0, HEAD_PAD)[None, :]
    inside = (strip < num_strips) & (dims < HEAD_DIM)
    cells = memory_ptr + strip.to(tl.int64) * strip_stride + dims
    depth = end * 0
    while depth < end:
        source = tl.load(sources_ptr + first + depth)
        target = tl.load(targets_ptr + first + depth)
        mask = inside & (target != _NO_MOVE)
        kv = tl.load(cells + source * HEAD_DIM, mask=mask)
        tl.store(cells + target * HEAD_DIM, kv, mask=mask)
        depth += 1


def kv_move(memory: Tensor, sources: Tensor, targets: Tensor) -> None:
    """Move accepted paths as ``kv_move_ref.kv_move`` does, without a device synchronisation.

    Args:
      memory: ``[strips, slots, head_dim]``, each strip contiguous, modified in place.
      sources: int64 ``[sequences, max_depth]``, contiguous, in order of depth. No target of a
        sequence is the source of a later move.
      targets: int64 ``[sequences, max_depth]``, contiguous. ``NO_MOVE`` or the source itself moves
        nothing.

    Raises:
      ValueError: a tensor has another shape or layout.
    """
    strips, _, head_dim = memory.shape
    if memory.stride()[1:] != (head_dim, 1):
        raise ValueError("kv_move needs contiguous strips of the KV memory")
    if sources.shape != targets.shape:
        raise ValueError(
            f"sources and targets need the same shape, not {sources.shape} and {targets.shape}"
        )
    if not (sources.is_contiguous() and targets.is_contiguous()):
        raise ValueError("kv_move needs contiguous sources and targets")
    sequences, max_depth = sources.shape
    if sequences and max_depth:
        _kv_move_kernel[(sequences, triton.cdiv(strips, _STRIPS))](
            memory,
            sources,
            targets,
            strips,
            memory.stride(0),
            max_depth,
            DEPTH_PAD=max(_MOVES, triton.next_power_of_2(max_depth)),
            HEAD_DIM=head_dim,
            HEAD_PAD=triton.next_power_of_2(head_dim),
            STRIPS=_STRIPS,
            num_warps=4,
        )
