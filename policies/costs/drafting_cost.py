"""The host time of drafting, learned from the differences between steps.

The forecast of a step (`step_cost`) is the device's time. The host also runs lookups, weighs
drafts, calls proposers that compute, and accounts for verified tokens. This work is a considerable
part of short steps. On one core of a Zen 5, the shipped model takes 1.3 ms for a token after 200
others. Each of these parts takes 20 to 300 microseconds (2026-11-22).

The time from the planning of a step to the planning of the next step is

    step + depths + host x (1, sequences) + lookups x (1, sequences with lookups) + weighing
         + verifying + calls of proposers x (1, sequences)

with 1 for a part that occurs. `step` and `depths` are known. All other coefficients are learned and
start at 0. The host of a simulated device takes no time, so only the times of its proposers are
learned.

A device that launches ahead hides this time for steps that are planned while another step runs.
Nothing is learned from these steps. A step that verifies drafts prevents the next step from being
planned ahead. So it costs the time of planning and lookups in addition to its own parts.
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
"""Steps in a block of measurements. Learning takes 2 to 3 microseconds per step (one core, Zen 5,
2026-11-22)."""

HOST_SHARE: Final = 0.05
"""Initial standard deviation of each part, as a share of the shortest step. This value matters only
for parts that always occur together, because they share their measured time."""

SEQUENCE_SHARE: Final = HOST_SHARE / 16
"""Initial standard deviation of the times per sequence of planning and of computing a draft. A lone
sequence shows only the sum of a time per step and a time per sequence. With equal deviations, half
of an error in the predicted time of its draft would be charged to each sequence of a batch.
Planning takes 59 microseconds per step and 4.2 per sequence (bench/results/host-zen4.json)."""

FOUND_RATE: Final = 1 / 64
"""Weight of the latest step with lookups in the share of lookups that find a draft."""


@dataclass(frozen=True, slots=True)
class DraftingCost:
    """Host time of drafting, in seconds. All values are 0 before the first measurement.

    Attributes:
        look_up_s: time per step with lookups, including the expected time to weigh their drafts.
        sequence_s: time per sequence with a lookup.
        verify_s: time per step that verifies drafts.
        call_s: time per step in which a proposer computes drafts, without its depths, by proposer.
        called_s: time per sequence with a computed draft, by proposer name.
        host_s: time per step of all other host work: planning, launch and accounting.
        host_sequence_s: time per sequence of that work.
    """

    look_up_s: float = 0.0
    sequence_s: float = 0.0
    verify_s: float = 0.0
    call_s: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))
    called_s: float = 0.0
    host_s: float = 0.0
    host_sequence_s: float = 0.0

    def planning_s(self, sequences: int, looked_up: int) -> float:
        """Return the host seconds of a step that verifies no drafts.

        Args:
            sequences: number of sequences of the step.
            looked_up: number of these with lookups.
        """
        lookups_s = self.look_up_s + self.sequence_s * looked_up if looked_up else 0.0
        return self.host_s + self.host_sequence_s * sequences + lookups_s

    def calling_s(self, proposer: str, sequences: int) -> float:
        """Return the seconds to compute drafts for some sequences, without the depths."""
        return self.call_s.get(proposer, 0.0) + self.called_s * sequences


NO_DRAFTING_COST: Final = DraftingCost()


@dataclass(slots=True)
class StepDrafting:
    """The drafting work of a step of decodes, recorded while the step is planned.

    Attributes:
        sequences: number of decoding sequences.
        looked_up: number of these with lookups.
        weighed: number of offered drafts, computed or not.
        verified: number of sequences with verified drafts.
        called: names of the proposers that computed drafts.
        computed: number of sequences with computed drafts.
        computed_s: predicted seconds of computing, without the learned host time.
        explored_s: predicted seconds of exploration, without the learned host time, or None.
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
    """A `DraftingCost` that follows measurements.

    Attributes:
        cost: present estimate.
    """

    def __init__(self, step_s: float, proposers: Many[str]) -> None:
        """Start with an estimate of 0.

        Args:
            step_s: seconds of the shortest step.
            proposers: names of the proposers.
        """
        self.cost = NO_DRAFTING_COST
        self._proposers = tuple(proposers)
        per_sequence = np.array(self._parts(StepDrafting(sequences=1, computed=1))) > 0
        per_sequence[0] = False  # the part of every step
        shares = np.where(per_sequence, SEQUENCE_SHARE, HOST_SHARE)
        self._regression = NonNegativeRegression(np.zeros(len(shares)), shares * max(step_s, 1e-9))
        self._found_share = 1.0
        self._measured: list[tuple[StepDrafting, float, float]] = []

    def add_step(self, step_work: StepDrafting, known_s: float, whole_s: float) -> None:
        """Record a step, and refit after every `REFIT_STEPS` steps.

        Invalid durations are ignored.

        Args:
            step_work: drafting work of the step.
            known_s: seconds of the device.
            whole_s: seconds from the planning of this step to the planning of the next step.
        """
        known_s += step_work.computed_s
        if not (0.0 < known_s < math.inf and 0.0 < whole_s < math.inf):
            return
        self._measured.append((step_work, known_s, whole_s))
        if len(self._measured) >= REFIT_STEPS:
            self._refit()

    def _refit(self) -> None:
        done, known_s, whole_s = zip(*self._measured, strict=True)
        self._measured.clear()
        rows = np.array([self._parts(step_work) for step_work in done], dtype=np.float64)
        self._regression.learn(rows, np.array(whole_s), np.array(known_s))
        learned = self._regression.coefficients.tolist()
        host_s, host_sequence_s, look_up_s, sequence_s, weigh_s, verify_s, *called = learned
        called_s, *call_s = called
        for step_work in done:
            if step_work.looked_up:
                self._found_share += FOUND_RATE * ((step_work.weighed > 0) - self._found_share)
        self.cost = DraftingCost(
            look_up_s + self._found_share * weigh_s,
            sequence_s,
            verify_s,
            dict(zip(self._proposers, call_s, strict=True)),
            called_s,
            host_s,
            host_sequence_s,
        )

    def _parts(self, step_work: StepDrafting) -> list[int]:
        """Return the factor of each part, [parts]."""
        looked_up, weighed, verified = (
            step_work.looked_up,
            step_work.weighed > 0,
            step_work.verified > 0,
        )
        parts = [
            1,
            step_work.sequences,
            looked_up > 0,
            looked_up,
            weighed,
            verified,
            step_work.computed,
        ]
        return parts + [name in step_work.called for name in self._proposers]
