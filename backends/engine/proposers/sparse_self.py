"""Drafts by the target itself, which looks at the beginning and the end of its context only.

MagicDec (arXiv 2408.11049) with the cache of StreamingLLM (arXiv 2309.17453): the first pages (the
attention sinks) and the latest ones, so drafting costs the same however long the context is, while
a verify step reads all of it. There is no second cache. Drafts are fed through a sub-list of the
sequence's own page table, and their keys and values go to the slots the scheduler reserved for
them behind the sequence.

What a draft wrote does not last: the verify step feeds the pending token and all drafts again, and
each layer writes their slots before it reads them. Drafts that are not verified after all leave
something behind the end of the sequence, where nothing is read before it is written. No page is
touched but the last ones, which nobody shares: a page is known to others only when all its tokens
are computed, and the pending token is not.

Keys are read as they were rotated, at their true positions, and queries are rotated at theirs: the
pages left out are as if they had no weight. (StreamingLLM rotates keys anew by their place in its
cache, to go beyond the length its models know; a target is never asked for that here.)

Sliding windows count places in the sub-list. Where a layer's window is no longer than the latest
pages hold, it sees what the target sees; where it is longer, it sees sinks that the target does not
see any more. That may cost acceptance, and never changes the text.
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
    """Drafts chains with the target and a bounded part of each sequence's keys and values."""

    def __init__(
        self,
        decoder: Decoder,
        pool: KvPool,
        *,
        budget_tokens: int,
        sink_tokens: int,
        eos_ids: frozenset[int],
        with_laws: bool,
        cost: StepCost,
        forward: Forward | None = None,
    ) -> None:
        """Keep no state per sequence.

        Args:
            decoder: the target.
            pool: its keys and values.
            budget_tokens: most tokens a draft may look at, rounded down to whole pages. Contexts
                within it are read whole. Attention reads tiles of `KV_TILE`, so multiples of that
                cost least for what they show.
            sink_tokens: how many of them are the first of the sequence, rounded up to whole pages.
            eos_ids: tokens that end a sequence; all below the vocabulary's size.
            with_laws: whether sampled drafts carry their laws, for rejection.
            cost: of the target's steps, at first: what drafting takes teaches what it is.
            forward: runs the decoder over the pool; None leaves it to the decoder.

        Raises:
            ValueError: the sizes are not positive, or leave no page for the latest tokens.
        """
        self._sink_pages = -(-sink_tokens // BLOCK_TOKENS)
        self._recent_pages = budget_tokens // BLOCK_TOKENS - self._sink_pages
        if sink_tokens < 1 or self._recent_pages < 1:
            least = (max(self._sink_pages, 1) + 1) * BLOCK_TOKENS
            raise ValueError(
                f"budget_tokens must be at least {least} and sink_tokens at least 1, in pages of "
                f"{BLOCK_TOKENS} tokens one of which is for the latest, not {budget_tokens} and "
                f"{sink_tokens}"
            )
        self._decoder = decoder
        self._pool = pool
        self._budget_tokens = budget_tokens
        self._eos_ids = eos_ids
        self._with_laws = with_laws
        self._fit = StepCostFit(cost)
        self._forward = forward or self._run

    def depth_s(self, sequences: int) -> float:
        """Return the predicted seconds of a step of one token each that reads the budget."""
        return self._fit.cost.seconds(sequences, sequences * self._budget_tokens, sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0: it reads what the target has computed."""
        return 0.0

    @torch.inference_mode()
    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each sequence that decodes; nothing for others.

        With more than one token pending, those before the last one have no keys and values yet.
        """
        decodes = [request for request in requests if request.sequence.pending_tokens == 1]
        sequences = [request.sequence for request in decodes]

        def following(place: int, position: int, token: int) -> Feed:
            return self._feed(sequences[place].block_table, position, token)

        chains = draw_chains(
            decodes,
            [self._feed(s.block_table, s.num_computed, s.token_ids[-1]) for s in sequences],
            following,
            self._forward,
            self._measured,
            eos_ids=self._eos_ids,
            with_laws=self._with_laws,
        )
        drafts = {s.key: chain for s, chain in zip(sequences, chains, strict=True)}
        return [drafts.get(request.sequence.key, Draft()) for request in requests]

    def forget(self, sequence: Sequence) -> None:
        """Return at once: nothing is kept."""

    def _measured(self, feeds: Many[Feed], seconds: float) -> None:
        """Learn what a depth takes, reading the budget."""
        count = len(feeds)
        self._fit.observe(StepSize(count, count * self._budget_tokens, count, 0), seconds)

    def _feed(self, table: array[int], position: int, token: int) -> Feed:
        """Return the feed of one token, written where it belongs and shown the sub-list."""
        used = position // BLOCK_TOKENS + 1
        left_out = max(0, used - self._sink_pages - self._recent_pages)
        shown = table[: self._sink_pages] + table[self._sink_pages + left_out : used]
        place = position - left_out * BLOCK_TOKENS
        return Feed((token,), position, table, 1, spans=(AttentionSpan(1, place, shown),))

    def _run(self, feeds: Many[Feed]) -> Tensor:
        inputs = build_inputs(feeds, self._pool.dump_slot)
        return self._decoder.forward(inputs, self._pool.layers)
