"""A step as tensors: rows of tokens, and which keys and values each of them sees."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from backends.core.drafts import ROOT, Draft
from backends.core.steps import SequenceWork
from backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE
from backends.engine.linear import padded_rows


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


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Which rows of the step attend to which slots.

    Attributes:
        rows: rows [first, last) of the step.
        start: position of the first row; those behind it follow one by one.
        pieces: the sequence's keys and values from position 0 on, the step's own included.
    """

    rows: tuple[int, int]
    start: int
    pieces: tuple[KvPiece, ...]


@dataclass(frozen=True, slots=True)
class Feed:
    """What one sequence feeds to a forward pass.

    Attributes:
        token_ids, positions, slots: of each row; keys and values go to the slots.
        spans: who attends to what; rows are counted from the first of the feed.
        num_samples: the last so many rows' logits are wanted.
    """

    token_ids: Many[int]
    positions: Iterable[int]
    slots: Iterable[int]
    spans: tuple[AttentionSpan, ...]
    num_samples: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of a step. `rows` counts padding.

    Attributes:
        token_ids, positions, slots: [rows] int64; where each token's keys and values go.
        spans: one for each sequence, and one more for each further branch of a tree.
        sample_rows: rows whose logits are wanted, padded to the row tile.
        num_samples: how many of them are real.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[AttentionSpan, ...]
    sample_rows: Tensor
    num_samples: int


def build_inputs(feeds: Iterable[Feed], dump_slot: int) -> StepInputs:
    """Lay feeds out as one ragged batch, padded to the row tile.

    Args:
        dump_slot: where padding rows write.
    """
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[int] = []
    spans: list[AttentionSpan] = []
    for feed in feeds:
        first = len(token_ids)
        token_ids.extend(feed.token_ids)
        positions.extend(feed.positions)
        slots.extend(feed.slots)
        samples.extend(range(len(token_ids) - feed.num_samples, len(token_ids)))
        for span in feed.spans:
            rows = (first + span.rows[0], first + span.rows[1])
            spans.append(AttentionSpan(rows, span.start, span.pieces))
    padding = padded_rows(len(token_ids)) - len(token_ids)
    num_samples = len(samples)
    samples.extend([0] * (padded_rows(num_samples) - num_samples))
    return StepInputs(
        torch.tensor(token_ids + [0] * padding),
        torch.tensor(positions + [0] * padding),
        torch.tensor(slots + [dump_slot] * padding),
        tuple(spans),
        torch.tensor(samples, dtype=torch.int64),
        num_samples,
    )


def attending(span: AttentionSpan, rows: int) -> StepInputs:
    """Return a step of so many rows that does nothing but attend: to probe and to test with."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    return StepInputs(zeros, zeros, zeros, (span,), zeros[:0], 0)


def feed_of(work: SequenceWork, dump_slot: int) -> Feed:
    """Return what a sequence feeds to the target in a step."""
    table = work.sequence.block_table
    return Feed(
        work.fed_ids,
        work.positions,
        slots_of(table, range(work.start, work.context_tokens)),
        _spans(work, table, dump_slot),
        work.num_samples,
    )


def slots_of(
    table: Many[int], positions: Iterable[int], page_tokens: int = BLOCK_TOKENS
) -> list[int]:
    """Return where the table keeps the tokens at these positions."""
    return [table[p // page_tokens] * page_tokens + p % page_tokens for p in positions]


def _spans(work: SequenceWork, table: list[int], dump_slot: int) -> tuple[AttentionSpan, ...]:
    """Return one span for all confirmed tokens and the first branch, one for each further branch.

    A branch is read as if its tokens stood behind each other, so its rows have the bits that they
    would have in a chain: attention adds in the order of positions. Ancestor masks over the slots
    of the tree would put zeros in between.
    """
    ends = _branch_ends(work.draft)
    first_end = work.confirmed_end + ends[0]
    rows = (0, first_end - work.start)
    spans = [AttentionSpan(rows, work.start, kv_pieces(table, first_end, dump_slot))]
    for begin, end in pairwise(ends):
        path = _ancestors(work.draft, begin)
        shown = slots_of(table, (work.confirmed_end + i for i in (*path, *range(begin, end))))
        spans.append(
            AttentionSpan(
                (len(work.token_ids) + begin, len(work.token_ids) + end),
                work.confirmed_end + len(path),
                (*_branch_pieces(table, work.confirmed_end, shown, dump_slot),),
            )
        )
    return tuple(spans)


def _branch_ends(draft: Draft) -> list[int]:
    """Return where each run of tokens that follow each other ends."""
    starts = [i for i in range(1, len(draft)) if draft.parent(i) != i - 1]
    return [*starts, len(draft)]


def _ancestors(draft: Draft, place: int) -> list[int]:
    """Return the places on the way from the sequence's end to a token, itself excluded."""
    path = []
    while (place := draft.parent(place)) != ROOT:
        path.append(place)
    return path[::-1]


def _branch_pieces(
    table: list[int], confirmed_end: int, shown: list[int], dump_slot: int
) -> Iterator[KvPiece]:
    """Yield the confirmed tokens' whole tiles as they lie, then the rest and the branch gathered.

    Args:
        shown: slots of the branch, its ancestors first.
    """
    border = confirmed_end // KV_TILE * KV_TILE
    if border:
        yield from kv_pieces(table, border, dump_slot)
    slots = [*slots_of(table, range(border, confirmed_end)), *shown]
    padding = -len(slots) % KV_TILE
    yield KvPiece(border, torch.tensor(slots + [dump_slot] * padding))


def kv_pieces(
    table: list[int], context_tokens: int, dump_slot: int, page_tokens: int = BLOCK_TOKENS
) -> tuple[KvPiece, ...]:
    """Return how to read a sequence in as few pieces as its table allows.

    A tile whose pages lie one behind the other is a view, and so are neighbours that go on where
    it ends; tiles across runs are gathered, neighbours together.

    Args:
        table: the pages of the sequence; those behind the context are not looked at.
        context_tokens: at least 1.
        dump_slot: what gathers read behind the last page.
        page_tokens: slots of a page; need not divide a tile.
    """
    table = table[: -(-context_tokens // page_tokens)]
    end = -(-context_tokens // KV_TILE) * KV_TILE
    if _is_run(table):
        first = table[0] * page_tokens
        return (KvPiece(0, range(first, first + end)),)
    # Where pieces begin: position, and the slot if it is a view.
    begins: list[tuple[int, int | None]] = []
    for start in range(0, end, KV_TILE):
        pages = table[start // page_tokens : -(-(start + KV_TILE) // page_tokens)]
        slot = pages[0] * page_tokens + start % page_tokens if _is_run(pages) else None
        if not begins or slot != _slot_at(start, *begins[-1]):
            begins.append((start, slot))
    ends = [*(start for start, _ in begins[1:]), end]
    return tuple(
        KvPiece(
            start,
            _slots(table, start, stop, dump_slot, page_tokens)
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


def _slots(table: list[int], start: int, stop: int, dump_slot: int, page_tokens: int) -> Tensor:
    """Return the slots of positions `start` to `stop`."""
    pages = torch.tensor(table[start // page_tokens : -(-stop // page_tokens)]) * page_tokens
    slots = (pages[:, None] + torch.arange(page_tokens)).flatten()
    slots = slots[start % page_tokens :][: stop - start]
    return torch.cat([slots, slots.new_full((stop - start - len(slots),), dump_slot)])
