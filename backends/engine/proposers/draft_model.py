"""Drafts from a smaller model with the target's vocabulary.

Source: Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding"
(arXiv 2211.17192).

The draft model keeps keys and values in pages borrowed from the target's memory
(`core/draft_pages.py`). The target may take the pages back at any time. `DraftTable.valid_tokens`
is the number of leading tokens that the pages of a sequence still hold. The draft model computes
the missing tokens again, a bounded number per step, before the proposer drafts for the sequence.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from typing import TYPE_CHECKING

import torch
from torch import Tensor

from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import OutOfBlocks
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.inputs import Feed, build_inputs
from draftgate.backends.engine.kv_pool import DraftLayers
from draftgate.backends.engine.logits import in_vocabulary
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.chains import Forward, draw_chains
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.costs.step_cost_fit import StepCostFit

if TYPE_CHECKING:
    from draftgate.backends.engine.gpu.chains import DeviceChains


class DraftModel:
    """Runs feeds of a draft model over its pages, and returns logits in the target's vocabulary.

    Attributes:
        reach_tokens: maximum distance, in tokens, at which a token can influence the last logits.
            The value is the sum of the windows of all layers, or None if a layer has no window.
        device_chains: draws chains on a GPU, or None on a CPU.
    """

    def __init__(
        self,
        decoder: Decoder,
        kv: DraftLayers,
        vocab_size: int,
        device_chains: DeviceChains | None = None,
    ) -> None:
        """Bind a decoder to its layers of the pool.

        Args:
            decoder: the draft model.
            kv: the draft model's view of the pool.
            vocab_size: vocabulary size of the target.
            device_chains: runs the decoder over `kv` on a GPU.
        """
        windows = decoder.config.windows
        self.kv = kv
        self.reach_tokens = None if None in windows else sum(window or 0 for window in windows)
        self.device_chains = device_chains
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._forward: Forward = self._run if device_chains is None else device_chains.forward

    @torch.inference_mode()
    def forward(self, feeds: Many[Feed]) -> Tensor:
        """Return the logits of the sampled rows, float32 [rows, vocab_size of the target]."""
        return in_vocabulary(self._forward(feeds), self._vocab_size)

    def _run(self, feeds: Many[Feed]) -> Tensor:
        dump_slot, page_tokens = self.kv.dump_slot, self.kv.page_tokens
        inputs = build_inputs(feeds, dump_slot, page_tokens, self._decoder.padded_rows)
        return self._decoder.forward(inputs, self.kv.layers)


class DraftModelProposer:
    """Proposes chains sampled from a draft model."""

    def __init__(
        self,
        model: DraftModel,
        pages: DraftPages,
        *,
        eos_ids: frozenset[int],
        keep_distributions: bool,
        catch_up_tokens: int,
        cost: StepCost,
    ) -> None:
        """Create a proposer without sequences.

        Args:
            model: the draft model.
            pages: the allocator of the draft model's pages.
            eos_ids: tokens that end a sequence.
            keep_distributions: whether sampled drafts carry their distributions, for rejection.
            catch_up_tokens: maximum number of missing tokens that the draft model computes per
                step, for all sequences together.
            cost: initial cost of a forward pass by its tokens. Measured passes update this cost.
        """
        self._model = model
        self._pages = pages
        self._eos_ids = eos_ids
        self._keep_distributions = keep_distributions
        self._catch_up_tokens = catch_up_tokens
        self._fit = StepCostFit(cost)
        # By sequence key: length of the sequence at its last draft, and the drafts that were fed.
        self._drafted: dict[int, tuple[int, tuple[int, ...]]] = {}

    @property
    def cost(self) -> StepCost:
        """The cost of a forward pass by its tokens, from the passes so far."""
        return self._fit.cost

    def depth_s(self, sequences: int) -> float:
        """Return the predicted seconds of a forward pass with one token per sequence."""
        return self._fit.cost.seconds(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return the predicted seconds that the missing tokens add to a forward pass."""
        missing = len(sequence.token_ids) - 1 - self._computed_tokens(sequence)
        cost = self._fit.cost
        return cost.seconds(1 + missing) - cost.seconds(1)

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each sequence whose tokens the draft model has computed.

        Other sequences get an empty draft.
        """
        ready: list[int] = []
        catching_up: list[Feed] = []
        left = self._catch_up_tokens
        for place, request in enumerate(requests):
            sequence = request.sequence
            valid = self._valid_tokens(sequence)
            missing = len(sequence.token_ids) - valid
            tokens = min(missing, left)
            wanted = request.max_tokens - 1 if tokens == missing else 0
            if not tokens or not self._reserve(sequence, valid + tokens + wanted):
                continue
            left -= tokens
            if tokens == missing:
                ready.append(place)
            else:
                fed = sequence.token_ids[valid : valid + tokens]
                pages = sequence.draft_table.pages
                catching_up.append(Feed(fed, valid, pages, num_samples=0))
                sequence.draft_table.valid_tokens = valid + tokens
        if catching_up:
            self._model.forward(catching_up)
        drafts = [Draft()] * len(requests)
        chains = self._draw([requests[place] for place in ready]) if ready else []
        for place, draft in zip(ready, chains, strict=True):
            drafts[place] = draft
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """Return the sequence's pages to the target."""
        self._drafted.pop(sequence.key, None)
        self._pages.release(sequence.draft_table)

    def _draw(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each sequence, whose pages must be reserved."""

        def first_feed(sequence: Sequence) -> Feed:
            valid = sequence.draft_table.valid_tokens
            fed = sequence.token_ids[valid:]
            return Feed(fed, valid, sequence.draft_table.pages, num_samples=1)

        def next_feed(index: int, position: int, token: int) -> Feed:
            pages = requests[index].sequence.draft_table.pages
            return Feed((token,), position, pages, num_samples=1)

        first_feeds = [first_feed(request.sequence) for request in requests]
        chains = self._model.device_chains
        if chains is not None and not any(map(self._needs_host, requests)):
            drafts = chains.draw(requests, first_feeds, self._observe)
        else:
            drafts = draw_chains(
                requests,
                first_feeds,
                next_feed,
                self._model.forward,
                self._observe,
                eos_ids=self._eos_ids,
                keep_distributions=self._keep_distributions,
            )
        for request, draft in zip(requests, drafts, strict=True):
            sequence = request.sequence
            sequence.draft_table.valid_tokens = len(sequence.token_ids)
            # The model sampled the last draft, but did not read it.
            self._drafted[sequence.key] = len(sequence.token_ids), draft.token_ids[:-1]
        return drafts

    def _needs_host(self, request: DraftRequest) -> bool:
        """Return whether the host has work between two tokens of a chain.

        The host computes masks of grammars, changes of logits, and distributions for rejection.
        """
        sequence, sampling = request.sequence, request.sequence.request.sampling
        keeps_distributions = self._keep_distributions and sampling.temperature > 0
        return keeps_distributions or sequence.grammar is not None or sampling.changes_logits

    def _observe(self, rows: int, seconds: float) -> None:
        """Fit the cost by rows alone. The cost has no term for contexts."""
        self._fit.add_step(StepSize(rows, 0, 0, 0), seconds)

    def _valid_tokens(self, sequence: Sequence) -> int:
        """Update and return the number of leading tokens that need no computation."""
        sequence.draft_table.valid_tokens = self._computed_tokens(sequence)
        self._drafted.pop(sequence.key, None)
        return sequence.draft_table.valid_tokens

    def _computed_tokens(self, sequence: Sequence) -> int:
        """Return the number of leading tokens that need no computation, with accepted drafts."""
        valid = sequence.draft_table.valid_tokens
        confirmed, drafted = self._drafted.get(sequence.key, (0, ()))
        if drafted and valid == confirmed:
            confirmed_ids = sequence.token_ids[confirmed:]
            valid += len(Draft(drafted).accepted_places(confirmed_ids))
        # The model always reads the last token, for its logits.
        last = len(sequence.token_ids) - 1
        # Masks hide tokens out of reach, so these tokens need no computation.
        return max(min(valid, last), self._unread_tokens(sequence))

    def _unread_tokens(self, sequence: Sequence) -> int:
        """Return the number of leading tokens that no future token can reach."""
        reach = self._model.reach_tokens
        return 0 if reach is None else max(0, len(sequence.token_ids) - 1 - reach)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Extend the sequence's draft pages to hold `tokens`.

        Return whether the memory sufficed.
        """
        try:
            self._pages.extend(sequence.draft_table, tokens, self._unread_tokens(sequence))
        except OutOfBlocks:
            return False
        return True
