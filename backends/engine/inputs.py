"""A step as tensors: rows of tokens, and which keys and values each of them sees."""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple

import torch
from torch import Tensor

from backends.core.drafts import ROOT, Draft
from backends.core.steps import SequenceWork
from backends.engine.kv_pool import BLOCK_TOKENS
from backends.engine.linear import padded_rows
from backends.engine.transfer import to_device


class AttentionSpan(NamedTuple):
    """Which rows of the step attend to which slots.

    Attributes:
        rows: rows [first, last) of the step.
        start: position of the first row; those behind it follow one by one. They see all positions
            before their own, and the step's own keys and values are among them.
        pages: the sequence's page table; an `array` of 64-bit numbers is read as it lies.
        page_tokens: slots of a page.
        tail_start: position from which on slots are those of `tail`, not of the pages.
        tail: slots; none for most sequences.
    """

    rows: tuple[int, int]
    start: int
    pages: Many[int]
    page_tokens: int = BLOCK_TOKENS
    tail_start: int = 0
    tail: tuple[int, ...] = ()

    def moved(self, rows: int) -> AttentionSpan:
        """Return the span of rows that stand so many rows further on."""
        return self._replace(rows=(self.rows[0] + rows, self.rows[1] + rows))


class Feed(NamedTuple):
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


class RaggedSpans(NamedTuple):
    """The spans of a step as tensors on its device, for kernels that attend in one launch.

    A chain of drafts counts as confirmed: rows of it see all rows before them.

    Attributes:
        query_starts: int32 [sequences + 1], the first row of each sequence, and the end of the last
            one; sequences that are padding have no rows.
        context_lens: int32 [sequences], slots in use, those of the step included.
        tables: int32 [sequences, most pages]; what lies behind a context is not read.
        ancestors: int64 [rows], draft tokens that a row of a tree sees, itself included, as bits.
        draft_starts: int32 [sequences], tokens before a tree; without one the whole context.
        positions: int32 [rows], of each row among what it attends to.
        page_tokens: slots of a page.
    """

    query_starts: Tensor
    context_lens: Tensor
    tables: Tensor
    ancestors: Tensor
    draft_starts: Tensor
    positions: Tensor
    page_tokens: int


@dataclass(frozen=True, slots=True)
class StepInputs:
    """The tensors of a step. `rows` counts padding.

    Attributes:
        token_ids, positions, slots: [rows] int64; where each token's keys and values go.
        spans: one for each sequence, and one more for each further branch of a tree.
        sample_rows: rows whose logits are wanted, padded to the row tile.
        num_samples: how many of them are real.
        ragged: the spans on the device, if they are there already.
    """

    token_ids: Tensor
    positions: Tensor
    slots: Tensor
    spans: tuple[AttentionSpan, ...]
    sample_rows: Tensor
    num_samples: int
    ragged: RaggedSpans | None = None

    def on(self, device: torch.device) -> StepInputs:
        """Return the same step with its tensors on a device."""
        if self.token_ids.device == device:
            return self
        moved = (self.token_ids, self.positions, self.slots, self.sample_rows)
        token_ids, positions, slots, sample_rows = (to_device(t, device) for t in moved)
        return replace(
            self, token_ids=token_ids, positions=positions, slots=slots, sample_rows=sample_rows
        )


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
        spans.extend(span.moved(first) for span in feed.spans)
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


def feed_of(work: SequenceWork) -> Feed:
    """Return what a sequence feeds to the target in a step."""
    table = work.sequence.block_table
    return Feed(
        work.fed_ids,
        work.positions,
        slots_of(table, range(work.start, work.context_tokens)),
        _spans(work, table),
        work.num_samples,
    )


def slots_of(
    table: Many[int], positions: Iterable[int], page_tokens: int = BLOCK_TOKENS
) -> list[int]:
    """Return where the table keeps the tokens at these positions."""
    return [table[p // page_tokens] * page_tokens + p % page_tokens for p in positions]


def _spans(work: SequenceWork, table: Many[int]) -> tuple[AttentionSpan, ...]:
    """Return one span for all confirmed tokens and the first branch, one for each further branch.

    A branch is read as if its tokens stood behind each other, so its rows have the bits that they
    would have in a chain: attention adds in the order of positions. Ancestor masks over the slots
    of the tree would put zeros in between.
    """
    if work.draft.is_chain:
        return (AttentionSpan((0, work.num_tokens), work.start, table),)
    ends = _branch_ends(work.draft)
    spans = [AttentionSpan((0, len(work.token_ids) + ends[0]), work.start, table)]
    for begin, end in pairwise(ends):
        path = _ancestors(work.draft, begin)
        rows = (len(work.token_ids) + begin, len(work.token_ids) + end)
        shown = slots_of(table, (work.confirmed_end + i for i in (*path, *range(begin, end))))
        spans.append(
            AttentionSpan(
                rows,
                work.confirmed_end + len(path),
                table,
                tail_start=work.confirmed_end,
                tail=tuple(shown),
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
