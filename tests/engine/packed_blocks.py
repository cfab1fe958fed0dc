"""Random matrices in the block formats of GGUF."""

from __future__ import annotations

import torch
from torch import Tensor

from draftgate.backends.gguf.block_types import BLOCK_TYPES, BlockType

KINDS = {kind.name: kind for kind in BLOCK_TYPES.values() if kind.values > 1}
HALVES = {"Q6_K": (208,), **dict.fromkeys(("Q4_1", "Q5_1", "Q4_K", "Q5_K"), (0, 2))}
"""Positions of the half floats in a block. Other types have one at its start."""


def random_rows(kind: BlockType, outputs: int, width: int, seed: int = 0) -> Tensor:
    """Return packed rows, uint8 [outputs, row_bytes], with scales of both signs."""
    random = torch.Generator().manual_seed(seed)
    count = outputs * width // kind.values
    blocks = torch.randint(0, 256, (count, kind.num_bytes), dtype=torch.uint8, generator=random)
    for at in HALVES.get(kind.name, (0,)):
        halves = (torch.randn(count, 1, generator=random) * 0.01).half()
        blocks[:, at : at + 2] = halves.view(torch.uint8)
    return blocks.view(outputs, -1)
