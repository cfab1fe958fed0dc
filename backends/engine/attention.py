"""Attention of a ragged step on a CPU, over keys and values that lie in pieces of the pool.

Bits of a row must not depend on how many rows are computed with it, on how far the context is
padded, nor on where in the pool it lies. Measured on Zen 4 with MKL (2026-11): products over the
head width and softmax with masked ends are equal however padded and cut, with 4 rows or more; the
product with the values is not, when its inner size, the KV tokens, varies. So it is done in tiles
of `KV_TILE` tokens, added in order.

Everything is computed in float32. A bfloat16 pool is widened a tile at a time, as a tile fits the
second-level cache: for decodes that is no slower than oneDNN's bfloat16 products (0.7 to 1.1 times
the time at 512 to 4096 tokens; chunks of 128 tokens take 2 to 3 times as long), a third of the
error, and the bits are as independent as in float32 (one thread, Zen 4, 2026-11-21).
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache
from typing import Final

import torch
from torch import Tensor

from backends.engine.inputs import AttentionSpan
from backends.engine.kv_pool import KV_TILE

MIN_ROWS: Final = 8
"""Fewest query rows of a product; with under 4 another kernel gives other bits."""

CHUNK_TOKENS: Final = 128
"""Query tokens computed at once, which bounds the scores of a long prefill in memory."""


def attend(
    queries: Tensor,
    layer_kv: Tensor,
    spans: tuple[AttentionSpan, ...],
    window: int | None = None,
) -> Tensor:
    """Return softmax(q k^T) v for every row of the step.

    Args:
        queries: [rows, num_heads, head_dim], already scaled by head_dim ** -0.5.
        layer_kv: the layer's [2 * num_kv_heads, slots, head_dim] of the pool, with the step's own
            keys and values in it.
        spans: who attends to what. Rows in no span (padding) come out as zeros.
        window: a row at position p sees positions p - window + 1 to p; None: all up to p.

    Returns:
        [rows, num_heads * head_dim] in the dtype of the queries.
    """
    rows, num_heads, head_dim = queries.shape
    kv_heads = layer_kv.shape[0] // 2
    grouped = queries.view(rows, kv_heads, num_heads // kv_heads, head_dim)
    out = torch.zeros_like(grouped)
    for span in spans:
        for first in range(*span.rows, CHUNK_TOKENS):
            _attend_chunk(grouped, layer_kv, span, first, window, out)
    return out.view(rows, num_heads * head_dim)


def _attend_chunk(
    grouped: Tensor,
    layer_kv: Tensor,
    span: AttentionSpan,
    first: int,
    window: int | None,
    out: Tensor,
) -> None:
    """Fill `out` for up to `CHUNK_TOKENS` rows of a span, from row `first` of the step on."""
    _, kv_heads, group, head_dim = grouped.shape
    tokens = min(CHUNK_TOKENS, span.rows[1] - first)
    position = span.start + first - span.rows[0]
    # Tiles that no row of the chunk may see have weights of exactly zero: they are left out.
    oldest = 0 if window is None else max(0, position - window + 1)
    begin = oldest // KV_TILE * KV_TILE
    end = -(-(position + tokens) // KV_TILE) * KV_TILE
    kv = list(_read(layer_kv, span, begin, end))

    # Too few rows are made up with neighbours' (a step has at least a tile), and not looked at.
    computed = max(tokens, -(-MIN_ROWS // group))
    lead = max(0, first + computed - len(grouped))
    query = grouped[first - lead : first - lead + computed]
    # [kv_heads, rows, head_dim]: the query heads that share keys are rows too.
    query = query.transpose(0, 1).reshape(kv_heads, -1, head_dim).float()
    scores = _scores(query, kv)
    own = slice(lead * group, (lead + tokens) * group)
    _mask(scores[:, own], position - begin, tokens, window)
    result = _times_values(torch.softmax(scores, -1), kv)
    shaped = result[:, own].view(kv_heads, tokens, group, head_dim)
    out[first : first + tokens] = shaped.transpose(0, 1)


def _read(layer_kv: Tensor, span: AttentionSpan, begin: int, end: int) -> Iterator[Tensor]:
    """Yield [2 * num_kv_heads, tokens, head_dim] of positions `begin` to `end` in order.

    Borders are those of tiles. What is yielded is to be widened at once: in float32 whole pieces,
    else tiles.
    """
    for piece in span.pieces:
        slots = piece.slots[max(begin - piece.start, 0) : max(end - piece.start, 0)]
        if not len(slots):
            continue
        if isinstance(slots, range):
            kv = layer_kv[:, slots.start : slots.stop]
        else:
            kv = layer_kv.index_select(1, slots)
        if kv.dtype is torch.float32:
            yield kv
        else:
            yield from kv.split(KV_TILE, dim=1)


def _scores(query: Tensor, kv: list[Tensor]) -> Tensor:
    """Return [num_kv_heads, rows, KV tokens] of query @ keys."""
    kv_heads = len(query)
    parts = [torch.bmm(query, part[:kv_heads].float().transpose(1, 2)) for part in kv]
    return parts[0] if len(parts) == 1 else torch.cat(parts, dim=-1)


def _mask(scores: Tensor, column: int, tokens: int, window: int | None) -> None:
    """Set the scores of what a row may not see to -inf.

    Args:
        scores: [num_kv_heads, tokens * query_group, KV tokens].
        column: that of the first token itself.
        tokens: how many there are, one behind the other.
        window: as in `attend`.
    """
    below = _below(tokens, scores.shape[1] // tokens)
    if column + tokens < scores.shape[2]:
        scores[:, :, column + tokens :] = -torch.inf
    if tokens > 1:
        scores[:, :, column + 1 : column + tokens].masked_fill_(~below, -torch.inf)
    if window is None or column + tokens <= window:
        return
    oldest = column - window + 1
    if oldest > 0:
        scores[:, :, :oldest] = -torch.inf
    hidden = max(-oldest, 0)
    if tokens > 1:
        scores[:, :, oldest + hidden : oldest + tokens - 1].masked_fill_(
            below[:, hidden:], -torch.inf
        )


@lru_cache(maxsize=64)
def _below(tokens: int, group: int) -> Tensor:
    """Return [tokens * group, tokens - 1] that is true where the token is behind the column's."""
    token = torch.arange(tokens).repeat_interleave(group)
    return token[:, None] > torch.arange(tokens - 1)


def _times_values(weights: Tensor, kv: list[Tensor]) -> Tensor:
    """Return weights @ values, tile by tile in order."""
    kv_heads, rows, _ = weights.shape
    result = weights.new_zeros(kv_heads, rows, kv[0].shape[2])
    begin = 0
    for part in kv:
        for values in part[kv_heads:].split(KV_TILE, dim=1):
            result.baddbmm_(weights[:, :, begin : begin + KV_TILE], values.float())
            begin += KV_TILE
    return result
