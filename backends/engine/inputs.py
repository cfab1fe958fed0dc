"""The input of a forward pass: rows of tokens, and the KV slots that each row attends to."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from functools import lru_cache
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from draftgate.backends.core.drafts import ROOT
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.linear import padded_rows
from draftgate.backends.engine.transfer import to_device


class AttentionSpan(NamedTuple):
    """Consecutive rows of a step, and the slots that they attend to.

    Attributes:
        rows: number of rows, which follow those of the previous spans.
        start: position of the first row. The positions of the other rows are consecutive. A row
            sees its own position and all earlier positions, including those of this step.
        pages: the sequence's page table. The engine reads an `array` of 64-bit numbers in place.
        tail_start: first position that uses the slots in `tail` instead of the pages.
        tail: slots, empty for most sequences.
    """

    rows: int
    start: int
    pages: Many[int]
    tail_start: int = 0
    tail: tuple[int, ...] = ()


@dataclass(slots=True)
class AttentionSpans:
    """The spans of a step as columns, because one object per sequence would cost host time.

    Attributes:
        page_tokens: tokens per KV page.
        rows, starts, pages: the fields `rows`, `start` and `pages` of each span.
        tails: `tail_start` and `tail` of the spans with a tail, by the index of the span.
    """

    page_tokens: int = BLOCK_TOKENS
    rows: list[int] = field(default_factory=list)
    starts: list[int] = field(default_factory=list)
    pages: list[Many[int]] = field(default_factory=list)
    tails: dict[int, tuple[int, tuple[int, ...]]] = field(default_factory=dict)

    def add(self, span: AttentionSpan) -> None:
        if span.tail:
            self.tails[len(self.rows)] = span.tail_start, span.tail
        self.rows.append(span.rows)
        self.starts.append(span.start)
        self.pages.append(span.pages)

    def __iter__(self) -> Iterator[AttentionSpan]:
        for index, span in enumerate(zip(self.rows, self.starts, self.pages, strict=True)):
            yield AttentionSpan(*span, *self.tails.get(index, ()))

    def __len__(self) -> int:
        return len(self.rows)


class Feed(NamedTuple):
    """The input of one sequence to a forward pass.

    Attributes:
        token_ids: one per row. The step writes their keys and values to consecutive slots from
            `start` on.
        start: position of the first token.
        pages: the sequence's page table.
        num_samples: number of rows at the end of the feed whose logits the step returns.
        positions: positions of the rows of a tree, empty if the positions are consecutive.
        spans: attention spans that cover all rows, empty for a single span over the pages.
        adapter_slot: slot of the sequence's adapter (`lora`), or 0 for none.
    """

    token_ids: Many[int]
    start: int
    pages: Many[int]
    num_samples: int
    positions: Many[int] = ()
    spans: tuple[AttentionSpan, ...] = ()
    adapter_slot: int = 0


class RaggedSpans(NamedTuple):
    """The spans of a step as tensors on its device, for kernels that attend in one launch.

    A chain of drafts counts as confirmed: its rows see all earlier rows.

    Attributes:
        query_starts: int32 [sequences + 1], the first row of each sequence, then the end of the
            last one. Padding sequences have no rows.
        context_lens: int32 [sequences], slots in use, including those of the step.
        tables: the page tables.
        ancestors: int64 [rows], the draft tokens that a row of a tree sees, itself included, as
            bits.
        draft_starts: int32 [sequences], tokens before a tree, or the whole context without a tree.
        positions: int32 [rows], the position of each row in its attention span.
        page_tokens: tokens per KV page.
    """

    query_starts: Tensor
    context_lens: Tensor
    tables: BlockTables
    ancestors: Tensor
    draft_starts: Tensor
    positions: Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of a step. `rows` includes padding.

    Attributes:
        token_ids, positions, slots: int64 [rows]. The step writes keys and values to `slots`.
        spans: one per sequence, plus one for each branch of a tree after the first.
        sample_rows: rows whose logits the step returns, then rows whose hidden state it returns,
            padded to the row tile.
        num_samples: number of rows whose logits the step returns.
        ragged: the spans on the device, or None if the spans are still on the host.
        num_hidden: number of rows whose hidden state the step returns.
        adapter_slots: int64 [rows], slot of each row's adapter, or None if no row has an adapter.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: AttentionSpans
    sample_rows: Tensor
    num_samples: int
    ragged: RaggedSpans | None = None
    num_hidden: int = 0
    adapter_slots: Tensor | None = None

    @property
    def live_rows(self) -> int | Tensor:
        """Number of rows before the padding: on the host, or int32 [1] on the device."""
        if self.ragged is not None:
            return self.ragged.query_starts[-1:]
        return sum(self.spans.rows)

    def on(self, device: torch.device) -> StepInputs:
        """Return the step with its tensors on a device."""
        if self.token_ids.device == device:
            return self
        moved = (self.token_ids, self.positions, self.slots, self.sample_rows)
        token_ids, positions, slots, sample_rows = (to_device(t, device) for t in moved)
        adapters = None if self.adapter_slots is None else to_device(self.adapter_slots, device)
        return replace(
            self,
            token_ids=token_ids,
            positions=positions,
            slots=slots,
            sample_rows=sample_rows,
            adapter_slots=adapters,
        )


@dataclass(slots=True)
class StepRows:
    """Feeds as one ragged batch without padding.

    Attributes:
        spans: the attention spans of all rows.
        token_ids, positions, slots: of each row.
        sample_rows: rows whose logits the step returns.
        adapter_slots: slot of each row's adapter, or empty if no row has an adapter.
    """

    spans: AttentionSpans
    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    adapter_slots: list[int] = field(default_factory=list)


def lay_out(feeds: Iterable[Feed], page_tokens: int = BLOCK_TOKENS) -> StepRows:
    """Return the feeds as one ragged batch.

    Args:
        page_tokens: tokens per KV page.
    """
    spans = AttentionSpans(page_tokens)
    batch = StepRows(spans)
    token_ids, positions, slots = batch.token_ids, batch.positions, batch.slots
    samples = batch.sample_rows
    span_rows, span_starts, span_pages = spans.rows, spans.starts, spans.pages
    rows = 0
    for fed, start, pages, num_samples, tree_positions, own_spans, adapter_slot in feeds:
        count = len(fed)
        if adapter_slot:
            batch.adapter_slots += [0] * (rows - len(batch.adapter_slots)) + [adapter_slot] * count
        if count == 1 and not tree_positions:  # the common case: a decode
            token_ids.append(fed[0])
            positions.append(start)
            slots.append(pages[start // page_tokens] * page_tokens + start % page_tokens)
        else:
            places = range(start, start + count)
            token_ids += fed
            positions += tree_positions or places
            slots += slots_of(pages, places, page_tokens)
        rows += count
        if num_samples == 1:
            samples.append(rows - 1)
        else:
            samples += range(rows - num_samples, rows)
        for span in own_spans:
            spans.add(span)
        if not own_spans:
            span_rows.append(count)
            span_starts.append(start)
            span_pages.append(pages)
    if batch.adapter_slots:
        batch.adapter_slots += [0] * (rows - len(batch.adapter_slots))
    return batch


def lay_out_plan(plan: StepPlan) -> StepRows:
    """Return the target's input for a step as one ragged batch."""
    if not plan.decodes_only:
        return lay_out(map(feed_of, plan.work))
    # Columns take a third of the time of one feed per sequence.
    starts = [work.start for work in plan.work]
    tables = [work.sequence.block_table for work in plan.work]
    adapter_slots = [work.sequence.adapter_slot for work in plan.work]
    return StepRows(
        AttentionSpans(BLOCK_TOKENS, [1] * len(starts), starts, [*tables]),
        [work.token_ids[0] for work in plan.work],
        starts,
        [
            table[start // BLOCK_TOKENS] * BLOCK_TOKENS + start % BLOCK_TOKENS
            for table, start in zip(tables, starts, strict=True)
        ],
        [*range(len(starts))],
        adapter_slots if any(adapter_slots) else [],
    )


def build_inputs(
    feeds: Iterable[Feed],
    dump_slot: int,
    page_tokens: int = BLOCK_TOKENS,
    rows_of: Callable[[int], int] = padded_rows,
) -> StepInputs:
    """Return the feeds as one ragged batch, padded to the row tile.

    Args:
        dump_slot: the slot for keys and values of padding rows.
        page_tokens: tokens per KV page.
        rows_of: as in `padded`.
    """
    return padded(lay_out(feeds, page_tokens), dump_slot, rows_of=rows_of)


def padded(
    batch: StepRows,
    dump_slot: int,
    hidden_rows: Many[int] = (),
    rows_of: Callable[[int], int] = padded_rows,
) -> StepInputs:
    """Return a ragged batch, padded to the row tile.

    Args:
        dump_slot: the slot for keys and values of padding rows.
        hidden_rows: rows whose hidden state the step returns.
        rows_of: returns the number of rows including padding.
    """
    rows, num_samples = len(batch.token_ids), len(batch.sample_rows)
    wanted = [*batch.sample_rows, *hidden_rows]
    padding = rows_of(rows) - rows
    adapter_slots = batch.adapter_slots
    return StepInputs(
        _tensor(batch.token_ids + [0] * padding),
        _tensor(batch.positions + [0] * padding),
        _tensor(batch.slots + [dump_slot] * padding),
        batch.spans,
        _tensor(wanted + [0] * (rows_of(len(wanted)) - len(wanted))),
        num_samples,
        num_hidden=len(hidden_rows),
        adapter_slots=_tensor(adapter_slots + [0] * padding) if adapter_slots else None,
    )


def _tensor(numbers: list[int]) -> Tensor:
    # `torch.tensor` takes five times as long as NumPy.
    return torch.from_numpy(np.array(numbers, dtype=np.int64))


def attention_inputs(span: AttentionSpan, rows: int) -> StepInputs:
    """Return a step of one attention span, to measure and test attention alone."""
    zeros = torch.zeros(rows, dtype=torch.int64)
    spans = AttentionSpans()
    spans.add(span)
    return StepInputs(zeros, zeros, zeros, spans, zeros[:0], 0)


def feed_of(work: SequenceWork) -> Feed:
    """Return the target's input for a sequence in a step."""
    sequence, start, draft = work.sequence, work.start, work.draft
    if not draft.token_ids:
        table, slot = sequence.block_table, sequence.adapter_slot
        return Feed(work.token_ids, start, table, work.samples, adapter_slot=slot)
    fed, table, slot = work.fed_ids, sequence.block_table, sequence.adapter_slot
    if draft.is_chain:
        return Feed(fed, start, table, work.num_samples, adapter_slot=slot)
    end = work.confirmed_end
    positions = [*range(start, end), *[end + depth - 1 for depth in draft.depths]]
    return Feed(fed, start, table, work.num_samples, positions, _spans(work, table), slot)


def slots_of(
    table: Many[int], positions: Iterable[int], page_tokens: int = BLOCK_TOKENS
) -> list[int]:
    """Return the slots of the tokens at these positions."""
    return [table[p // page_tokens] * page_tokens + p % page_tokens for p in positions]


def _spans(work: SequenceWork, table: Many[int]) -> tuple[AttentionSpan, ...]:
    """Return a span for the confirmed tokens and the first branch, and one per further branch."""
    # Attention reads each branch as a chain, so the rows of the branch have the bits of a chain.
    # Attention adds in the order of positions. Ancestor masks over the slots of the tree would
    # insert zeros into these sums.
    first, branches = _branches(work.draft.parents)
    end = work.confirmed_end
    spans = [AttentionSpan(len(work.token_ids) + first, work.start, table)]
    for depth, places in branches:
        slots = slots_of(table, [end + place for place in places])
        spans.append(AttentionSpan(len(places) - depth, end + depth, table, end, tuple(slots)))
    return tuple(spans)


@lru_cache(maxsize=1024)
def _branches(
    parents: tuple[int, ...],
) -> tuple[int, tuple[tuple[int, tuple[int, ...]], ...]]:
    """Return the length of the first branch of a tree, and all other branches.

    A branch is a run of tokens in which every token follows the previous one.

    Returns:
        The length, then the number of ancestors of each other branch, and the places of these
        ancestors and of its tokens.
    """
    ends = [place for place in range(1, len(parents)) if parents[place] != place - 1]
    ends.append(len(parents))
    branches = []
    for begin, end in pairwise(ends):
        path = _ancestors(parents, begin)
        branches.append((len(path), (*path, *range(begin, end))))
    return ends[0], tuple(branches)


def _ancestors(parents: tuple[int, ...], place: int) -> list[int]:
    """Return the places on the path to a token, without the token's own place."""
    path = []
    while (place := parents[place]) != ROOT:
        path.append(place)
    return path[::-1]
