"""CPU attention of a ragged step in torch, over keys and values in pieces of the pool.

Tiles of `KV_TILE` tokens divide the keys and values. torch's flash kernel attends to each tile
separately, with one call for all tiles of a piece. Most pieces are views of the pool, and `_attend`
gathers the other pieces. A merge combines the results of the tiles in order, by the logarithms of
their sums, as in split-KV decoding on GPUs (Flash-Decoding, T. Dao et al., 2023).

The bits of a row therefore do not depend on the padding of the context or its place in the pool. A
tile always has the same size, and a masked tile adds zeros. The bits do not depend on the other
rows either, if the number of rows in each call suits the machine's matrix products (`call_rows`).
The worker tests its own machine at start (`warmup`).
"""

from __future__ import annotations

from collections.abc import Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from functools import lru_cache
from math import gcd
from typing import Any, Final, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from draftgate.backends.engine.inputs import AttentionSpans
from draftgate.backends.engine.kv_pool import KV_TILE
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.operators.pieces import KvPiece, pieces_of
from draftgate.backends.engine.operators.products import USES_AMX
from draftgate.backends.engine.quantisation.fp8_kv import FP8, as_cells, read

CHUNK_TOKENS: Final = 128
"""Maximum query tokens of a call, which limits the masks of a long prefill and the work above the
diagonal."""

FEW_ROWS: Final = 32
"""Maximum rows of a single masked call for all tiles. Longer chunks use separate calls.

The value is the size of a block of the kernel (Zen 4, 2026-11-21).
"""

# Use a private operator of torch, because the public operator does not return the logarithms.
_flash: Final[Any] = torch.ops.aten._scaled_dot_product_flash_attention_for_cpu  # noqa: SLF001


class _Call(NamedTuple):
    """Rows that attend to a run of tiles.

    Attributes:
        rows: slice of the packed queries.
        slots: the first slot of contiguous tiles, or the slots of all tokens in the tiles.
        tiles: number of tiles.
        mask: float32 [tiles, 1, rows, KV_TILE], -inf for masked pairs. None without masked pairs.
    """

    rows: slice
    slots: int | Tensor
    tiles: int
    mask: Tensor | None


@dataclass(frozen=True, slots=True)
class AttentionPlan:
    """The tokens that each row of a step attends to, shared by all layers with the same window.

    A packed row is one query head of a group at one token: row `token * group + head`, the same for
    every KV head. The tokens of a chunk are contiguous and padded to a multiple of the rows of
    `call_rows`.

    Attributes:
        tokens: [packed tokens] row of the step of each token, including padding.
        calls: all calls. The calls of a row are in the order of its tiles.
        tiles: [max tiles, packed rows] index of each row's results in the results of all calls,
            counted by tiles and rows. The entry of a tile without attention is the number of
            results. None if every row has a single tile, because the results are then the rows.
        real: [attending tokens] index among the packed tokens.
        rows: [attending tokens] row of the step.
    """

    tokens: Tensor
    calls: tuple[_Call, ...]
    tiles: Tensor | None
    real: Tensor
    rows: Tensor


class CallRows(NamedTuple):
    """The numbers of rows for which torch's kernel computes every row with the same instructions.

    Attributes:
        divisor: the number of rows in a call is a multiple of this.
        most: maximum rows in a call, or None.
    """

    divisor: int
    most: int | None = None


CALL_ROWS: Final = (CallRows(4), CallRows(12, 24))
"""The choices of `call_rows`, the fastest first.

Products of fewer than 4 rows use other instructions on every machine. MKL for AVX2 on Intel
processors multiplies 3 rows at a time and computes 2 remaining rows in another order. The kernel
divides the rows of a call into blocks of at least 32, so more than 24 rows could leave 2 (tested
on a Zen 4 whose MKL took it for an Intel processor, 2026-11-29).
"""

AMX_ROWS: Final = CallRows(16)
"""The rows of a matrix tile."""

_PROBED_ROWS: Final = (36, 72, 240, 816)
"""Multiples of every divisor. The kernel divides them into blocks of 32, 32, 64 and 256 rows."""


