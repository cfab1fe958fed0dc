"""Drafts from an EAGLE-3 head, which reads features of the target's hidden states.

The target stores the feature of each token in the slot of its keys and values (`taps.py`). The head
keeps keys and values of its own in pages borrowed from the target's memory, as a draft model does
(`draft_model.py`). `DraftTable.valid_tokens` is the number of leading rows that they hold.

Row p needs the feature of position p and the token of position p + 1. A sequence of n tokens, of
which the target has computed all but the last, therefore has n - 1 rows. Rows of drafts rest on the
head's own hidden states, so the head computes them again after verification.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING, Final

import torch
from torch import Tensor

from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.kv_blocks import OutOfBlocks
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.eagle.head import EagleHead, HeadOutput
from draftgate.backends.engine.inputs import Feed, build_inputs, slots_of
from draftgate.backends.engine.kv_pool import DraftLayers, KvPool
from draftgate.backends.engine.proposers.chains import draw_chains
from draftgate.backends.engine.proposers.trees import grow_trees
from draftgate.backends.engine.transfer import to_device
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.costs.step_cost_fit import StepCostFit

if TYPE_CHECKING:
    from draftgate.backends.engine.gpu.head_passes import HeadPasses

PASSES_MEMORY: Final = 0.05
"""Weight of a new draft in the mean number of passes per token, which averages about twenty."""


class HeadRunner:
    """Runs feeds of a head over its pages.

    Attributes:
        reach_tokens: maximum distance, in rows, at which a row can influence logits, or None
            without a bound.
        page_tokens: rows per page.
        ragged: whether one launch attends all rows of a pass, as on a GPU.
    """

    def __init__(
        self, head: EagleHead, pool: KvPool, kv: DraftLayers, passes: HeadPasses | None = None
    ) -> None:
        """Bind a head to the pool that holds the features, and to its layer of the pool.

        Args:
            passes: runs the head over `kv` on a GPU, or None on a CPU.
        """
        (window,) = head.config.model.windows
        self.reach_tokens = window
        self.page_tokens = kv.page_tokens
        self.ragged = passes is not None
        self._head = head
        self._pool = pool
        self._kv = kv
        self._passes = passes

    @torch.inference_mode()
    def read(self, feeds: Many[Feed], slots: list[int]) -> HeadOutput:
        """Run rows of confirmed tokens.

        Args:
            feeds: the tokens and positions of the rows.
            slots: the slot of each row's feature.
        """
        places = to_device(torch.tensor(slots), self._head.device)
        return self.draft(feeds, self._pool.read_features(places))

    @torch.inference_mode()
    def draft(self, feeds: Many[Feed], hidden: Tensor) -> HeadOutput:
        """Run a row after each of these features or hidden states, [rows, hidden_size]."""
        if self._passes is not None:
            return self._passes.run(feeds, hidden)
        inputs = build_inputs(feeds, self._kv.dump_slot, self._kv.page_tokens)
        padding = len(inputs.token_ids) - len(hidden)
        features = torch.nn.functional.pad(hidden, (0, 0, 0, padding))
        return self._head.forward(inputs, features, self._kv.layers)


class EagleProposer:
    """Proposes trees or chains from an EAGLE-3 head.

    Trees are grown without grammar and without changes of the logits. Other drafts are chains.
    """

    def __init__(
        self,
        runner: HeadRunner,
        pages: DraftPages,
        *,
        eos_ids: frozenset[int],
        keep_distributions: bool,
        catch_up_tokens: int,
        cost: StepCost,
        trees: bool = True,
    ) -> None:
        """Create a proposer without sequences.

        Args:
            runner: runs the head.
            pages: the allocator of the head's pages.
            eos_ids: tokens that end a sequence.
            keep_distributions: whether sampled drafts carry their distributions, for rejection.
            catch_up_tokens: maximum number of missing rows that the head computes per step, for all
                sequences together.
            cost: initial cost of a pass by its rows. Measured passes update this cost.
            trees: whether drafts may be trees.
        """
        self._runner = runner
        self._pages = pages
        self._eos_ids = eos_ids
        self._keep_distributions = keep_distributions
        self._catch_up_tokens = catch_up_tokens
        self._trees = trees
        self._fit = StepCostFit(cost)
        self._passes_per_token = 1.0

    @property
    def cost(self) -> StepCost:
        """The cost of a forward pass by its tokens, from the passes so far."""
        return self._fit.cost

    def depth_s(self, sequences: int) -> float:
        """Return the predicted seconds per draft token of passes with one row per sequence.

        A tree has fewer passes than tokens.
        """
        return self._passes_per_token * self._fit.cost.seconds(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return the predicted seconds that the missing rows add to a pass."""
        missing = max(1, len(sequence.token_ids) - 1 - self._first_missing(sequence))
        return self._fit.cost.seconds(missing) - self._fit.cost.seconds(1)

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a draft for each sequence whose rows are computed. Other drafts are empty."""
        ready: list[int] = []
        catching_up: list[tuple[Sequence, int]] = []
        left = self._catch_up_tokens
        for place, request in enumerate(requests):
            sequence = request.sequence
            first, end = self._first_missing(sequence), self._end(sequence)
            rows = min(end - first, left)
            if rows < 1:
                continue
            # The tokens before a pending prompt chunk have features, and the others have none yet.
            drafts = first + rows == len(sequence.token_ids) - 1
            if not self._reserve(sequence, first + rows + (request.max_tokens if drafts else 0)):
                continue
            left -= rows
            sequence.draft_table.valid_tokens = first
            if drafts:
                ready.append(place)
            else:
                catching_up.append((sequence, rows))
        if catching_up:
            self._catch_up(catching_up)
        drafts_of = [NO_DRAFT] * len(requests)
        grown = [place for place in ready if self._grows_tree(requests[place])]
        drawn = [place for place in ready if place not in grown]
        for places, draft in ((grown, self._grow), (drawn, self._draw)):
            if places:
                found = draft([requests[place] for place in places])
                for place, one in zip(places, found, strict=True):
                    drafts_of[place] = one
        return drafts_of

    def forget(self, sequence: Sequence) -> None:
        """Return the sequence's pages to the target."""
        self._pages.release(sequence.draft_table)

    def _catch_up(self, missing: Many[tuple[Sequence, int]]) -> None:
        """Compute the next rows of each sequence, without a draft."""
        feeds = [self._feed(sequence, rows, num_samples=0) for sequence, rows in missing]
        self._runner.read(feeds, self._slots([s for s, _ in missing], feeds))
        for sequence, rows in missing:
            sequence.draft_table.valid_tokens += rows

    def _draw(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each sequence, whose pages must be reserved."""
        sequences = [request.sequence for request in requests]
        rows_of = list(range(len(requests)))  # the request of each row of the last pass
        following: list[int] = []  # the request of each row of the next pass
        hidden: Tensor | None = None

        def next_feed(index: int, position: int, token: int) -> Feed:
            following.append(index)
            pages = sequences[index].draft_table.pages
            return Feed((token,), position - 1, pages, num_samples=1)

        def forward(feeds: Many[Feed]) -> Tensor:
            nonlocal rows_of, following, hidden
            if hidden is None:
                output = self._runner.read(feeds, self._slots(sequences, feeds))
            else:
                at = {request: row for row, request in enumerate(rows_of)}
                before = torch.tensor([at[request] for request in following])
                output = self._runner.draft(feeds, hidden[to_device(before, hidden.device)])
                rows_of = following
            following, hidden = [], output.hidden
            return output.logits

        drafts = draw_chains(
            requests,
            [self._last_feed(sequence) for sequence in sequences],
            next_feed,
            forward,
            self._observe,
            eos_ids=self._eos_ids,
            keep_distributions=self._keep_distributions,
        )
        for sequence in sequences:
            sequence.draft_table.valid_tokens = len(sequence.token_ids) - 1
        return drafts

    def _grows_tree(self, request: DraftRequest) -> bool:
        """Return whether a draft may be a tree, which has neither grammar nor distributions."""
        sequence = request.sequence
        sampled = sequence.request.sampling.temperature > 0
        distributions = self._keep_distributions and sampled
        return self._trees and sequence.is_plain and not distributions

    def _grow(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a tree for each sequence, whose pages must be reserved."""
        sequences = [request.sequence for request in requests]
        passes = 0

        def observe(rows: int, seconds: float) -> None:
            nonlocal passes
            passes += 1
            self._observe(rows, seconds)

        drafts = grow_trees(
            requests,
            [self._last_feed(sequence) for sequence in sequences],
            self._runner.page_tokens,
            self._runner.ragged,
            lambda feeds: self._runner.read(feeds, self._slots(sequences, feeds)),
            self._runner.draft,
            observe,
        )
        ratio = passes / max(request.max_tokens for request in requests)
        self._passes_per_token += PASSES_MEMORY * (ratio - self._passes_per_token)
        for sequence in sequences:
            sequence.draft_table.valid_tokens = len(sequence.token_ids) - 1
        return drafts

    def _last_feed(self, sequence: Sequence) -> Feed:
        """Return the feed of all rows that a draft needs."""
        rows = len(sequence.token_ids) - 1 - sequence.draft_table.valid_tokens
        return self._feed(sequence, rows, num_samples=1)

    def _feed(self, sequence: Sequence, rows: int, num_samples: int) -> Feed:
        """Return the feed of a sequence's next rows."""
        table = sequence.draft_table
        first = table.valid_tokens
        fed = sequence.token_ids[first + 1 : first + 1 + rows]
        return Feed(fed, first, table.pages, num_samples)

    def _slots(self, sequences: Many[Sequence], feeds: Many[Feed]) -> list[int]:
        """Return the slots of the features of all rows of confirmed tokens."""
        return [
            slot
            for sequence, feed in zip(sequences, feeds, strict=True)
            for slot in slots_of(
                sequence.block_table, range(feed.start, feed.start + len(feed.token_ids))
            )
        ]

    def _observe(self, rows: int, seconds: float) -> None:
        """Fit the cost by rows alone. The cost has no term for contexts."""
        self._fit.add_step(StepSize(rows, 0, 0, 0), seconds)

    def _end(self, sequence: Sequence) -> int:
        """Return the number of rows whose token and feature exist."""
        return min(len(sequence.token_ids) - 1, sequence.num_computed)

    def _first_missing(self, sequence: Sequence) -> int:
        """Return the first row to compute, at most the last row, whose logits begin a draft."""
        valid = min(sequence.draft_table.valid_tokens, len(sequence.token_ids) - 2)
        return max(valid, self._unread_rows(sequence), 0)

    def _unread_rows(self, sequence: Sequence) -> int:
        """Return the number of leading rows that no future row can reach."""
        reach = self._runner.reach_tokens
        return 0 if reach is None else max(0, len(sequence.token_ids) - 2 - reach)

    def _reserve(self, sequence: Sequence, rows: int) -> bool:
        """Extend the sequence's pages to hold `rows`. Return whether the memory sufficed."""
        try:
            self._pages.extend(sequence.draft_table, rows, self._unread_rows(sequence))
        except OutOfBlocks:
            return False
        return True
