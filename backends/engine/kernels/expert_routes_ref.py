"""The choice of experts and the grouping of rows by expert in torch.

``route``: for a row with logits l, p = softmax(l). The row's experts are the k with the largest p,
by falling p, and of equal p the lowest expert first. Their shares are p, or p over the sum of the k
largest. A row of padding has the expert ``num_experts``, which does not exist.

``group``: a pair is a row and one of its experts, row by row. Pairs are ordered by expert, and the
pairs of an expert by number. ``tile_rows`` neighbouring pairs of an expert form a tile.

Source: Jiang et al., "Mixtral of Experts" (arXiv 2401.04088).
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Routes(NamedTuple):
    """The experts of each row, by falling probability.

    Attributes:
      experts: int32 ``[rows, per_row]``.
      shares: float32 ``[rows, per_row]``, the factors of their results.
    """

    experts: Tensor
    shares: Tensor


class Groups(NamedTuple):
    """The pairs by expert.

    Attributes:
      places: int32 ``[pairs]``, the place of each pair in the order of experts.
      sources: int32 ``[pairs]``, the pair at each place.
      starts: int32 ``[num_experts + 1]``, the first place of each expert, then the first place of
        padding.
      tiles: int32 ``[num_experts + 1]``, the first tile of each expert, then the number of tiles.
    """

    places: Tensor
    sources: Tensor
    starts: Tensor
    tiles: Tensor


def route(logits: Tensor, per_row: int, live_rows: Tensor, *, normalised: bool) -> Routes:
    """Return the experts of each row.

    Args:
      logits: float32 ``[rows, num_experts]``.
      per_row: number of experts of a row.
      live_rows: int32 ``[1]``, the number of rows before the padding.
      normalised: whether the shares of a row add up to 1.
    """
    rows, num_experts = logits.shape
    shares, experts = logits.softmax(-1).sort(dim=-1, descending=True, stable=True)
    shares, experts = shares[:, :per_row], experts[:, :per_row].int()
    if normalised:
        shares = shares / shares.sum(-1, keepdim=True)
    padding = torch.arange(rows, device=logits.device)[:, None] >= live_rows
    return Routes(experts.masked_fill(padding, num_experts), shares.contiguous())


def group(experts: Tensor, num_experts: int, tile_rows: int) -> Groups:
    """Return the pairs by expert.

    Args:
      experts: int32 ``[rows, per_row]``, from ``route``.
      num_experts: number of experts.
      tile_rows: number of pairs of a tile.
    """
    pairs = experts.flatten()
    counts = torch.bincount(pairs, minlength=num_experts + 1)[:num_experts]
    sources = pairs.argsort(stable=True)
    places = torch.empty_like(sources)
    places[sources] = torch.arange(len(pairs), device=pairs.device)

    def before(numbers: Tensor) -> Tensor:
        return torch.nn.functional.pad(numbers.cumsum(0), (1, 0)).int()

    return Groups(places.int(), sources.int(), before(counts), before(-(-counts // tile_rows)))
