"""The search: which rate to try next, and when enough is known. Pure.

    search = Search(aim)
    while (probe := search.propose()) is not None:
        search.observe(<what came of it>)
    search.found()

First a bracket: from the starting rate by factors of two, by less where a verdict is in doubt. Then
all probes are fitted together (`loadgen.search.fit`), and the next goes to either side of the root
in turn, inside what is known of it: with sharp verdicts that is bisection, with doubtful ones
repetition, each with a seed of its own. It ends when the interval is narrow enough.

The numbers below were chosen on a simulated M/D/1 server (100 seeds each, 2026-11-21), for coverage
first.
"""

from __future__ import annotations

from math import inf, isinf, sqrt
from typing import Final

from draftgate.loadgen.search.batches import SMALLEST
from draftgate.loadgen.search.fit import Fit, fit
from draftgate.loadgen.search.settling import expected_dispersion, settling_s
from draftgate.loadgen.search.types import Aim, Found, Measured, Probe, Stop, Verdict

STEP: Final = 2.0
"""Of the bracket. Larger steps overload the server for longer, smaller ones take more probes."""

SLOWEST: Final = 1e-3
"""Share of the starting rate below which no rate is tried: ten halvings."""

FIRST_REQUESTS: Final = 400
"""Of a probe of the bracket, at most: its verdict is there long before, but near the root."""

FEWEST_REQUESTS: Final = 200
"""Of a probe, for a verdict: ten batches."""

MOST_REQUESTS: Final = 2000
"""Of a probe behind the bracket. A long one settles once for many requests; a short one is soon
followed by one at a better rate."""

ASIDE: Final = 0.6
"""Where the next probe goes: this share of half the interval off the root."""

LEAST_ASIDE: Final = 0.03
MOST_ASIDE: Final = 0.2
"""Nearer it says little of the slope; further off, little of the root."""

DESCENTS: Final = 3
"""Halvings of the starting rate after which a generator that never kept up is given up."""

HICCUPS: Final = 1
"""Times that a rate is tried again at which the generator did not keep up."""

LEAST_SIDE: Final = 500
"""Requests on each side of the root without which a search does not end, unless all or none met it
there (a sharp edge): a few bursts are not the server."""


