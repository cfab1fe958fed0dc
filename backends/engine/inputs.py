"""A `StepPlan` as tensors."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from backends.core.steps import SequenceWork, StepPlan
from backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE, KvPool
from backends.engine.linear import padded_rows


@dataclass(frozen=True, slots=True)
class AttentionSpan:
    """Which rows of the step attend to which slots.

    Attributes:
        rows: rows [first, last) of the step.
        start: position of the first row.
        kv_tokens: slots to read, a multiple of `KV_TILE`; those past the context are masked.
        first_slot: where the sequence's run begins, when it is one run: a view.
        slots: all slots [kv_tokens], when it is scattered: gathered.
        tail_mask: [rows * query_group, kv_tokens - start] with 0 where a row may look and -inf
            elsewhere, for the columns from `start` on; all before are visible to every row. Each
            row stands as often as query heads share keys.
    """

    rows: tuple[int, int]
    start: int
    kv_tokens: int
    first_slot: int
    slots: Tensor | None
    tail_mask: Tensor


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
        spans.append(_span(work, first, pool))
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


def _span(work: SequenceWork, first: int, pool: KvPool) -> AttentionSpan:
    kv_tokens = -(-work.context_tokens // KV_TILE) * KV_TILE
    table = work.sequence.block_table
    run = table[-1] - table[0] == len(table) - 1 and _ascends_by_one(table)
    slots = None if run else _scattered_slots(table, kv_tokens, pool)
    columns = torch.arange(work.start, kv_tokens)
    row_positions = torch.arange(work.start, work.context_tokens)
    row_positions = row_positions.repeat_interleave(pool.query_group)[:, None]
    mask = torch.zeros(len(row_positions), len(columns))
    mask.masked_fill_(columns > row_positions, -torch.inf)
    return AttentionSpan(
        (first, first + work.num_tokens),
        work.start,
        kv_tokens,
        table[0] * BLOCK_TOKENS,
        slots,
        mask,
    )


def _ascends_by_one(table: list[int]) -> bool:
    return all(b - a == 1 for a, b in pairwise(table))


def _scattered_slots(table: list[int], kv_tokens: int, pool: KvPool) -> Tensor:
    blocks = torch.tensor(table) * BLOCK_TOKENS
    slots = (blocks[:, None] + torch.arange(BLOCK_TOKENS)).flatten()[:kv_tokens]
    missing = kv_tokens - len(slots)
    return torch.cat([slots, slots.new_full((missing,), pool.dump_slot)])
