"""Forbidden tokens of grammars in Triton. ``token_mask_ref`` is the definition.

A program reads the words of one tile of a row and writes only the forbidden logits. A row with a
vocabulary of 152k has a mask of 19 kB, which the host sends in place of 152 kB of booleans.
"""

from __future__ import annotations

from typing import Final

import triton
import triton.language as tl
from torch import Tensor

_TILE: Final = 1024


@triton.jit
def _token_mask_kernel(logits_ptr, rows_ptr, masks_ptr, vocab, words, TILE: tl.constexpr):
    """Forbid the tokens of a tile. The grid is (masks, tiles)."""
    mask_index = tl.program_id(0)
    row = tl.load(rows_ptr + mask_index)
    tokens = tl.program_id(1) * TILE + tl.arange(0, TILE)
    inside = tokens // 32 < words
    word = tl.load(masks_ptr + mask_index * words + tokens // 32, mask=inside, other=0)
    forbidden = ((word >> (tokens % 32)) & 1) == 0
    tl.store(logits_ptr + row * vocab + tokens, float("-inf"), mask=forbidden & (tokens < vocab))


def forbid_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Forbid tokens as ``token_mask_ref.forbid_tokens`` does, without a device synchronisation.

    Args:
      logits: float32 ``[rows, vocab_size]``, contiguous, modified in place.
      rows: int64 ``[masked]``, contiguous, all different.
      masks: int32 ``[masked, words]``, contiguous.

    Raises:
      ValueError: a tensor is not contiguous.
    """
    if not (logits.is_contiguous() and rows.is_contiguous() and masks.is_contiguous()):
        raise ValueError("forbid_tokens needs contiguous logits, rows and masks")
    masked, vocab_size = len(rows), logits.shape[1]
    if masked:
        _token_mask_kernel[(masked, triton.cdiv(vocab_size, _TILE))](
            logits, rows, masks, vocab_size, masks.shape[1], TILE=_TILE, num_warps=4
        )