def call_rows(dtype: torch.dtype) -> CallRows:
    """Return the numbers of rows with which the bits of a row do not depend on the other rows.

    If no choice passes the test, the first is returned, and the worker reports inexact results.
    """
    if dtype is torch.bfloat16 and USES_AMX:
        return AMX_ROWS
    return _float32_rows()


@lru_cache
def _float32_rows() -> CallRows:
    # Without AMX, products in bfloat16 have the same order, but rounding hides most differences.
    return next((rows for rows in CALL_ROWS if _is_independent(rows)), CALL_ROWS[0])


def _is_independent(rows: CallRows) -> bool:
    random = torch.Generator().manual_seed(0)
    shapes = (max(_PROBED_ROWS), KV_TILE, KV_TILE)
    queries, keys, values = (torch.randn(1, 2, count, 64, generator=random) for count in shapes)

    def outputs(part: Tensor) -> Tensor:
        return _flash_rows(part, keys, values, None, rows)[0]

    alone = torch.cat([outputs(part) for part in queries.split(rows.divisor, 2)], 2)
    return all(
        torch.equal(outputs(queries[:, :, :count]), alone[:, :, :count]) for count in _PROBED_ROWS
    )


def plan_attention(
    spans: AttentionSpans, group: int, dtype: torch.dtype, window: int | None = None
) -> AttentionPlan:
    """Return the attention plan of a step.

    Args:
        spans: the attention spans of all rows.
        group: query heads per KV head.
        dtype: dtype of queries, keys and values.
        window: number of positions that a row attends to: from p - window + 1 to p for a row at
            position p. None means all positions up to p.
    """
    divisor = call_rows(dtype).divisor
    unit = divisor // gcd(divisor, group)
    packed, real, rows = list[int](), list[int](), list[int]()
    calls: list[_Call] = []
    parts: list[Tensor] = []
    results = before = 0
    for span in spans:
        pieces = pieces_of(span, spans.page_tokens)
        for first in range(before, before + span.rows, CHUNK_TOKENS):
            count = min(CHUNK_TOKENS, before + span.rows - first)
            own = range(first, first + count)
            padding = -count % unit
            real.extend(range(len(packed), len(packed) + count))
            rows.extend(own)
            start = len(packed) * group
            packed.extend((*own, *[first] * padding))
            chunk = slice(start, len(packed) * group)
            visible = _VisibleKeys(span.start + first - before, count, padding, group, window)
            chunk_calls, part = _plan_chunk(pieces, visible, chunk, results)
            calls.extend(chunk_calls)
            parts.append(part)
            results += part.numel()
        before += span.rows
    return AttentionPlan(
        torch.tensor(packed, dtype=torch.int64),
        tuple(calls),
        _join_indices(parts, results),
        torch.tensor(real, dtype=torch.int64),
        torch.tensor(rows, dtype=torch.int64),
    )


def attend(
    queries: Tensor, layer_kv: Tensor, plan: AttentionPlan, softcap: float | None = None
) -> Tensor:
    """Return softmax(q k^T) v for every row of the step.

    Args:
        queries: [rows, num_heads, head_dim], scaled by head_dim ** -0.5.
        layer_kv: [2 * num_kv_heads, slots, head_dim], the layer's memory, which includes the step's
            own keys and values. Each call widens those in FP8.
        plan: the result of `plan_attention`.
        softcap: bound c on the scores s, which become c tanh(s / c), or None.

    Returns:
        [rows, num_heads * head_dim] in the dtype of the queries. Rows that do not attend get zeros.
    """
    step_rows, num_heads, head_dim = queries.shape
    kv_heads = len(layer_kv) // 2
    grouped = queries.view(step_rows, kv_heads, -1, head_dim)[plan.tokens]
    packed = grouped.transpose(0, 1).reshape(kv_heads, -1, head_dim)
    results = [_attend(packed, layer_kv, call, softcap) for call in plan.calls]
    values = torch.cat([result[0].transpose(1, 2).flatten(0, 1) for result in results])
    if plan.tiles is not None:
        sums = torch.cat([result[1].transpose(1, 2).flatten(0, 1) for result in results])
        values = _merge(values, sums, plan.tiles).to(queries.dtype)
    # [packed tokens, group, kv_heads, head_dim] -> [tokens, kv_heads, group, head_dim]
    by_token = values.view(len(plan.tokens), -1, kv_heads, head_dim)[plan.real].transpose(1, 2)
    out = queries.new_zeros(step_rows, num_heads * head_dim)
    return out.index_copy_(0, plan.rows, by_token.reshape(len(plan.rows), -1))


