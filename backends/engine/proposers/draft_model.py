"""Drafts of a smaller model with the target's vocabulary.

Leviathan, Kalman, Matias, "Fast Inference from Transformers via Speculative Decoding" (arXiv
2211.17192). Its keys and values live in pages borrowed from the target's memory
(`core/draft_pages.py`), which may be called in at any time: how many leading tokens of a sequence
they hold is known (`DraftTable.valid_tokens`), and what is missing is computed again, a bounded
number of tokens a step, before a sequence is drafted for.
"""

from __future__ import annotations

from collections.abc import Sequence as Many

import torch
from torch import Tensor

from draftgate.backends.core.draft_pages import DraftPages
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import OutOfBlocks
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.inputs import Feed, build_inputs
from draftgate.backends.engine.kv_pool import DraftLayers
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.chains import Forward, draw_chains
from draftgate.policies.costs.step_cost import StepCost, StepSize
from draftgate.policies.costs.step_cost_fit import StepCostFit


class DraftModel:
    """A draft model over its pages: runs feeds, returns logits in the target's vocabulary.

    Attributes:
        reach_tokens: how far back a token can have a part in the logits of the last one: the sum of
            the windows of all layers; None where a layer sees everything.
    """

    def __init__(
        self, decoder: Decoder, kv: DraftLayers, vocab_size: int, forward: Forward | None = None
    ) -> None:
        """Keep them.

        Args:
            vocab_size: the target's.
            forward: runs the decoder over `kv`; None leaves it to the decoder.
        """
        windows = decoder.config.windows
        self.kv = kv
        self.reach_tokens = None if None in windows else sum(window or 0 for window in windows)
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._forward = forward or self._run

    @torch.inference_mode()
    def forward(self, feeds: Many[Feed]) -> Tensor:
        """Return the logits of the sampled rows, float32 [rows, vocab_size].

        Vocabularies differ by padding alone: what only one of them has is never drafted.
        """
        logits = self._forward(feeds)
        missing = self._vocab_size - logits.shape[1]
        if missing > 0:
            return torch.nn.functional.pad(logits, (0, missing), value=-torch.inf)
        return logits[:, : self._vocab_size].contiguous()

    def _run(self, feeds: Many[Feed]) -> Tensor:
        inputs = build_inputs(feeds, self.kv.dump_slot, self.kv.page_tokens)
        return self._decoder.forward(inputs, self.kv.layers)


class DraftModelProposer:
    """Draws chains with a draft model, as deep as was decided."""

    def __init__(
        self,
        model: DraftModel,
        pages: DraftPages,
        *,
        eos_ids: frozenset[int],
        with_laws: bool,
        catch_up_tokens: int,
        cost: StepCost,
    ) -> None:
        """Start without sequences.

        Args:
            eos_ids: tokens that end a sequence.
            with_laws: whether sampled drafts carry their laws, for rejection.
            catch_up_tokens: most tokens of a step that are computed for sequences which the draft
                model has not followed, all of them together.
            cost: of a forward pass of so many tokens, at first: those that run teach what it is,
                the tokens of catching up among them.
        """
        self._model = model
        self._pages = pages
        self._eos_ids = eos_ids
        self._with_laws = with_laws
        self._catch_up_tokens = catch_up_tokens
        self._fit = StepCostFit(cost)
        self._drafted: dict[int, tuple[int, tuple[int, ...]]] = {}  # by key: behind how many, what

    def depth_s(self, sequences: int) -> float:
        """Return the measured seconds of a forward pass of one token each."""
        return self._fit.cost.seconds(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return what a forward pass takes longer for the tokens it has not followed."""
        missing = len(sequence.token_ids) - 1 - self._followed_tokens(sequence)
        cost = self._fit.cost
        return cost.seconds(1 + missing) - cost.seconds(1)

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each sequence whose past the draft model has computed."""
        ready: list[int] = []
        behind: list[Feed] = []
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
                behind.append(Feed(fed, valid, pages, num_samples=0))
                sequence.draft_table.valid_tokens = valid + tokens
        if behind:
            self._model.forward(behind)
        drafts = [Draft()] * len(requests)
        chains = self._draw([requests[place] for place in ready]) if ready else []
        for place, draft in zip(ready, chains, strict=True):
            drafts[place] = draft
        return drafts

    def forget(self, sequence: Sequence) -> None:
        """Give back the sequence's pages."""
        self._drafted.pop(sequence.key, None)
        self._pages.release(sequence.draft_table)

    def _draw(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each sequence, which have pages enough."""

        def first(sequence: Sequence) -> Feed:
            valid = sequence.draft_table.valid_tokens
            fed = sequence.token_ids[valid:]
            return Feed(fed, valid, sequence.draft_table.pages, num_samples=1)

        def following(place: int, position: int, token: int) -> Feed:
            pages = requests[place].sequence.draft_table.pages
            return Feed((token,), position, pages, num_samples=1)

        drafts = draw_chains(
            requests,
            [first(request.sequence) for request in requests],
            following,
            self._model.forward,
            self._measured,
            eos_ids=self._eos_ids,
            with_laws=self._with_laws,
        )
        for request, draft in zip(requests, drafts, strict=True):
            sequence = request.sequence
            sequence.draft_table.valid_tokens = len(sequence.token_ids)
            # The last draft was drawn, not fed.
            self._drafted[sequence.key] = len(sequence.token_ids), draft.token_ids[:-1]
        return drafts

    def _measured(self, feeds: Many[Feed], seconds: float) -> None:
        """Learn what a forward pass takes. Without other terms: its contexts are what they are."""
        tokens = sum(len(feed.token_ids) for feed in feeds)
        self._fit.observe(StepSize(tokens, 0, 0, 0), seconds)

    def _valid_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens need no computing, drafts that came true among them."""
        sequence.draft_table.valid_tokens = self._followed_tokens(sequence)
        self._drafted.pop(sequence.key, None)
        return sequence.draft_table.valid_tokens

    def _followed_tokens(self, sequence: Sequence) -> int:
        valid = sequence.draft_table.valid_tokens
        behind, drafted = self._drafted.get(sequence.key, (0, ()))
        if drafted and valid == behind:
            came = sequence.token_ids[behind:]
            valid += len(Draft(drafted).accepted_places(came))
        # The last token is always fed, for its logits.
        last = len(sequence.token_ids) - 1
        # What is out of reach is not computed: whatever lies in its pages is masked.
        return max(min(valid, last), self._unread_tokens(sequence))

    def _unread_tokens(self, sequence: Sequence) -> int:
        """Return how many leading tokens are out of reach of all that is still to come."""
        reach = self._model.reach_tokens
        return 0 if reach is None else max(0, len(sequence.token_ids) - 1 - reach)

    def _reserve(self, sequence: Sequence, tokens: int) -> bool:
        """Make the sequence's draft pages hold so many tokens; return whether they do."""
        try:
            self._pages.extend(sequence.draft_table, tokens, self._unread_tokens(sequence))
        except OutOfBlocks:
            return False
        return True