class Search:
    """Proposes probes, and learns from what came of them."""

    def __init__(self, aim: Aim) -> None:
        self._aim = aim
        self._tried: list[Measured] = []
        self._stop: Stop | None = None
        self._known: Fit | None = None

    @property
    def tried(self) -> tuple[Measured, ...]:
        """All probes so far, in their order."""
        return tuple(self._tried)

    def observe(self, measured: Measured) -> None:
        """Learn what came of the probe that was proposed last."""
        self._tried.append(measured)
        if told := self._told:
            rate_rps = self._known.root_rps if self._known else measured.probe.rate_rps
            expected = expected_dispersion(self._aim, rate_rps)
            self._known = fit(told, self._aim.share, self._aim.confidence, expected)

    def interrupt(self) -> None:
        """Propose no more."""
        self._stop = Stop.INTERRUPTED

    def propose(self) -> Probe | None:
        """Return the next probe; None if the search is over."""
        if self._stop is None:
            self._stop = self._ended()
        if self._stop is not None:
            return None
        left = self._aim.most_requests - self._sent
        number = len(self._tried)
        rate_rps, requests = self._next()
        settle_s = settling_s(self._aim, rate_rps)
        seed, requests = self._aim.seed + number, min(requests, left)
        dispersion = 1.0 if self._known is None else self._known.dispersion.factor
        return Probe(number, rate_rps, seed, settle_s, requests, FEWEST_REQUESTS, dispersion)

    def found(self) -> Found:
        """Return what is known of the rate."""
        known, stop = self._known, self._stop or Stop.INTERRUPTED
        if known is None:
            return Found(None, 0.0, inf, self._sent, 1.0, stop)
        rate_rps = known.root_rps if known.bounded else None
        factor = known.dispersion.factor
        return Found(rate_rps, known.low_rps, known.high_rps, self._sent, factor, stop)

    @property
    def _sent(self) -> int:
        return sum(measured.sent for measured in self._tried)

    @property
    def _told(self) -> list[Measured]:
        """The probes that say something about the server."""
        return [m for m in self._tried if m.verdict is not Verdict.INVALID and m.met]

    @property
    def _ceiling_rps(self) -> float:
        """The lowest rate at which the generator did not keep up, hiccups aside; else infinity."""
        rates = [m.probe.rate_rps for m in self._tried if m.verdict is Verdict.INVALID]
        return min((rate for rate in rates if rates.count(rate) > HICCUPS), default=inf)

    @property
    def _bracket(self) -> tuple[float, float]:
        """The highest rate that holds below the lowest that fails, and that; 0 and infinity."""
        rates = [(m.probe.rate_rps, m.verdict) for m in self._told]
        high = min((rate for rate, verdict in rates if verdict is Verdict.FAILS), default=inf)
        below = (rate for rate, verdict in rates if verdict is Verdict.HOLDS and rate < high)
        return max(below, default=0.0), high

    @property
    def _precise(self) -> bool:
        """Whether the interval is narrow enough, and rests on enough to be believed."""
        known = self._known
        if known is None or known.relative_half_width > self._aim.precision:
            return False
        sharp = known.dispersion.freedom == 0
        return min(known.sides) >= (FEWEST_REQUESTS if sharp else LEAST_SIDE)

    def _ended(self) -> Stop | None:
        """Return why there is nothing more to try; None if there is."""
        if self._aim.most_requests - self._sent < SMALLEST:
            return Stop.REQUESTS
        told, known = self._told, self._known
        if known is None:
            hopeless = self._ceiling_rps <= self._aim.start_rps / STEP**DESCENTS
            return Stop.GENERATOR if hopeless else None
        lowest, highest = (f(m.probe.rate_rps for m in told) for f in (min, max))
        if self._precise:
            return Stop.PRECISE
        if self._bracket[0] == 0.0 and lowest <= SLOWEST * self._aim.start_rps:
            return Stop.NEVER
        if isinf(known.high_rps):
            if highest >= self._aim.max_rate_rps:
                return Stop.MAX_RATE
            if highest * (1.0 + 2.0 * self._aim.precision) >= self._ceiling_rps:
                return Stop.GENERATOR
        return None

    def _next(self) -> tuple[float, int]:
        """Return the next rate, and how many requests are to count there at most."""
        if self._tried and self._tried[-1].verdict is Verdict.INVALID:
            again = self._tried[-1].probe
            if again.rate_rps < self._ceiling_rps:
                return again.rate_rps, again.requests
        told, known = self._told, self._known
        if known is None:
            return self._bounded(self._aim.start_rps), FIRST_REQUESTS
        low, high = self._bracket
        rates = [m.probe.rate_rps for m in told]
        if not known.bounded and isinf(high):
            step = STEP if low == max(rates) else 1.0 + MOST_ASIDE
            return self._bounded(max(rates) * step), FIRST_REQUESTS
        if not known.bounded and low == 0.0:
            step = STEP if high == min(rates) else 1.0 + MOST_ASIDE
            return self._bounded(min(rates) / step), FIRST_REQUESTS
        width = known.high_rps / known.low_rps if known.bounded else inf
        step = 1.0 + min(max(ASIDE * (sqrt(width) - 1.0), LEAST_ASIDE), MOST_ASIDE)
        side = 1.0 if len(told) % 2 else -1.0
        centre = known.root_rps if known.bounded else min(max(known.root_rps, low), high)
        rate_rps = centre * step**side
        if centre < high <= rate_rps or rate_rps <= low < centre:
            # What lies beyond a clear verdict is clear: it would be cut, and tell nothing new.
            rate_rps = sqrt(centre * (high if side > 0.0 else low))
        return self._bounded(rate_rps), self._wanted(known)

    def _wanted(self, known: Fit) -> int:
        """Return how many requests are still needed, by the square root law, within bounds."""
        lacking = (known.relative_half_width / self._aim.precision) ** 2 - 1.0
        return round(min(max(sum(known.sides) * lacking, FEWEST_REQUESTS), MOST_REQUESTS))

    def _bounded(self, rate_rps: float) -> float:
        """Return a rate that may be tried: the middle to the ceiling, if it is above that."""
        if rate_rps >= self._ceiling_rps:
            below = [m.probe.rate_rps for m in self._told if m.probe.rate_rps < self._ceiling_rps]
            rate_rps = sqrt(self._ceiling_rps * max(below, default=self._ceiling_rps / STEP**2))
        return min(rate_rps, self._aim.max_rate_rps)
