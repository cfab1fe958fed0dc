"""Judges a probe while it runs: which outcomes count, and when the probe may end. Performs no I/O.

The test checks the verdict repeatedly, so its interval must hold at all times simultaneously. It is
the asymptotic confidence sequence of Waudby-Smith, Arbour, Sinha, Kennedy and Ramdas (Time-uniform
central limit theory and asymptotic confidence sequences, Annals of Statistics 52(6), 2024). The
sequence for the means of t batches is

    mean +- sd * sqrt(2 (t rho^2 + 1) / (t^2 rho^2) * log(sqrt(t rho^2 + 1) / alpha)).

The standard deviation `sd` of the batches includes the correlation by the queue
(`search.rate_fit`). It is at least that of independent requests at the requested share, and that of
the earlier probes. A verdict only guides the search and ends probes. The interval of the rate rests
on complete probes, if the search has any.
"""

from __future__ import annotations

from math import log, sqrt
from typing import Final

from draftgate.loadgen.search.rate_fit import SMALLEST_BATCH, dispersion
from draftgate.loadgen.search.types import ProbeVerdict, SearchGoal, SearchProbe

ALPHA: Final = 0.1
"""Share of wrong verdicts exactly at the root. Verdicts farther away are wrong less often. A
smaller share would lengthen probes that only exclude rates."""

RHO: Final = 0.84
"""The value that makes the sequence tightest at 10 batches, `sqrt((-2 log a + log(-2 log a) + 1) /
10)` (ibid.)."""


class SequentialTest:
    """Judges a probe by its outcomes."""

    def __init__(self, probe: SearchProbe, goal: SearchGoal) -> None:
        self._probe = probe
        self._share = goal.share
        self._warm_up: list[bool] = []
        self._met: list[bool] = []
        self._early: dict[int, tuple[float, bool]] = {}
        self._next = 0
        self._enough = False

    @property
    def met(self) -> tuple[bool, ...]:
        """The outcomes that count.

        If no outcome after the warm-up exists, the later half of the warm-up counts, because the
        verdict was clear during the warm-up. Later outcomes carry more information while a queue
        grows.
        """
        return tuple(self._met or self._warm_up[len(self._warm_up) // 2 :])

    def observe(self, index: int, at_s: float, met: bool) -> bool:
        """Take the outcome of a request that has ended, and return whether the probe may end.

        Outcomes count in the order of the schedule. Fast responses end before slow ones, so the
        order of completion would be too favourable. Outcomes after the end do not count.

        Args:
            index: its place in the schedule, from 0.
            at_s: its scheduled time, in seconds from the start of the run.
        """
        self._early[index] = at_s, met
        while not self._enough and self._next in self._early:
            self._enough = self._add(*self._early.pop(self._next))
            self._next += 1
        return self._enough

    def _add(self, at_s: float, met: bool) -> bool:
        warming = at_s < self._probe.warm_up_s
        seen = self._warm_up if warming else self._met
        seen.append(met)
        enough = len(self._met) >= self._probe.requests
        if len(seen) % SMALLEST_BATCH:
            return enough
        verdict = self.verdict
        if warming:
            # An empty queue favours the server. A rate that already fails would fail later, too,
            # but a rate that holds may still fail.
            return verdict is ProbeVerdict.FAILS
        return verdict is not ProbeVerdict.DOUBTFUL or enough

    @property
    def verdict(self) -> ProbeVerdict:
        """The verdict so far."""
        met = self.met
        batches = len(met) // SMALLEST_BATCH
        if batches < self._probe.least_requests // SMALLEST_BATCH or batches == 0:
            return ProbeVerdict.DOUBTFUL
        share, wanted = sum(met) / len(met), self._share
        variance = max(wanted * (1.0 - wanted), share * (1.0 - share))
        factor = max(self._probe.dispersion, dispersion([met]).factor)
        if abs(share - wanted) <= sqrt(variance * factor / SMALLEST_BATCH) * _radius(batches):
            return ProbeVerdict.DOUBTFUL
        return ProbeVerdict.HOLDS if share > wanted else ProbeVerdict.FAILS


def _radius(count: int) -> float:
    """Return half the width of the confidence sequence after `count` values of unit variance."""
    scaled = count * RHO * RHO
    return sqrt(2 * (scaled + 1) / (count * scaled) * log(sqrt(scaled + 1) / ALPHA))
