"""Keeping proposers known that cost something and are not used: a bounded share of the time.

A policy that finds drafting too dear would never learn that it has become worth its price. So a
share of the time of steps is put by, and when there is enough of it, a proposer drafts one token
that nobody asked for. The token is not verified, but agrees or not with the one that comes.
"""

from __future__ import annotations

import math
from collections.abc import Container, Iterator, Mapping
from typing import Final

from draftgate.backends.core.drafts import DraftRequest, Proposer
from draftgate.policies.drafting_cost import DraftingCost

EXPLORED_SHARE: Final = 0.005
"""Share of the time of steps for drafting what no policy asked for, so that a proposer which costs
something and is not used is still known: a token of one sequence when enough has been put by. Half
of the percent by which `auto` may be slower than `off`; with steps of 10 ms and depths of 1 ms it
is still one in 20 steps."""

MOST_SAVED_STEPS: Final = 5.0
"""Most that is put by, in steps: catching up with a long sequence may take the time of some."""


class Exploration:
    """Decides when which unused proposer drafts for whom. Deterministic."""

    def __init__(self) -> None:
        """Start with nothing put by."""
        self._saved_s = 0.0
        self._most_s = 0.0
        self._needed_s = 0.0  # for the cheapest, when it was looked at last
        self._candidates: dict[str, DraftRequest] = {}  # by proposer, the oldest sequence

    def begin(self, step_s: float) -> None:
        """Begin a step that is predicted to take so long."""
        self._candidates.clear()
        saved_s = self._saved_s + EXPLORED_SHARE * step_s
        self._most_s = MOST_SAVED_STEPS * step_s
        self._saved_s = min(saved_s, self._most_s)

    def note(self, proposer: str, request: DraftRequest) -> None:
        """Note for whom a proposer could draft."""
        oldest = self._candidates.get(proposer)
        if oldest is None or request.sequence.key < oldest.sequence.key:
            self._candidates[proposer] = DraftRequest(request.sequence, 1)

    def took(self, more_s: float) -> None:
        """Learn by how much longer than forecast the step took in which something was explored."""
        self._saved_s -= max(more_s, 0.0)

    @property
    def is_due(self) -> bool:
        """Whether there is time enough for what could be drafted when it was looked at last."""
        return 0.0 < self._needed_s <= self._saved_s

    @property
    def has_candidates(self) -> bool:
        """Whether somebody could be drafted for, and there may be the time."""
        return bool(self._candidates) and self._saved_s >= min(self._needed_s, self._most_s)

    def unused(
        self, used: Container[str], proposers: Mapping[str, Proposer], cost: DraftingCost
    ) -> Iterator[tuple[str, DraftRequest]]:
        """Yield what is to be drafted with proposers not used in this step, and pay for it."""
        needed_s = math.inf
        for name, request in self._candidates.items():
            if name in used:
                continue
            proposer = proposers[name]
            cost_s = proposer.depth_s(1) + proposer.catch_up_s(request.sequence)
            cost_s += cost.calling_s(name, 1)
            needed_s = min(needed_s, cost_s)
            if cost_s <= self._saved_s:
                self._saved_s -= cost_s
                yield name, request
        self._needed_s = needed_s if needed_s < math.inf else 0.0
