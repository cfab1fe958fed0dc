"""Drafts from the target itself, which reads only the beginning and the end of its context.

The method is MagicDec (arXiv 2408.11049) with the cache of StreamingLLM (arXiv 2309.17453). The
target reads the first pages (the attention sinks) and the latest pages. Drafting therefore costs
the same for any context length, while a verify step reads the whole context. The method needs no
second cache. The target reads a sub-list of the sequence's own page table. The keys and values of
drafts go to the slots that the scheduler reserved for them after the sequence.

The keys and values of drafts are temporary. The verify step feeds the pending token and all drafts
again, and each layer writes their slots before it reads them. Drafts without verification leave
values after the end of the sequence, where a step writes every slot before it reads the slot.
Drafting writes only the last pages, which are not shared. The prefix cache shares a page only after
all its tokens are computed, and the pending token is not.

Keys and queries keep the rotation of their true positions, so the omitted pages act like pages with
no weight. StreamingLLM rotates keys by their place in its cache to exceed the trained context
length, which this method does not need.

Sliding windows count places in the sub-list. A layer whose window fits in the latest pages sees the
same tokens as the target. A layer with a longer window also sees sinks that the target no longer
sees. Such a layer may lower acceptance, but never changes the text.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.inputs import AttentionSpan, Feed
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.proposers.chains import Forward, draw_chains
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.costs.step_cost_fit import StepCostFit


class SparseSelfProposer:
    """Proposes chains sampled from the target on a bounded part of each sequence's KV cache."""

    def __init__(
        self,
        forward: Forward,
        *,
        budget_tokens: int,
        sink_tokens: int,
        eos_ids: frozenset[int],
        keep_distributions: bool,
        cost: StepCost,
    ) -> None:
        """Create a proposer, which keeps no state per sequence.

        Args:
            forward: runs the target over its KV pool.
            budget_tokens: maximum number of tokens that a draft reads, rounded down to whole pages.
                Attention reads tiles of `KV_TILE`, so use a multiple of that size.
            sink_tokens: number of budget tokens at the beginning of the sequence, rounded up to
                whole pages.
            eos_ids: tokens that end a sequence, all below the vocabulary's size.
            keep_distributions: whether sampled drafts carry their distributions, for rejection.
            cost: initial cost of the target's steps. Measured drafting updates this cost.

        Raises:
            ValueError: the sizes are not positive, or leave no page for the latest tokens.
        """
        self._sink_pages = -(-sink_tokens // BLOCK_TOKENS)
        self._recent_pages = budget_tokens // BLOCK_TOKENS - self._sink_pages
        if sink_tokens < 1 or self._recent_pages < 1:
            least = (max(self._sink_pages, 1) + 1) * BLOCK_TOKENS
            raise ValueError(
                f"budget_tokens must be at least {least}, the sinks and a page of {BLOCK_TOKENS}, "
                f"not {budget_tokens}, and sink_tokens at least 1, not {sink_tokens}"
            )
        self._budget_tokens = budget_tokens
        self._eos_ids = eos_ids
        self._keep_distributions = keep_distributions
        self._fit = StepCostFit(cost)
        self._forward = forward

    def depth_s(self, sequences: int) -> float:
        """Return the predicted seconds of a step of single tokens that reads the whole budget."""
        return self._fit.cost.seconds(sequences, sequences * self._budget_tokens, sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0, because the proposer uses the target's keys and values."""
        return 0.0

    @torch.inference_mode()
    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each decoding sequence, and an empty draft for other sequences."""
        # A feed can hold only the last pending token, and earlier pending tokens have no KV yet.
        decodes = [request for request in requests if request.sequence.pending_tokens == 1]
        sequences = [request.sequence for request in decodes]

        def next_feed(index: int, position: int, token: int) -> Feed:
            return self._feed(sequences[index], position, token)

        chains = draw_chains(
            decodes,
            [self._feed(s, s.num_computed, s.token_ids[-1]) for s in sequences],
            next_feed,
            self._forward,
            self._observe,
            eos_ids=self._eos_ids,
            keep_distributions=self._keep_distributions,
        )
        drafts = {s.key: chain for s, chain in zip(sequences, chains, strict=True)}
        return [drafts.get(request.sequence.key, Draft()) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing, because the proposer keeps no state."""

    def _observe(self, rows: int, seconds: float) -> None:
        """Fit the cost. A pass has one row per sequence."""
        self._fit.add_step(StepSize(rows, rows * self._budget_tokens, rows, 0), seconds)

    def _feed(self, sequence: Sequence, position: int, token: int) -> Feed:
        """Return the feed of a token, which reads the sub-list and has a slot of its own."""
        table = sequence.block_table
        used = position // BLOCK_TOKENS + 1
        omitted = max(0, used - self._sink_pages - self._recent_pages)
        visible = table[: self._sink_pages] + table[self._sink_pages + omitted : used]
        place = position - omitted * BLOCK_TOKENS
        spans, slot = (AttentionSpan(1, place, visible),), sequence.adapter_slot
        return Feed((token,), position, table, 1, spans=spans, adapter_slot=slot)
