"""The search for the cheapest mix that meets its targets in a simulation.

The integer program knows mean rates, and the simulation has real arrivals and the production
scheduler. The search varies the factor of over-provisioning: it grows while the share of requests
within the targets is missed, and is then bisected.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from draftgate.lab.planning.mix import Mix
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.types import Record

ATTEMPTS: Final = 8
"""Largest number of simulations. Five times the factor of bursts are reached in the first five."""

GROWTH: Final = 1.4
"""Growth of the factor while the share is missed. Growth by less takes more simulations."""

RESOLUTION: Final = 1.05
"""Ratio of a factor that suffices to one that does not, at which the search ends."""


@dataclass(frozen=True, slots=True)
class Attempt:
    """A simulated mix.

    Attributes:
        factor: over-provisioning, as a multiple of the mean rate, or None for machines that the
            program did not choose.
        records: outcomes of the simulated requests.
    """

    factor: float | None
    mix: Mix
    records: Sequence[Record]

    @property
    def attainment(self) -> float:
        """Share of the requests that met both targets."""
        return sum(map(meets_slo, self.records)) / len(self.records)

    def as_dict(self) -> dict[str, Any]:
        """Return the attempt for JSON."""
        return {
            "over_provisioning": self.factor,
            "cost_per_hour": self.mix.cost_per_hour,
            "counts": dict(self.mix.counts),
            "attainment": self.attainment,
        }


def search(
    mix_at: Callable[[float], Mix],
    simulate: Callable[[Mix], Sequence[Record]],
    share: float,
    factor: float,
    attempts: int = ATTEMPTS,
    report: Callable[[Attempt], None] = lambda _attempt: None,
) -> list[Attempt]:
    """Simulate mixes until one meets the share and a smaller factor gives none that does.

    Args:
        mix_at: the cheapest mix for a factor, which must be feasible for the first factor.
        factor: the first factor, at least 1.
        attempts: largest number of simulations.
        report: receives each attempt when its simulation ends.

    Returns:
        The attempts in order. The plan is the `best` of them.
    """
    tried: list[Attempt] = []
    missed, met = 0.0, math.inf
    while len(tried) < attempts:
        mix = mix_at(factor)
        if not mix.feasible:
            break
        known = [one for one in tried if one.mix.counts == mix.counts]
        attempt = known[0] if known else Attempt(factor, mix, simulate(mix))
        if not known:
            tried.append(attempt)
            report(attempt)
        if attempt.attainment >= share:
            met = factor
        else:
            missed = factor
        if met / max(missed, 1.0) <= RESOLUTION:
            break
        if met < math.inf:
            factor = math.sqrt(met * max(missed, 1.0))
        else:
            factor *= GROWTH
    return tried


def best(attempts: Sequence[Attempt], share: float) -> Attempt:
    """Return the cheapest attempt that meets the share, or the one that comes nearest."""
    met = [one for one in attempts if one.attainment >= share]
    if met:
        return min(met, key=lambda one: one.mix.cost_per_hour)
    return max(attempts, key=lambda one: one.attainment)
