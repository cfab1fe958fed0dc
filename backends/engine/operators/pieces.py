"""How torch reads a sequence's keys and values: as views of the pool where its pages allow."""

from __future__ import annotations

from collections.abc import Sequence as Many
from dataclasses import dataclass

import torch
from torch import Tensor

from draftgate.backends.engine.inputs import AttentionSpan, slots_of
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE


@dataclass(frozen=True, slots=True)
class KvPiece:
    """Consecutive KV tiles of a sequence that are read in one go.

    Attributes:
        start: position of the first token.
        slots: of all tokens, a multiple of `KV_TILE`: a range if they are one run in memory, which
            is read as a view, else [tokens] to be gathered. What lies past the context is masked
            by the reader.
    """

    start: int
    slots: range | Tensor


def pieces_of(span: AttentionSpan, page_tokens: int) -> tuple[KvPiece, ...]:
    """Return how to read what a span's rows see."""
    if not span.tail:
        end = span.start + span.rows
        return kv_pieces(span.pages, end, page_tokens)
    # Whole tiles of pages as they lie, then the rest and the tail gathered.
    border = span.tail_start // KV_TILE * KV_TILE
    before = kv_pieces(span.pages, border, page_tokens) if border else ()
    slots = slots_of(span.pages, range(border, span.tail_start), page_tokens)
    slots.extend(span.tail)
    padding = -len(slots) % KV_TILE
    return (*before, KvPiece(border, torch.tensor(slots + slots[:1] * padding)))


def kv_pieces(
    pages: Many[int], context_tokens: int, page_tokens: int = BLOCK_TOKENS
) -> tuple[KvPiece, ...]:
    """Return how to read a sequence in as few pieces as its table allows.

    A tile whose pages lie one behind the other is a view, and so are neighbours that go on where
    it ends; tiles across runs are gathered, neighbours together.

    Args:
        pages: of the sequence; those behind the context are not looked at.
        context_tokens: at least 1.
        page_tokens: slots of a page; need not divide a tile.
    """
    table = list(pages[: -(-context_tokens // page_tokens)])
    end = -(-context_tokens // KV_TILE) * KV_TILE
    if _is_run(table):
        first = table[0] * page_tokens
        return (KvPiece(0, range(first, first + end)),)
    # Where pieces begin: position, and the slot if it is a view.
    begins: list[tuple[int, int | None]] = []
    for start in range(0, end, KV_TILE):
        some = table[start // page_tokens : -(-(start + KV_TILE) // page_tokens)]
        slot = some[0] * page_tokens + start % page_tokens if _is_run(some) else None
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
    """Return where a position lies in a view that begins with `slot`; None in a gather."""
    return None if slot is None else slot + position - start


def _slots(table: list[int], start: int, stop: int, page_tokens: int) -> Tensor:
    """Return the slots of positions `start` to `stop`; any slot for those behind the last page."""
    pages = torch.tensor(table[start // page_tokens : -(-stop // page_tokens)]) * page_tokens
    slots = (pages[:, None] + torch.arange(page_tokens)).flatten()
    slots = slots[start % page_tokens :][: stop - start]
    return torch.cat([slots, slots.new_full((stop - start - len(slots),), int(slots[0]))])
