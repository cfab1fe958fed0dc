"""Seeded inputs for the tests of the layer kernels."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from draftgate.backends.engine.kernels.kv_move_ref import NO_MOVE
from draftgate.backends.engine.quantisation.fp8_kv import FP8
from draftgate.backends.engine.rope import Rope


def normal(
    shape: tuple[int, ...], seed: int, dtype: torch.dtype = torch.float32, device: str = "cpu"
) -> torch.Tensor:
    """Return standard normal values."""
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(shape, generator=generator).to(dtype).to(device)


@dataclass(frozen=True)
class RopeCase:
    """Arguments of `rope_kv`, with the value 7 in unwritten slots of the KV memory."""

    qkv: torch.Tensor
    positions: torch.Tensor
    slots: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    layer_kv: torch.Tensor
    qk_norm: torch.Tensor | None
    eps: float = 1e-6

    def arguments(self, device: str = "cpu") -> tuple[torch.Tensor, ...]:
        """Return the positional arguments on a device, with a fresh copy of the KV memory."""
        inputs = (self.qkv, self.positions, self.slots, self.cos, self.sin)
        return (*(tensor.to(device) for tensor in inputs), self.layer_kv.clone().to(device))

    def options(self, device: str = "cpu") -> dict[str, object]:
        """Return the keyword arguments on a device."""
        weight = None if self.qk_norm is None else self.qk_norm.to(device)
        return {"qk_norm": weight, "eps": self.eps}

    def row(self, index: int) -> RopeCase:
        """Return the batch of a single row."""
        return RopeCase(
            self.qkv[index : index + 1].clone(),
            self.positions[index : index + 1].clone(),
            self.slots[index : index + 1].clone(),
            self.cos,
            self.sin,
            self.layer_kv,
            self.qk_norm,
            self.eps,
        )


def rope_case(
    rows: int,
    heads: int,
    kv_heads: int,
    head_dim: int,
    *,
    normed: bool,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
    share: float = 1.0,
    fp8: bool = False,
) -> RopeCase:
    """Return rows at random positions, each with its own slot.

    Args:
      share: the share of a head that rotates.
      fp8: whether the KV memory is in FP8. The numbers then reach from subnormal ones of E4M3 to
        some beyond the largest one.
    """
    generator = torch.Generator().manual_seed(seed)
    max_positions, num_slots = 97, 3 * rows + 5
    cos, sin = Rope(theta=10_000.0, share=share).tables(head_dim, max_positions, dtype)
    qk_norm = normal((heads + kv_heads, head_dim), seed + 1, dtype) + 1
    qkv = normal((rows, (heads + 2 * kv_heads) * head_dim), seed + 2, dtype)
    if fp8:
        qkv *= torch.exp2(torch.randint(-12, 11, qkv.shape, generator=generator).to(dtype))
    return RopeCase(
        qkv,
        torch.randint(max_positions, (rows,), generator=generator),
        torch.randperm(num_slots, generator=generator)[:rows],
        cos,
        sin,
        torch.full((2 * kv_heads, num_slots, head_dim), 7, dtype=FP8 if fp8 else dtype),
        qk_norm if normed else None,
    )


def path_moves(
    paths: list[list[int]], max_depth: int, num_slots: int, seed: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return (sources, targets) of accepted paths in shuffled slots.

    A token that stays in place is its own target at odd depths and `NO_MOVE` at even depths. The
    source of `NO_MOVE` does not exist.

    Args:
      paths: the places of each sequence's accepted tokens in its draft, ascending.
      max_depth: columns of the result, filled with `NO_MOVE`.
      num_slots: slots of the memory.
      seed: seed of the shuffle.
    """
    generator = torch.Generator().manual_seed(seed)
    shuffled = torch.randperm(num_slots, generator=generator)
    sources = torch.full((len(paths), max_depth), 1 << 40)
    targets = torch.full((len(paths), max_depth), NO_MOVE)
    first = 0
    for sequence, path in enumerate(paths):
        own = shuffled[first : first + max(path, default=-1) + 1]
        first += len(own)
        for depth, place in enumerate(path):
            if place != depth or depth % 2:
                sources[sequence, depth] = own[place]
                targets[sequence, depth] = own[depth]
    return sources, targets


PATHS = [[0, 2, 3, 7, 8], [], [1], [0, 1, 2], [1, 2, 3, 4, 5, 6], [4, 9], [0, 1, 5]]
"""Paths with gaps, no tokens, a single move, no moves, and sources that are later targets."""
