"""Decides which rate to try next, and when to stop. Performs no I/O.

    search = RateSearch(goal)
    while (probe := search.propose()) is not None:
        search.observe(<the result of the probe>)
    search.result()

The search first brackets the rate. It changes the starting rate by factors of two, and by smaller
factors after a doubtful verdict. Then it fits all probes together (`search.rate_fit`) and places
each next probe within the interval, on alternating sides of the root. Clear verdicts make the
search a bisection. Doubtful verdicts make the probes repeat similar rates with new seeds. The
search ends when the interval is narrow enough.

The constants below were chosen for coverage on a simulated M/D/1 server (100 seeds each,
2026-11-21).
"""

from __future__ import annotations

from math import inf, isinf, sqrt
from typing import Final

from draftgate.loadgen.search.rate_fit import SMALLEST_BATCH, RateFit, fit_rate
from draftgate.loadgen.search.types import (
    ProbeResult,
    ProbeVerdict,
    SearchGoal,
    SearchProbe,
    SearchResult,
    StopReason,
)

_STEP: Final = 2.0
"""Factor between the rates of the bracket. A larger factor overloads the server for longer, and a
smaller factor takes more probes."""

SLOWEST: Final = 1e-3
"""The lowest rate to try as a share of the starting rate, ten halvings."""

FIRST_REQUESTS: Final = 400
"""Most requests of a probe of the bracket. Most verdicts are clear much sooner, except near the
root."""

LEAST_REQUESTS: Final = 200
"""Least requests of a probe before its verdict, ten batches."""

_MOST_REQUESTS: Final = 2000
"""Most requests of a probe after the bracket. A long probe needs only one warm-up, but a short
probe is soon followed by one at a better rate."""

OFFSET: Final = 0.6
"""Distance of the next probe from the root, as a share of half the interval."""

LEAST_OFFSET: Final = 0.03
MOST_OFFSET: Final = 0.2
"""A nearer probe tells little about the slope, and a farther probe little about the root."""

DESCENTS: Final = 3
"""Halvings of the starting rate after which the search stops if the generator never kept up."""

_RETRIES: Final = 1
"""How often to retry a rate at which the generator did not keep up."""

LEAST_SIDE: Final = 500
"""Least requests on each side of the root for an end of the search, since a few bursts do not
represent the server. The limit does not apply at a sharp edge, where all or none met their SLO."""

RELAXATION_TIMES: Final = 2.0
"""Length of the warm-up in relaxation times."""

MOST_EXPECTED: Final = 20.0
"""Upper bound for the expected dispersion. A larger bound would prolong searches that measure
less."""


def warm_up_s(goal: SearchGoal, rate_rps: float) -> float:
    """Return how many seconds from the start of a probe its requests do not count.

    A queue under load forgets its empty start within its relaxation time. This time is about `2 s /
    (1 - load)^2` for a service time `s` (reflected Brownian motion; Abate and Whitt, Transient
    behavior of regulated Brownian motion, Advances in Applied Probability 19, 1987).

    The tail of the wait is `exp(-2 (1 - load) limit / s)`. At the rate where waits of `limit` are
    rare, `1 - load` is therefore about `1.5 s / limit`, and the relaxation time is about `rate *
    limit^2`. A search with a precision only has to distinguish a load that much above 1 from a load
    below 1. The queue at such a load grows past the limit within `limit / precision`.
    """
    queue_s = goal.limit_s * min(RELAXATION_TIMES * rate_rps * goal.limit_s, 1.0 / goal.precision)
    return max(queue_s, goal.answer_s)


def expected_dispersion(goal: SearchGoal, rate_rps: float) -> float:
    """Return roughly how many requests of a queue carry the information of one independent request.

    The number is that of the requests in one relaxation time. For M/D/1 with a limit of 5 service
    times and a share of 0.95, it is 12, and batches show 12 to 13 (2026-11-21).
    """
    return min(1.0 + rate_rps * warm_up_s(goal, rate_rps) / RELAXATION_TIMES, MOST_EXPECTED)


