"""A `StepPlan` as tensors."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from backends.core.steps import StepPlan
from backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE, KvPool
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
class StepInputs:
    """The tensors of a step. `rows` counts padding.

    Attributes:
        token_ids, positions, slots: [rows] int64; where each token's keys and values go.
        spans: one per sequence.
        sample_rows: rows whose logits are wanted, padded to the row tile.
        num_samples: how many of them are real.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[AttentionSpan, ...]
    sample_rows: Tensor
    num_samples: int


def build_inputs(plan: StepPlan, pool: KvPool) -> StepInputs:
    """Lay the work of a step out as one ragged batch, padded to the row tile."""
    token_ids: list[int] = []
    positions: list[int] = []
    slots: list[int] = []
    samples: list[int] = []
    spans = []
    for work in plan.work:
        first = len(token_ids)
        token_ids.extend(work.token_ids)
        where = range(work.start, work.context_tokens)
        positions.extend(where)
        table = work.sequence.block_table
        slots.extend(table[p // BLOCK_TOKENS] * BLOCK_TOKENS + p % BLOCK_TOKENS for p in where)
        samples.extend(range(len(token_ids) - work.num_samples, len(token_ids)))
        pieces = kv_pieces(table, work.context_tokens, pool.dump_slot)
        spans.append(AttentionSpan((first, len(token_ids)), work.start, pieces))
    padding = padded_rows(len(token_ids)) - len(token_ids)
    num_samples = len(samples)
    samples.extend([0] * (padded_rows(num_samples) - num_samples))
    return StepInputs(
        torch.tensor(token_ids + [0] * padding),
        torch.tensor(positions + [0] * padding),
        torch.tensor(slots + [pool.dump_slot] * padding),
        tuple(spans),
        torch.tensor(samples, dtype=torch.int64),
        num_samples,
    )


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
