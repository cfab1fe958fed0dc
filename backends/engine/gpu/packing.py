"""From feeds and plans to the lists that a step on the device is written from."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.gpu.layout import HostFields
from draftgate.backends.engine.inputs import Feed, lay_out
from draftgate.backends.engine.kernels.accept_walk_ref import NO_DRAFT
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.operators.ragged import SpanLists, as_bits
from draftgate.backends.engine.sampler import sampling_columns


@dataclass(slots=True)
class PackedFeeds:
    """What a forward pass is fed, one sequence behind the other.

    Attributes:
        sample_rows: rows whose logits are wanted.
        pooled_rows: rows whose hidden state is wanted; on the device they stand behind those.
    """

    token_ids: list[int] = field(default_factory=list)
    positions: list[int] = field(default_factory=list)
    slots: list[int] = field(default_factory=list)
    sample_rows: list[int] = field(default_factory=list)
    spans: SpanLists = field(default_factory=SpanLists)
    pooled_rows: list[int] = field(default_factory=list)

    @classmethod
    def of(
        cls,
        feeds: Iterable[Feed],
        page_tokens: int = BLOCK_TOKENS,
        pooled_rows: list[int] | None = None,
    ) -> PackedFeeds:
        """Return feeds, packed; `pooled_rows` None is none."""
        batch = lay_out(feeds, page_tokens)
        spans = SpanLists.of(batch.spans)
        return cls(
            batch.token_ids,
            batch.positions,
            batch.slots,
            batch.sample_rows,
            spans,
            pooled_rows or [],
        )

    @property
    def num_sequences(self) -> int:
        """Sequences."""
        return len(self.spans.context_lens)

    @property
    def longest_context(self) -> int:
        """Slots that the longest context has in use; 0 without sequences."""
        return max(self.spans.context_lens, default=0)

    def write(self, host: HostFields, dump_slot: int) -> None:
        """Write what the forward pass reads.

        Args:
            dump_slot: where padding rows write their keys and values.
        """
        host.write("token_ids", self.token_ids)
        host.write("positions", self.positions)
        host.write("slots", self.slots, dump_slot)
        host.write("sample_rows", self.sample_rows + self.pooled_rows)
        host.write("ancestors", as_bits(self.spans.ancestors))
        host.write("attention_positions", self.spans.positions)
        # Padding sequences begin and end behind the last row.
        host.write("query_starts", self.spans.query_starts, len(self.token_ids))
        host.write("context_lens", self.spans.context_lens)
        host.write("draft_starts", self.spans.draft_starts)
        self.spans.write_tables(host.tables)


@dataclass(slots=True)
class PackedWalks:
    """What is needed to walk the drafts of a plan.

    Attributes:
        draft_tokens, draft_parents: of each sampled row, as `accept_walk` wants them.
        sample_starts: the first sampled row of each part, and the end of the last one.
        longest: most sampled rows of a part.
        has_trees: whether accepted tokens may have to be moved.
    """

    draft_tokens: list[int] = field(default_factory=list)
    draft_parents: list[int] = field(default_factory=list)
    sample_starts: list[int] = field(default_factory=lambda: [0])
    remaining: list[int] = field(default_factory=list)
    lengths: list[int] = field(default_factory=list)
    ignore_eos: list[int] = field(default_factory=list)
    longest: int = 0
    has_trees: bool = False

    @classmethod
    def of(cls, plan: StepPlan) -> PackedWalks:
        """Return the walks of a plan."""
        packed = cls()
        for work in plan.work:
            packed._add(work)
        return packed

    def _add(self, work: SequenceWork) -> None:
        sequence, draft = work.sequence, work.draft
        if work.samples:
            self.draft_tokens.append(NO_DRAFT)
            self.draft_parents.append(0)
            self.draft_tokens.extend(draft.token_ids)
            # Row 0 is that of the last confirmed token.
            self.draft_parents.extend(draft.parent(place) + 1 for place in range(len(draft)))
        self.sample_starts.append(len(self.draft_tokens))
        self.remaining.append(sequence.remaining_tokens)
        self.lengths.append(work.confirmed_end)
        # A grammar says itself when it ends.
        ignores = sequence.grammar is None and sequence.request.sampling.ignore_eos
        self.ignore_eos.append(int(ignores))
        self.longest = max(self.longest, work.num_samples)
        self.has_trees = self.has_trees or not draft.is_chain

    def write(self, plan: StepPlan, host: HostFields) -> None:
        """Write what draws the tokens of a plan's rows and walks its drafts."""
        columns = sampling_columns(plan)
        for name in columns._fields:
            host.write(name, getattr(columns, name))
        host.write("draft_tokens", self.draft_tokens)
        host.write("draft_parents", self.draft_parents)
        host.write("sample_starts", self.sample_starts, len(self.draft_tokens))
        host.write("remaining", self.remaining)
        host.write("lengths", self.lengths)
        host.write("ignore_eos", self.ignore_eos)
