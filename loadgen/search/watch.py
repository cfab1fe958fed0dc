"""One probe as it goes on: which outcomes count, and when enough is known to stop it. Pure.

The verdict is looked at again and again, so its interval must hold at all times at once: it is the
asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Time-uniform
central limit theory and asymptotic confidence sequences, Annals of Statistics 52(6), 2024), over
the means of batches,

    mean +- sd * sqrt(2 (t rho^2 + 1) / (t^2 rho^2) * log(sqrt(t rho^2 + 1) / alpha)),

of t batches, whose standard deviation `sd` holds what the queue adds (`loadgen.search.batches`),
and is at least that of independent requests at the wanted share, and that of the probes before. A
verdict only guides the search, and ends probes; the interval of the rate rests on probes that were
not cut by it, where there are some (`loadgen.search.fit`).
"""

from __future__ import annotations

from math import log, sqrt
from typing import Final

from draftgate.loadgen.search.batches import SMALLEST, dispersion
from draftgate.loadgen.search.types import Aim, Probe, Verdict

ALPHA: Final = 0.1
"""Share of wrong verdicts at the very rate that is looked for; fewer, the further off. A smaller
one makes probes longer which only say where not to look."""

RHO: Final = 0.84
"""Makes the sequence tightest at 10 batches: `sqrt((-2 log a + log(-2 log a) + 1) / 10)` (ib.)."""


class Watch:
    """Judges a probe by its outcomes, told in the order of the schedule."""

    def __init__(self, probe: Probe, aim: Aim) -> None:
        self._probe = probe
        self._share = aim.share
        self._settling: list[bool] = []
        self._met: list[bool] = []

    @property
    def met(self) -> tuple[bool, ...]:
        """The outcomes that count: where none do, those of the later half of settling.

        They are there if the verdict was clear before: while a queue grows, the later tell more.
        """
        return tuple(self._met or self._settling[len(self._settling) // 2 :])

    def add(self, at_s: float, met: bool) -> bool:
        """Note a request's outcome, and return whether the probe may end.

        Args:
            at_s: its scheduled instant, seconds from the start of the run.
        """
        settling = at_s < self._probe.settle_s
        seen = self._settling if settling else self._met
        seen.append(met)
        if len(seen) % SMALLEST:
            return len(self._met) >= self._probe.requests
        verdict = self.verdict
        if settling:
            # Starting empty flatters: who fails while settling fails. Who holds may fail yet.
            return verdict is Verdict.FAILS
        return verdict is not Verdict.DOUBTFUL or len(self._met) >= self._probe.requests

    @property
    def verdict(self) -> Verdict:
        """What is known so far."""
        met = self.met
        batches = len(met) // SMALLEST
        if batches < self._probe.least_requests // SMALLEST or batches == 0:
            return Verdict.DOUBTFUL
        share, wanted = sum(met) / len(met), self._share
        least = wanted * (1.0 - wanted)
        factor = max(self._probe.dispersion, dispersion([met]).factor)
        unit = max(least, share * (1.0 - share)) * factor / SMALLEST
        if abs(share - wanted) <= sqrt(unit) * radius(batches):
            return Verdict.DOUBTFUL
        return Verdict.HOLDS if share > wanted else Verdict.FAILS


def radius(count: int, alpha: float = ALPHA, rho: float = RHO) -> float:
    """Return half the confidence sequence's width after so many values of unit variance."""
    scaled = count * rho * rho
    return sqrt(2 * (scaled + 1) / (count * scaled) * log(sqrt(scaled + 1) / alpha))