def _attend(
    packed: Tensor, layer_kv: Tensor, call: _Call, softcap: float | None
) -> tuple[Tensor, Tensor]:
    """Return the results of the tiles, [tiles, kv_heads, rows, head_dim], and their log-sum-exp."""
    kv_heads, _, head_dim = packed.shape
    if isinstance(call.slots, Tensor):
        slots = as_cells(layer_kv).index_select(1, call.slots).view(layer_kv.dtype)
        kv, first = read(slots, packed.dtype), 0
    elif layer_kv.dtype is FP8:
        tokens = call.tiles * KV_TILE
        kv, first = read(layer_kv.narrow(1, call.slots, tokens), packed.dtype), 0
    else:
        kv, first = layer_kv, call.slots
    strip = kv.stride(0)
    shape = (call.tiles, kv_heads, KV_TILE, head_dim)
    strides = (KV_TILE * head_dim, strip, head_dim, 1)
    begin = kv.storage_offset() + first * head_dim
    keys = kv.as_strided(shape, strides, begin)
    values = kv.as_strided(shape, strides, begin + kv_heads * strip)
    queries = packed[None, :, call.rows].expand(call.tiles, -1, -1, -1)
    if softcap is not None:
        return _capped(queries, keys, values, call.mask, softcap)
    return _flash_rows(queries, keys, values, call.mask, call_rows(packed.dtype))


def _flash_rows(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, rows: CallRows
) -> tuple[Tensor, Tensor]:
    """Return the results of torch's kernel, which gets at most `rows.most` rows at a time."""
    count = queries.shape[2]
    most = rows.most or count
    results = [
        _flash(
            queries[:, :, start : start + most],
            keys,
            values,
            attn_mask=None if mask is None else mask[:, :, start : start + most],
            scale=1.0,
        )
        for start in range(0, count, most)
    ]
    if len(results) == 1:
        values, sums = results[0]
    else:
        values, sums = (torch.cat(parts, 2) for parts in zip(*results, strict=True))
    return values, sums


def _capped(
    queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor | None, softcap: float
) -> tuple[Tensor, Tensor]:
    """Return what `_flash` returns, with bounded scores.

    torch's kernel cannot bound scores, and its batched products do not promise that a row's bits
    are independent of other rows. `Linear` does, at many times the cost of the operators in C.
    """
    tiles, kv_heads = keys.shape[:2]

    def products(x: Tensor, weights: Tensor) -> Tensor:
        found = [
            Linear(weights[tile, head].float(), pack=False)(x[tile, head].float())
            for tile in range(tiles)
            for head in range(kv_heads)
        ]
        return torch.stack(found).view(tiles, kv_heads, -1, weights.shape[2])

    scores = torch.tanh(products(queries, keys) / softcap) * softcap
    if mask is not None:
        scores += mask
    sums = scores.logsumexp(-1)
    # The sum of a masked tile is -inf, and -inf - -inf would be NaN.
    weights = torch.exp(scores - sums.clamp(min=-1e30)[..., None])
    return products(weights, values.transpose(2, 3)).to(queries.dtype), sums


def _merge(values: Tensor, sums: Tensor, tiles: Tensor) -> Tensor:
    """Return the mean of the tiles' results, weighted by their sums, in order.

    Args:
        values: [results, kv_heads, head_dim].
        sums: float32 [results, kv_heads], logarithms.
        tiles: the indices from `AttentionPlan`.

    Returns:
        float32 [packed rows, kv_heads, head_dim].
    """
    none = sums.new_full((1, sums.shape[1]), -torch.inf)
    logs = torch.cat([sums, none])[tiles]
    weights = torch.exp(logs - logs.amax(0))[..., None]
    # A masked tile has weight 0, so any finite result is valid.
    places = tiles.clamp(max=len(values) - 1)
    total = weights[0].clone()
    merged = values[places[0]] * total
    for place, weight in zip(places[1:], weights[1:], strict=True):
        total += weight
        merged += values[place] * weight
    return merged / total


