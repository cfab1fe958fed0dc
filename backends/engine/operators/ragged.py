"""The spans of a step as flat arrays, the arguments of `paged_attention`.

A sequence is one span, followed by a span with a tail for each further branch of its draft. The
tail of a branch lists the slots of its path. The kernel takes a path as bits, one per token of the
draft, in the order of slots.

A tree that grows in several passes (`proposers/trees.py`) has a span without rows for the confirmed
tokens, followed by one span with a tail for each row.
"""

from __future__ import annotations

from collections.abc import Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import accumulate, pairwise
from typing import Final

import numpy as np
import numpy.typing as npt
import torch

from draftgate.backends.engine.inputs import AttentionSpan, AttentionSpans, RaggedSpans, slots_of
from draftgate.backends.engine.kernels.paged_attention_ref import BlockTables
from draftgate.backends.engine.transfer import to_device

_MAX_TREE_TOKENS: Final = 64
"""Maximum draft tokens of a tree, the bits of a mask."""


@dataclass(slots=True)
class SpanLists:
    """The fields of `RaggedSpans` as lists.

    The pages of a sequence may be more than its context needs. `table_starts` are the places of
    the needed pages among those of all sequences, and their total number.
    """

    query_starts: list[int] = field(default_factory=lambda: [0])
    context_lens: list[int] = field(default_factory=list)
    draft_starts: list[int] = field(default_factory=list)
    ancestors: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    tables: list[Many[int]] = field(default_factory=list)
    table_starts: list[int] = field(default_factory=list)

    @classmethod
    def from_spans(cls, spans: AttentionSpans) -> SpanLists:
        """Return the spans of a step as lists.

        Raises:
            ValueError: a draft is a tree of more than `_MAX_TREE_TOKENS` tokens.
        """
        lists = cls()
        if spans.tails:
            for group in _grouped(spans):
                lists._add(group, spans.page_tokens)
            lists._place_tables(spans.page_tokens)
            return lists
        lists.query_starts.extend(accumulate(spans.rows))
        ends = [start + rows for start, rows in zip(spans.starts, spans.rows, strict=True)]
        lists.context_lens, lists.draft_starts = ends, ends
        for start, end in zip(spans.starts, ends, strict=True):
            lists.positions.extend(range(start, end))
        lists.ancestors = [0] * len(lists.positions)
        lists.tables = spans.pages
        lists._place_tables(spans.page_tokens)
        return lists

    def _add(self, spans: Many[AttentionSpan], page_tokens: int) -> None:
        """Add a sequence: its own span, then its further branches."""
        own, *branches = spans
        if branches and not own.rows:
            self._add_grown(own, branches, page_tokens)
            return
        rows = sum(span.rows for span in spans)
        self.query_starts.append(self.query_starts[-1] + rows)
        self.context_lens.append(own.start + rows)
        self.tables.append(own.pages)
        for span in spans:
            self.positions.extend(range(span.start, span.start + span.rows))
        if not branches:
            self.draft_starts.append(own.start + rows)
            self.ancestors.extend([0] * rows)
            return
        self.draft_starts.append(branches[0].tail_start)
        self._add_tree(own, branches, page_tokens)

    def _add_grown(self, own: AttentionSpan, rows: Many[AttentionSpan], page_tokens: int) -> None:
        """Add rows of a tree whose earlier tokens are in the cache."""
        most = min(_MAX_TREE_TOKENS, len(own.pages) * page_tokens - own.start)
        slots = slots_of(own.pages, range(own.start, own.start + most), page_tokens)
        place = {slot: index for index, slot in enumerate(slots)}
        paths = [[place[slot] for slot in row.tail] for row in rows]
        self.query_starts.append(self.query_starts[-1] + len(rows))
        self.context_lens.append(own.start + max(map(max, paths)) + 1)
        self.tables.append(own.pages)
        self.draft_starts.append(own.start)
        self.positions.extend(row.start for row in rows)
        self.ancestors.extend(sum(1 << at for at in path) for path in paths)

    def _add_tree(
        self, own: AttentionSpan, branches: Many[AttentionSpan], page_tokens: int
    ) -> None:
        confirmed = branches[0].tail_start - own.start
        first_branch = own.rows - confirmed
        drafts = first_branch + sum(branch.rows for branch in branches)
        if drafts > _MAX_TREE_TOKENS:
            raise ValueError(
                f"a draft tree has {drafts} tokens, more than the maximum of {_MAX_TREE_TOKENS}"
            )
        self.ancestors.extend([0] * confirmed)
        self.ancestors.extend((1 << (depth + 1)) - 1 for depth in range(first_branch))
        start = own.start + confirmed
        slots = slots_of(own.pages, range(start, start + drafts), page_tokens)
        place = {slot: index for index, slot in enumerate(slots)}
        for branch in branches:
            seen = 0
            for depth, slot in enumerate(branch.tail):
                seen |= 1 << place[slot]
                if depth >= branch.start - branch.tail_start:
                    self.ancestors.append(seen)

    def _place_tables(self, page_tokens: int) -> None:
        pages = (-(-context // page_tokens) for context in self.context_lens)
        self.table_starts = [0, *accumulate(pages)]

    def write_tables(self, tables: npt.NDArray[np.int32]) -> None:
        """Write the needed pages of all sequences to an array of at least this number."""
        for (start, end), pages in zip(pairwise(self.table_starts), self.tables, strict=True):
            tables[start:end] = pages if len(pages) == end - start else pages[: end - start]


def as_bits(masks: list[int]) -> npt.NDArray[np.int64]:
    """Return 64-bit masks as signed integers with the same bits."""
    return np.array(masks, dtype=np.uint64).view(np.int64)


def ragged_spans(spans: AttentionSpans, device: torch.device, rows: int = 0) -> RaggedSpans:
    """Return spans as tensors on the device, with one copy per field.

    Args:
        spans: the spans of a step.
        device: device of the tensors.
        rows: rows of the step including padding, the length of fields with a value per row.
    """
    lists = SpanLists.from_spans(spans)
    padding = [0] * (rows - len(lists.positions))
    lists.positions.extend(padding)
    lists.ancestors.extend(padding)
    tables = np.empty(lists.table_starts[-1], dtype=np.int32)
    lists.write_tables(tables)
    longest = -(-max(lists.context_lens, default=0) // spans.page_tokens)

    def column(values: list[int]) -> torch.Tensor:
        return to_device(torch.tensor(values, dtype=torch.int32), device)

    return RaggedSpans(
        column(lists.query_starts),
        column(lists.context_lens),
        BlockTables(
            to_device(torch.from_numpy(tables), device), column(lists.table_starts[:-1]), longest
        ),
        to_device(torch.from_numpy(as_bits(lists.ancestors)), device),
        column(lists.draft_starts),
        column(lists.positions),
        spans.page_tokens,
    )


def _grouped(spans: Iterable[AttentionSpan]) -> list[list[AttentionSpan]]:
    groups: list[list[AttentionSpan]] = []
    for span in spans:
        if span.tail:
            groups[-1].append(span)
        else:
            groups.append([span])
    return groups