class RateSearch:
    """Proposes probes, and takes their results into account."""

    def __init__(self, goal: SearchGoal) -> None:
        self._goal = goal
        self._tried: list[ProbeResult] = []
        self._stop: StopReason | None = None
        self._known: RateFit | None = None

    @property
    def tried(self) -> tuple[ProbeResult, ...]:
        """All probes so far, in order."""
        return tuple(self._tried)

    def observe(self, result: ProbeResult) -> None:
        """Take the result of the last proposed probe into account."""
        self._tried.append(result)
        if valid := self._valid:
            rate_rps = self._known.root_rps if self._known else result.probe.rate_rps
            expected = expected_dispersion(self._goal, rate_rps)
            self._known = fit_rate(valid, self._goal.share, self._goal.confidence, expected)

    def interrupt(self) -> None:
        """Propose no more probes."""
        self._stop = StopReason.INTERRUPTED

    def propose(self) -> SearchProbe | None:
        """Return the next probe, or None if the search is over."""
        if self._stop is None:
            self._stop = self._ended()
        if self._stop is not None:
            return None
        goal, dispersion = self._goal, 1.0
        if self._known is not None:
            dispersion = self._known.dispersion.factor
        rate_rps, requests = self._next()
        return SearchProbe(
            rate_rps,
            goal.seed + len(self._tried),
            warm_up_s(goal, rate_rps),
            min(requests, goal.most_requests - self._sent),
            LEAST_REQUESTS,
            dispersion,
        )

    def result(self) -> SearchResult:
        """Return the estimate and the interval of the rate."""
        known, stop = self._known, self._stop or StopReason.INTERRUPTED
        if known is None:
            return SearchResult(None, 0.0, inf, self._sent, 1.0, stop)
        rate_rps = known.root_rps if known.bounded else None
        factor = known.dispersion.factor
        return SearchResult(rate_rps, known.low_rps, known.high_rps, self._sent, factor, stop)

    @property
    def _sent(self) -> int:
        return sum(result.sent for result in self._tried)

    @property
    def _valid(self) -> list[ProbeResult]:
        """The valid probes with counted outcomes."""
        return [m for m in self._tried if m.verdict is not ProbeVerdict.INVALID and m.met]

    @property
    def _ceiling_rps(self) -> float:
        """The lowest rate at which the generator never kept up, even when retried, or infinity."""
        rates = [m.probe.rate_rps for m in self._tried if m.verdict is ProbeVerdict.INVALID]
        return min((rate for rate in rates if rates.count(rate) > _RETRIES), default=inf)

    @property
    def _bracket(self) -> tuple[float, float]:
        """The highest rate that meets the goal or 0, and the lowest that misses it or infinity."""
        rates = [(m.probe.rate_rps, m.verdict) for m in self._valid]
        high = min((rate for rate, verdict in rates if verdict is ProbeVerdict.FAILS), default=inf)
        below = (rate for rate, verdict in rates if verdict is ProbeVerdict.HOLDS and rate < high)
        return max(below, default=0.0), high

    @property
    def _precise(self) -> bool:
        """Whether the interval is narrow enough and rests on enough requests."""
        known = self._known
        if known is None or known.relative_half_width > self._goal.precision:
            return False
        sharp = known.dispersion.freedom == 0
        return min(known.sides) >= (LEAST_REQUESTS if sharp else LEAST_SIDE)

    def _ended(self) -> StopReason | None:
        """Return the reason to stop, or None to continue."""
        goal, known = self._goal, self._known
        if goal.most_requests - self._sent < SMALLEST_BATCH:
            return StopReason.REQUESTS
        if known is None:
            hopeless = self._ceiling_rps <= goal.start_rps / _STEP**DESCENTS
            return StopReason.GENERATOR if hopeless else None
        rates = [m.probe.rate_rps for m in self._valid]
        if self._precise:
            return StopReason.PRECISE
        if self._bracket[0] == 0.0 and min(rates) <= SLOWEST * goal.start_rps:
            return StopReason.NEVER
        if isinf(known.high_rps):
            if max(rates) >= goal.max_rate_rps:
                return StopReason.MAX_RATE
            if max(rates) * (1.0 + 2.0 * goal.precision) >= self._ceiling_rps:
                return StopReason.GENERATOR
        return None

    def _next(self) -> tuple[float, int]:
        """Return the next rate, and the most requests to count at it."""
        if self._tried and self._tried[-1].verdict is ProbeVerdict.INVALID:
            again = self._tried[-1].probe
            if again.rate_rps < self._ceiling_rps:
                return again.rate_rps, again.requests
        known = self._known
        if known is None:
            return self._bounded(self._goal.start_rps), FIRST_REQUESTS
        low, high = self._bracket
        rates = [m.probe.rate_rps for m in self._valid]
        if not known.bounded and isinf(high):
            step = _STEP if low == max(rates) else 1.0 + MOST_OFFSET
            return self._bounded(max(rates) * step), FIRST_REQUESTS
        if not known.bounded and low == 0.0:
            step = _STEP if high == min(rates) else 1.0 + MOST_OFFSET
            return self._bounded(min(rates) / step), FIRST_REQUESTS
        width = known.high_rps / known.low_rps if known.bounded else inf
        step = 1.0 + min(max(OFFSET * (sqrt(width) - 1.0), LEAST_OFFSET), MOST_OFFSET)
        side = 1.0 if len(rates) % 2 else -1.0
        centre = known.root_rps if known.bounded else min(max(known.root_rps, low), high)
        rate_rps = centre * step**side
        if centre < high <= rate_rps or rate_rps <= low < centre:
            # A probe beyond a clear verdict would end early and add no information.
            rate_rps = sqrt(centre * (high if side > 0.0 else low))
        return self._bounded(rate_rps), self._missing_requests(known)

    def _missing_requests(self, known: RateFit) -> int:
        """Return how many requests are still needed, within bounds.

        The interval narrows with the square root of the number of requests.
        """
        lacking = (known.relative_half_width / self._goal.precision) ** 2 - 1.0
        return round(min(max(sum(known.sides) * lacking, LEAST_REQUESTS), _MOST_REQUESTS))

    def _bounded(self, rate_rps: float) -> float:
        """Return the rate, or for a rate above the ceiling, a rate halfway to the ceiling."""
        ceiling = self._ceiling_rps
        if rate_rps >= ceiling:
            below = (m.probe.rate_rps for m in self._valid if m.probe.rate_rps < ceiling)
            rate_rps = sqrt(ceiling * max(below, default=ceiling / _STEP**2))
        return min(rate_rps, self._goal.max_rate_rps)
