"""Keys and values of a sequence as pieces for torch, which are views of the pool if possible."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from draftgate.backends.engine.inputs import AttentionSpan, slots_of
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE


@dataclass(frozen=True, slots=True)
class KvPiece:
    """Consecutive KV tiles of a sequence that attention reads together.

    Attributes:
        start: position of the first token.
        slots: slots of all tokens, a multiple of `KV_TILE`. Attention reads a range as a view, and
            gathers the slots of a tensor [tokens]. It masks slots past the context.
    """

    start: int
    slots: range | Tensor


def pieces_of(span: AttentionSpan, page_tokens: int) -> tuple[KvPiece, ...]:
    """Return the pieces that a span's rows read."""
    if not span.tail:
        end = span.start + span.rows
        return kv_pieces(span.pages, end, page_tokens)
    # Read whole tiles of pages in place, then gather the rest and the tail.
    border = span.tail_start // KV_TILE * KV_TILE
    before = kv_pieces(span.pages, border, page_tokens) if border else ()
    slots = slots_of(span.pages, range(border, span.tail_start), page_tokens)
    slots.extend(span.tail)
    padding = -len(slots) % KV_TILE
    return (*before, KvPiece(border, torch.tensor(slots + slots[:1] * padding)))


def kv_pieces(
    pages: Many[int], context_tokens: int, page_tokens: int = BLOCK_TOKENS
) -> tuple[KvPiece, ...]:
    """Return the fewest pieces that cover a sequence's context.

    A tile on consecutive pages is a view, and the view includes following tiles that continue it.
    Neighbouring tiles that cross runs of pages form one piece, which attention gathers.

    Args:
        pages: pages of the sequence. Pages past the context have no effect.
        context_tokens: number of tokens, at least 1.
        page_tokens: tokens per KV page, not necessarily a divisor of a tile.
    """
    table = list(pages[: -(-context_tokens // page_tokens)])
    end = -(-context_tokens // KV_TILE) * KV_TILE
    if _is_run(table):
        first = table[0] * page_tokens
        return (KvPiece(0, range(first, first + end)),)
    # The position of each piece, and the first slot of a piece that is a view.
    begins: list[tuple[int, int | None]] = []
    for start in range(0, end, KV_TILE):
        tile_pages = table[start // page_tokens : -(-(start + KV_TILE) // page_tokens)]
        slot = tile_pages[0] * page_tokens + start % page_tokens if _is_run(tile_pages) else None
        if not begins or slot != _slot_at(start, *begins[-1]):
            begins.append((start, slot))
    ends = [*(start for start, _ in begins[1:]), end]
    return tuple(
        KvPiece(
            start,
            _slots(table, start, stop, page_tokens)
            if slot is None
            else range(slot, slot + stop - start),
        )
        for (start, slot), stop in zip(begins, ends, strict=True)
    )


def _is_run(pages: list[int]) -> bool:
    return pages == list(range(pages[0], pages[0] + len(pages)))


def _slot_at(position: int, start: int, slot: int | None) -> int | None:
    """Return the slot of a position in a view that begins with `slot`, or None without a view."""
    return None if slot is None else slot + position - start


def _slots(table: list[int], start: int, stop: int, page_tokens: int) -> Tensor:
    """Return the slots of positions `start` to `stop`. Slots past the last page are arbitrary."""
    pages = torch.tensor(table[start // page_tokens : -(-stop // page_tokens)]) * page_tokens
    slots = (pages[:, None] + torch.arange(page_tokens)).flatten()
    slots = slots[start % page_tokens :][: stop - start]
    return torch.cat([slots, slots.new_full((stop - start - len(slots),), int(slots[0]))])