class _VisibleKeys(NamedTuple):
    """The keys that the rows of a chunk attend to.

    The chunk has `tokens` tokens from `position` on, and `padding` copies of its last token.
    """

    position: int
    tokens: int
    padding: int
    group: int
    window: int | None

    @property
    def tiles(self) -> range:
        """The tiles that at least one row attends to."""
        oldest = 0 if self.window is None else max(0, self.position - self.window + 1)
        return range(oldest // KV_TILE, -(-(self.position + self.tokens) // KV_TILE))

    @property
    def rows(self) -> int:
        """The packed rows of the chunk."""
        return (self.tokens + self.padding) * self.group

    @property
    def unmasked(self) -> range:
        """The tiles that every row attends to completely."""
        newest = self.position + self.tokens - 1
        hidden = 0 if self.window is None else max(0, newest - self.window + 1)
        first = max(self.tiles.start, -(-hidden // KV_TILE))
        return range(first, max(first, (self.position + 1) // KV_TILE))

    def hidden(self, tiles: range) -> Tensor:
        """Return the mask of tokens that a row must not attend to: [rows, tokens of the tiles]."""
        columns = torch.arange(tiles.start * KV_TILE, tiles.stop * KV_TILE)
        ends = torch.arange(self.position, self.position + self.tokens)
        if self.padding:
            ends = torch.cat([ends, ends[-1:].expand(self.padding)])
        rows = ends.repeat_interleave(self.group)[:, None]
        above = columns > rows
        return above if self.window is None else above | (columns <= rows - self.window)


def _plan_chunk(
    pieces: Many[KvPiece], visible: _VisibleKeys, rows: slice, first: int
) -> tuple[list[_Call], Tensor]:
    """Return the calls of a chunk, and the indices of their results: [tiles, rows].

    Args:
        first: number of results before this chunk. The index of a masked tile is -1.
    """
    calls: list[_Call] = []
    places = torch.arange(first, first + len(visible.tiles) * visible.rows).view(-1, visible.rows)
    for tiles in _runs(visible):
        mask = None
        if tiles != visible.unmasked:
            hidden = visible.hidden(tiles).view(visible.rows, len(tiles), KV_TILE).transpose(0, 1)
            mask = torch.zeros(hidden.shape).masked_fill_(hidden, -torch.inf)[:, None]
            begin = tiles.start - visible.tiles.start
            places[begin : begin + len(tiles)].masked_fill_(hidden.all(-1), -1)
        for slots, part in _slots_by_piece(pieces, tiles):
            own = slice(part.start - tiles.start, part.stop - tiles.start)
            calls.append(_Call(rows, slots, len(part), None if mask is None else mask[own]))
    return calls, places


def _runs(visible: _VisibleKeys) -> Iterator[range]:
    """Yield runs of tiles. A chunk of many rows has a separate run for the tiles without a mask."""
    if visible.rows <= FEW_ROWS or not visible.unmasked:
        yield visible.tiles
        return
    yield from filter(
        None,
        (
            range(visible.tiles.start, visible.unmasked.start),
            visible.unmasked,
            range(visible.unmasked.stop, visible.tiles.stop),
        ),
    )


def _slots_by_piece(pieces: Many[KvPiece], tiles: range) -> Iterator[tuple[int | Tensor, range]]:
    """Yield the slots of the tiles and the tiles themselves, by pieces in order."""
    for piece in pieces:
        start = piece.start // KV_TILE
        part = range(max(tiles.start, start), min(tiles.stop, start + len(piece.slots) // KV_TILE))
        if part:
            slots = piece.slots[(part.start - start) * KV_TILE : (part.stop - start) * KV_TILE]
            yield slots.start if isinstance(slots, range) else slots, part


def _join_indices(parts: list[Tensor], results: int) -> Tensor | None:
    """Return the indices of all chunks, [max tiles, rows], with `results` for masked tiles."""
    most = max((len(part) for part in parts), default=1)
    if most == 1:
        return None
    padded = [functional.pad(part, (0, 0, 0, most - len(part)), value=-1) for part in parts]
    places = torch.cat(padded, dim=1)
    return places.masked_fill_(places < 0, results)
