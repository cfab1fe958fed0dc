"""Values that the parts of a search exchange. Units are in the names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import Final

SHARES: Final = (0.90, 0.95, 0.99)
"""The shares that papers and tools use (DistServe 0.90, aiperf 0.95, MLPerf's p99)."""

LEAST_CONFIDENCE: Final = 0.5


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """What to find, and how precisely.

    Attributes:
        start_rps: the first rate to try.
        limit_s: the longest wait that any SLO allows; it determines the warm-up of queues.
        answer_s: how long an answer takes; the warm-up lasts at least as long.
        share: of scheduled requests that must meet their SLO.
        precision: half the width of the interval over the rate at which the search ends.
        confidence: of the interval.
        max_rate_rps: no higher rate is tried.
        most_requests: of all probes together.
        seed: of the first probe; each further one has the next.
    """

    start_rps: float
    limit_s: float
    answer_s: float = 0.0
    share: float = 0.95
    precision: float = 0.05
    confidence: float = 0.95
    max_rate_rps: float = inf
    most_requests: int = 100_000
    seed: int = 0

    def __post_init__(self) -> None:
        """Check the values.

        Raises:
            ValueError: a number is out of its range.
        """
        for name, value in (("share", self.share), ("precision", self.precision)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name} must be between 0 and 1, not {value}")
        if not LEAST_CONFIDENCE <= self.confidence < 1.0:
            least = f"{LEAST_CONFIDENCE} to 1"
            raise ValueError(f"confidence must be from {least}, not {self.confidence}")
        if not 0.0 < self.start_rps <= self.max_rate_rps:
            raise ValueError(
                f"the starting rate must be above 0 and at most the maximum, not {self.start_rps}"
            )
        for name, value in (("limit_s", self.limit_s), ("answer_s", self.answer_s)):
            if not 0.0 <= value < inf:
                raise ValueError(f"{name} must be finite and at least 0, not {value}")
        if self.most_requests < 1:
            raise ValueError(f"requests must be at least 1, not {self.most_requests}")


@dataclass(frozen=True, slots=True)
class SearchProbe:
    """A run at one rate.

    Attributes:
        warm_up_s: requests scheduled before this do not count.
        requests: how many count at most.
        least_requests: how many must count before there is a verdict. In a queue the first few are
            one piece of luck.
        dispersion: of the probes so far (`search.rate_fit`), a lower bound for this one.
    """

    rate_rps: float
    seed: int
    warm_up_s: float
    requests: int
    least_requests: int = 0
    dispersion: float = 1.0

    @property
    def longest(self) -> int:
        """Requests to plan, with those of the warm-up: their mean and four deviations."""
        warming = self.rate_rps * self.warm_up_s
        return self.requests + round(warming + 4.0 * sqrt(warming)) + 1


class ProbeVerdict(StrEnum):
    """What a probe shows about its rate."""

    HOLDS = "holds"
    FAILS = "fails"
    DOUBTFUL = "doubtful"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of a probe.

    Attributes:
        met: for each counted request, in the order of the schedule, whether it met its SLO.
        sent: all that were sent, including those of the warm-up and those cut off.
        invalid: why the generator did not keep up; the probe then shows nothing.
    """

    probe: SearchProbe
    met: tuple[bool, ...]
    sent: int
    verdict: ProbeVerdict
    invalid: tuple[str, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether it ended early, which depends on its luck, too."""
        return len(self.met) < self.probe.requests

    @property
    def share(self) -> float | None:
        """The share of counted requests that met their SLO."""
        return sum(self.met) / len(self.met) if self.met else None


class StopReason(StrEnum):
    """Why a search ended."""

    PRECISE = "the interval is as narrow as requested"
    REQUESTS = "all allowed requests were sent"
    GENERATOR = "this generator cannot send faster"
    MAX_RATE = "the highest allowed rate holds"
    NEVER = "not even the slowest rate holds"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class SearchResult:
    """What is known about the rate.

    Attributes:
        rate_rps: the estimate; None if there is only a bound.
        low_rps, high_rps: its interval; 0 and infinity are no bounds.
        requests: sent by all probes.
        dispersion: the variance of a share over requests of a queue, over that of independent ones.
    """

    rate_rps: float | None
    low_rps: float
    high_rps: float
    requests: int
    dispersion: float
    stop: StopReason

    @property
    def relative_half_width(self) -> float:
        """Half the interval over the rate; infinite without an estimate."""
        if self.rate_rps is None:
            return inf
        return (self.high_rps - self.low_rps) / 2 / self.rate_rps
