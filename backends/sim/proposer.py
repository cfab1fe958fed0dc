"""Drafters of known quality and cost."""

from __future__ import annotations

from collections.abc import Sequence as Many

from draftgate.backends.core.drafts import NO_DRAFT, Draft
from draftgate.backends.core.proposer import DraftRequest
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.sim.acceptance import Acceptance
from draftgate.backends.sim.device import Device
from draftgate.backends.sim.profile import DraftCost
from draftgate.backends.sim.truth import Truth


class SimProposer:
    """Drafts tokens of which as many are right as `Acceptance` says.

    What it says that it costs (`depth_s`) is what the worker believes; the device knows better.
    """

    def __init__(
        self,
        name: str,
        truth: Truth,
        acceptance: Acceptance,
        believed: DraftCost,
        device: Device,
    ) -> None:
        self._name = name
        self._truth = truth
        self._acceptance = acceptance
        self._believed = believed
        self._device = device

    def depth_s(self, sequences: int) -> float:
        """Return the believed seconds of a depth; 0 for look-ups."""
        return self._believed.depth_s(sequences)

    def catch_up_s(self, sequence: Sequence) -> float:
        """Return 0: there is nothing to catch up with."""
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        """Return a chain for each, as long as the proposer has something to say."""
        depth = max((request.max_tokens for request in requests), default=0)
        self._device.draft(self._name, len(requests), depth)
        return [self._draft(request.sequence, request.max_tokens) for request in requests]

    def agreed(self, sequence: Sequence, most: int) -> int:
        """Return how many tokens of a draft of `most` would be accepted: for oracles."""
        return self._acceptance.guess(self._name, sequence, most).agreed

    def forget(self, sequence: Sequence) -> None:
        """Drop what is kept for the sequence: it has finished."""
        self._truth.forget(sequence)
        self._acceptance.forget(sequence)

    def _draft(self, sequence: Sequence, most: int) -> Draft:
        evidence, proposed, agreed = self._acceptance.guess(self._name, sequence, most)
        if not proposed:
            return NO_DRAFT
        first = len(sequence.token_ids)
        return Draft(self._truth.draft(sequence, first, agreed, proposed), evidence=evidence)
