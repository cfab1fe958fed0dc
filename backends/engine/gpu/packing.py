"""Lists of a step's rows and drafts, which fill the fields of a GPU step."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from draftgate.backends.core.drafts import ROOT
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.gpu.layout import HostFields
from draftgate.backends.engine.inputs import Feed, StepRows, lay_out
from draftgate.backends.engine.kernels.accept_walk_ref import NO_DRAFT
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.operators.ragged import SpanLists, as_bits
from draftgate.backends.engine.sampler import Columns


@dataclass(slots=True)
class PackedFeeds:
    """The input of a forward pass: rows, attention spans, and the rows to return."""

    rows: StepRows
    spans: SpanLists
    hidden_rows: list[int]

    @property
    def longest_context(self) -> int:
        """KV slots of the longest context, 0 without sequences."""
        return max(self.spans.context_lens, default=0)

    @property
    def num_pages(self) -> int:
        """KV pages of all contexts. Pages that sequences share count once for each of them."""
        return self.spans.table_starts[-1]

    def write(self, host: HostFields, dump_slot: int) -> None:
        """Write the fields that the forward pass reads.

        Args:
            host: the fields to write.
            dump_slot: the slot for keys and values of padding rows.
        """
        rows, spans = self.rows, self.spans
        host.write("token_ids", rows.token_ids)
        host.write("positions", rows.positions)
        host.write("slots", rows.slots, dump_slot)
        # The rows whose hidden state the step returns follow the sampled rows.
        host.write("sample_rows", rows.sample_rows + self.hidden_rows)
        host.write("ancestors", as_bits(spans.ancestors))
        host.write("attention_positions", spans.positions)
        # Padding sequences begin and end after the last row.
        host.write("query_starts", spans.query_starts, len(rows.token_ids))
        host.write("context_lens", spans.context_lens)
        host.write("draft_starts", spans.draft_starts)
        host.write("table_starts", spans.table_starts[:-1])
        spans.write_tables(host.tables)


def pack_feeds(feeds: Iterable[Feed], page_tokens: int = BLOCK_TOKENS) -> PackedFeeds:
    """Pack feeds into one ragged batch.

    Args:
        feeds: the input of each sequence.
        page_tokens: slots of a page.
    """
    return pack_rows(lay_out(feeds, page_tokens))


def pack_rows(rows: StepRows, hidden_rows: list[int] | None = None) -> PackedFeeds:
    """Pack a ragged batch.

    Args:
        hidden_rows: rows whose hidden state the step returns.
    """
    return PackedFeeds(rows, SpanLists.from_spans(rows.spans), hidden_rows or [])


@dataclass(slots=True)
class PackedWalks:
    """The drafts of a plan in the format of `accept_walk`.

    Attributes:
        draft_tokens, draft_parents: of each sampled row.
        sample_starts: the first sampled row of each sequence, then the end of the last sequence.
        longest: maximum number of sampled rows of a sequence.
        has_trees: whether the accept walk may move accepted tokens.
    """

    draft_tokens: list[int] = field(default_factory=list)
    draft_parents: list[int] = field(default_factory=list)
    sample_starts: list[int] = field(default_factory=lambda: [0])
    remaining: list[int] = field(default_factory=list)
    ignore_eos: list[bool] = field(default_factory=list)
    longest: int = 0
    has_trees: bool = False

    def write(self, sampling: Columns, host: HostFields) -> None:
        """Write the fields that sampling and the accept walk read."""
        for name, column in sampling.items():
            host.write(name, column)
        host.write("draft_tokens", self.draft_tokens)
        host.write("draft_parents", self.draft_parents)
        host.write("sample_starts", self.sample_starts, len(self.draft_tokens))
        host.write("remaining", self.remaining)
        host.write("ignore_eos", self.ignore_eos)


def pack_walks(plan: StepPlan) -> PackedWalks:
    """Pack the drafts of a plan."""
    sequences = [work.sequence for work in plan.work]
    packed = PackedWalks(
        remaining=[sequence.remaining_tokens for sequence in sequences],
        # A grammar decides the end of the text by itself.
        ignore_eos=[s.grammar is None and s.request.sampling.ignore_eos for s in sequences],
    )
    if plan.decodes_only:
        count = len(sequences)
        packed.draft_tokens, packed.draft_parents = [NO_DRAFT] * count, [0] * count
        packed.sample_starts, packed.longest = [*range(count + 1)], 1
        return packed
    for work in plan.work:
        draft = work.draft
        if work.samples:
            # Row 0 belongs to the last confirmed token.
            packed.draft_tokens += (NO_DRAFT, *draft.token_ids)
            parents = draft.parents or range(ROOT, len(draft) - 1)
            packed.draft_parents += (0, *[parent + 1 for parent in parents])
        packed.sample_starts.append(len(packed.draft_tokens))
        packed.longest = max(packed.longest, work.num_samples)
        packed.has_trees = packed.has_trees or not draft.is_chain
    return packed
