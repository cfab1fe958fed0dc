"""Forbidden tokens of grammars in torch.

A mask has a bit for each token, from the lowest bit of the first word on. The logits of tokens
without a bit become -inf, and so do those of tokens beyond the end of the mask.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

_FORBIDDEN: Final = (torch.arange(256)[:, None] >> torch.arange(8)) & 1 == 0
"""The tokens that each octet of a mask forbids: bool ``[256, 8]``."""


def forbid_tokens(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """Forbid tokens in some rows, in place.

    Args:
      logits: float32 ``[rows, vocab_size]``, in main memory as all arguments.
      rows: int64 ``[masked]``, all different.
      masks: int32 ``[masked, words]``, contiguous.
    """
    vocab_size = logits.shape[1]
    octets = masks.view(torch.uint8).flatten().int()
    forbidden = _FORBIDDEN.index_select(0, octets).view(len(masks), 32 * masks.shape[1])
    for row, tokens in zip(rows.tolist(), forbidden[:, :vocab_size], strict=True):
        logits[row, : len(tokens)].masked_fill_(tokens, -torch.inf)
        logits[row, len(tokens) :] = -torch.inf
