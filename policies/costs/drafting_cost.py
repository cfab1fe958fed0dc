"""What drafting takes of the host, learned from steps that do more of it and less.

A step's forecast (`step_cost`) is the device's time. Beside it the host looks drafts up,
weighs them, calls proposers that compute, and accounts for what was verified. Where steps are short
that is a good part of them: on one core of a Zen 5 the shipped model takes 1.3 ms for a token
behind 200 others, and each of these 20 to 300 microseconds (2026-11-22).

From the planning of a step to that of the next one pass

    step + depths + host x (1, sequences) + looking up x (1, sequences asked) + weighing
         + verifying + calls of proposers x (1, sequences)

with 1 where it happens at all. Step and depths are known; the rest is learned, 0 at first. So a
simulated device, whose host takes no time, learns what its proposers take, and no more.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Final

import numpy as np

from draftgate.policies.costs.regression import NonNegativeRegression

REFIT_STEPS: Final = 64
"""Steps that are learned at once: 2 to 3 microseconds for each (one core, Zen 5, 2026-11-22)."""

HOST_SHARE: Final = 0.05
"""What each part may take, as a share of the shortest step: a standard deviation before anything
was measured. It matters for parts that always come together alone: they share what both take."""

FOUND_RATE: Final = 1 / 64
"""Weight of the last step that looked up in how often something is found."""


@dataclass(frozen=True, slots=True)
class DraftingCost:
    """Seconds of the host, beside the device's. All 0 where nothing was measured.

    Attributes:
        look_up_s: of a step in which drafts are looked up, and of weighing them as often as any
            are found.
        sequence_s: of looking up for one sequence.
        verify_s: of a step that verifies drafts.
        call_s: of a step in which a proposer computes drafts, beside its depths; by its name.
        called_s: the same for each sequence that it drafts for.
    """

    look_up_s: float = 0.0
    sequence_s: float = 0.0
    verify_s: float = 0.0
    call_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    called_s: float = 0.0

    def calling_s(self, proposer: str, sequences: int) -> float:
        """Return the seconds of having drafts computed for so many sequences, but for depths."""
        return self.call_s.get(proposer, 0.0) + self.called_s * sequences


NO_DRAFTING_COST: Final = DraftingCost()


@dataclass(slots=True)
class StepDrafting:
    """What a step of decodes did for drafts, filled in while it is planned.

    Attributes:
        sequences: that decode.
        looked_up: of them, those for which drafts were looked up.
        weighed: drafts on offer, looked up or to be computed.
        verified: sequences with drafts that were verified.
        called: proposers that computed.
        computed: sequences they drafted for.
        computed_s: forecast of computing, beside what is learned here.
        explored_s: the rest of the forecast for what nobody asked for; None if nothing was.
    """

    sequences: int = 0
    looked_up: int = 0
    weighed: int = 0
    verified: int = 0
    called: list[str] = field(default_factory=list)
    computed: int = 0
    computed_s: float = 0.0
    explored_s: float | None = None


class DraftingMeter:
    """A `DraftingCost` that follows what is measured.

    Attributes:
        cost: the present estimate.
    """

    def __init__(self, step_s: float, proposers: Many[str]) -> None:
        """Begin at nothing.

        Args:
            step_s: seconds of the shortest step.
            proposers: their names.
        """
        self.cost = NO_DRAFTING_COST
        self._proposers = tuple(proposers)
        parts = len(self._parts(StepDrafting()))
        spread = np.full(parts, HOST_SHARE * max(step_s, 1e-9))
        self._regression = NonNegativeRegression(np.zeros(parts), spread)
        self._found_share = 1.0
        self._measured: list[tuple[StepDrafting, float, float]] = []

    def observe(self, did: StepDrafting, known_s: float, whole_s: float) -> None:
        """Note a step; each `REFIT_STEPS`-th is learned from. What is no duration is ignored.

        Args:
            did: what it did.
            known_s: what it took of the device.
            whole_s: from its planning to that of the next one.
        """
        known_s += did.computed_s
        if not (0.0 < known_s < math.inf and 0.0 < whole_s < math.inf):
            return
        self._measured.append((did, known_s, whole_s))
        if len(self._measured) >= REFIT_STEPS:
            self._refit()

    def _refit(self) -> None:
        done, known_s, whole_s = zip(*self._measured, strict=True)
        self._measured.clear()
        rows = np.array([self._parts(did) for did in done], dtype=np.float64)
        self._regression.learn(rows, np.array(whole_s), np.array(known_s))
        learned = self._regression.coefficients.tolist()
        _, _, look_up_s, sequence_s, weigh_s, verify_s, called_s, *call_s = learned
        for did in done:
            if did.looked_up:
                self._found_share += FOUND_RATE * ((did.weighed > 0) - self._found_share)
        self.cost = DraftingCost(
            look_up_s + self._found_share * weigh_s,
            sequence_s,
            verify_s,
            dict(zip(self._proposers, call_s, strict=True)),
            called_s,
        )

    def _parts(self, did: StepDrafting) -> list[int]:
        """Return what multiplies each part."""
        looked_up, weighed, verified = did.looked_up, did.weighed > 0, did.verified > 0
        parts = [1, did.sequences, looked_up > 0, looked_up, weighed, verified, did.computed]
        return parts + [name in did.called for name in self._proposers]
