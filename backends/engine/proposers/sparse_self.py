"""Drafts from the target itself, which reads only the beginning and the end of its context.

MagicDec (arXiv 2408.11049) with the cache of StreamingLLM (arXiv 2309.17453). The target reads the
first pages (the attention sinks) and the latest ones, so drafting costs the same for any context
length, while a verify step reads the whole context. There is no second cache: drafts are fed
through a sub-list of the sequence's own page table, and their keys and values go to the slots that
the scheduler reserved for them after the sequence.

The keys and values of drafts are temporary. The verify step feeds the pending token and all drafts
again, and each layer writes their slots before it reads them. Drafts that are not verified leave
values after the end of the sequence, where every slot is written before it is read. Only the last
pages are written, and those are not shared: the prefix cache knows a page only when all its tokens
are computed, and the pending token is not.

Keys keep the rotation of their true positions, as do queries, so the omitted pages act as if they
had no weight. (StreamingLLM rotates keys by their place in its cache to exceed the trained context
length, which is not needed here.)

Sliding windows count places in the sub-list. If a layer's window is not longer than the latest
pages, the layer sees the same tokens as the target. If it is longer, the layer also sees sinks that
the target does not see any more. That may lower acceptance, but never changes the text.
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence as Many

import torch
from torch import Tensor

from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.inputs import AttentionSpan, Feed, build_inputs
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.chains import Forward, draw_chains
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.costs.step_cost_fit import StepCostFit


class SparseSelfProposer:
    """Proposes chains sampled from the target on a bounded part of each sequence's KV cache."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        budget_tokens: int,
        sink_tokens: int,
        eos_ids: frozenset[int],
        keep_distributions: bool,
        cost: StepCost,
        forward: Forward | None = None,
    ) -> None:
        """Create a proposer, which keeps no state per sequence.

        Args:
            decoder: the target.
            pool: the target's keys and values.
            budget_tokens: upper bound on the tokens that a draft reads, rounded down to whole
                pages. Attention reads tiles of `KV_TILE`, so use a multiple of it.
            sink_tokens: how many of them are the first of the sequence, rounded up to whole pages.
            eos_ids: tokens that end a sequence, all below the vocabulary's size.
            keep_distributions: whether sampled drafts carry their distributions, for rejection.
            cost: initial cost of the target's steps; updated by measured drafting.
            forward: runs the decoder over the pool; by default the decoder itself.

        Raises:
            ValueError: if the sizes are not positive, or leave no page for the latest tokens.
        """
        self._sink_pages = -(-sink_tokens // BLOCK_TOKENS)
        self._recent_pages = budget_tokens // BLOCK_TOKENS - self._sink_pages
        if sink_tokens < 1 or self._recent_pages < 1:
            least = (max(self._sink_pages, 1) + 1) * BLOCK_TOKENS
            raise ValueError(
                f"budget_tokens must be at least {least}, the sinks and a page of {BLOCK_TOKENS}, "
                f"not {budget_tokens}, and sink_tokens at least 1, not {sink_tokens}"
            )
        self._decoder = decoder
        self._pool = pool
        self._budget_tokens = budget_tokens
        self._eos_ids = eos_ids
        self._keep_distributions = keep_distributions
        self._fit = StepCostFit(cost)
        self._forward = forward or self._run

    def depth_s(self, sequences: int) -> float:
        """Return the predicted seconds of a step of one token each that reads the budget."""
        return self._fit.cost.seconds(sequences, sequences * self._budget_tokens, sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0: the keys and values are those of the target."""
        return 0.0

    @torch.inference_mode()
    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each decoding sequence, and an empty draft for the others."""
        # With several pending tokens, only the last one could be fed; the others have no KV yet.
        decodes = [request for request in requests if request.sequence.pending_tokens == 1]
        sequences = [request.sequence for request in decodes]

        def next_feed(index: int, position: int, token: int) -> Feed:
            return self._feed(sequences[index].block_table, position, token)

        chains = draw_chains(
            decodes,
            [self._feed(s.block_table, s.num_computed, s.token_ids[-1]) for s in sequences],
            next_feed,
            self._forward,
            self._observe,
            eos_ids=self._eos_ids,
            keep_distributions=self._keep_distributions,
        )
        drafts = {s.key: chain for s, chain in zip(sequences, chains, strict=True)}
        return [drafts.get(request.sequence.key, Draft()) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        """Do nothing: no state is kept."""

    def _observe(self, feeds: Many[Feed], seconds: float) -> None:
        count = len(feeds)
        self._fit.add_step(StepSize(count, count * self._budget_tokens, count, 0), seconds)

    def _feed(self, table: array[int], position: int, token: int) -> Feed:
        """Return the feed of one token, which is written to its own slot and reads the sub-list."""
        used = position // BLOCK_TOKENS + 1
        omitted = max(0, used - self._sink_pages - self._recent_pages)
        visible = table[: self._sink_pages] + table[self._sink_pages + omitted : used]
        place = position - omitted * BLOCK_TOKENS
        return Feed((token,), position, table, 1, spans=(AttentionSpan(1, place, visible),))

    def _run(self, feeds: Many[Feed]) -> Tensor:
        inputs = build_inputs(feeds, self._pool.dump_slot)
        return self._decoder.forward(inputs, self._pool.layers)
