"""Attention of a ragged step on a CPU: the keys and values of a sequence read as one view.

Bits of a row must not depend on how many rows are computed with it, nor on how far the context
is padded. Measured on Zen 4 with MKL (2026-11): products over the head width and softmax with a
masked tail are equal however padded, with 4 rows or more; the product with the values is not, when
its inner size, the KV tokens, varies. So it is done in tiles of `KV_TILE` tokens, added in order.
"""

from __future__ import annotations

from typing import Final

import torch
from torch import Tensor

from backends.engine.inputs import AttentionSpan
from backends.engine.kv_pool import KV_TILE

MIN_ROWS: Final = 8
"""Fewest query rows of a product; with under 4 another kernel gives other bits."""

CHUNK_TOKENS: Final = 128
"""Query tokens computed at once, which bounds the scores of a long prefill in memory."""


def attend(queries: Tensor, layer_kv: Tensor, spans: tuple[AttentionSpan, ...]) -> Tensor:
    """Return softmax(q k^T) v for every row of the step.

    Args:
        queries: [rows, num_heads, head_dim], already scaled by head_dim ** -0.5.
        layer_kv: the layer's [2 * num_kv_heads, slots, head_dim] of the pool, with the step's own
            keys and values in it.
        spans: who attends to what. Rows in no span (padding) come out as zeros.

    Returns:
        [rows, num_heads * head_dim].
    """
    rows, num_heads, head_dim = queries.shape
    kv_heads = layer_kv.shape[0] // 2
    grouped = queries.view(rows, kv_heads, num_heads // kv_heads, head_dim)
    out = torch.zeros_like(grouped)
    for span in spans:
        if span.slots is None:
            kv = layer_kv[:, span.first_slot : span.first_slot + span.kv_tokens]
        else:
            kv = layer_kv.index_select(1, span.slots)
        for first in range(0, span.rows[1] - span.rows[0], CHUNK_TOKENS):
            _attend_chunk(grouped, kv, span, first, out)
    return out.view(rows, num_heads * head_dim)


def _attend_chunk(
    grouped: Tensor, kv: Tensor, span: AttentionSpan, first: int, out: Tensor
) -> None:
    """Fill `out` for up to `CHUNK_TOKENS` rows of a span, from its row `first` on."""
    _, kv_heads, group, head_dim = grouped.shape
    begin = span.rows[0] + first
    tokens = min(CHUNK_TOKENS, span.rows[1] - begin)
    # Too few rows are made up with neighbours' (a step has at least a tile), and not looked at.
    computed = max(tokens, -(-MIN_ROWS // group))
    lead = max(0, begin + computed - len(grouped))
    query = grouped[begin - lead : begin - lead + computed]
    # [kv_heads, rows, head_dim]: the query heads that share keys are rows too.
    query = query.transpose(0, 1).reshape(kv_heads, -1, head_dim)
    scores = torch.bmm(query, kv[:kv_heads].transpose(1, 2))
    own = slice(lead * group, (lead + tokens) * group)
    scores[:, own, span.start :] += span.tail_mask[first * group : (first + tokens) * group]
    result = _times_values(torch.softmax(scores, -1), kv[kv_heads:])
    shaped = result[:, own].view(kv_heads, tokens, group, head_dim)
    out[begin : begin + tokens] = shaped.transpose(0, 1)


def _times_values(weights: Tensor, values: Tensor) -> Tensor:
    """Return weights @ values, tile by tile in order."""
    result = torch.bmm(weights[:, :, :KV_TILE], values[:, :KV_TILE])
    for begin in range(KV_TILE, weights.shape[2], KV_TILE):
        tile = slice(begin, begin + KV_TILE)
        result.baddbmm_(weights[:, :, tile], values[:, tile])
    return result
