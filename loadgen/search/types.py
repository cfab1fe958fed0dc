"""What the parts of a search hand each other. Pure values; units are in the names."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import Final

SHARES: Final = (0.90, 0.95, 0.99)
"""The shares that papers and tools ask for (DistServe 0.90, aiperf 0.95, MLPerf's p99)."""

LEAST_CONFIDENCE: Final = 0.5


@dataclass(frozen=True, slots=True)
class Aim:
    """What is to be found, and how surely.

    Attributes:
        share: of scheduled requests that must meet their SLO.
        precision: half the interval's width over the rate at which the search is content.
        confidence: of the interval.
        start_rps: where to begin.
        max_rate_rps: no higher rate is tried.
        limit_s: the longest wait that any SLO allows: by it queues are given time to settle.
        answer_s: how long an answer takes, at least the time to settle.
        most_requests: of all probes together; the search ends there.
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
        """Refuse what cannot be found.

        Raises:
            ValueError: a number is out of its range.
        """
        for name, value in (("share", self.share), ("precision", self.precision)):
            if not 0.0 < value < 1.0:
                raise ValueError(f"{name} is between 0 and 1, not {value}")
        if not LEAST_CONFIDENCE <= self.confidence < 1.0:
            raise ValueError(f"confidence is from {LEAST_CONFIDENCE} to 1, not {self.confidence}")
        if not 0.0 < self.start_rps <= self.max_rate_rps:
            raise ValueError(f"the search starts above 0 and up to its maximum: {self.start_rps}")
        for name, value in (("limit_s", self.limit_s), ("answer_s", self.answer_s)):
            if not 0.0 <= value < inf:
                raise ValueError(f"{name} is 0 or more, and finite, not {value}")
        if self.most_requests < 1:
            raise ValueError(f"a search needs requests, not {self.most_requests}")


@dataclass(frozen=True, slots=True)
class Probe:
    """What to try next: a run at one rate.

    Attributes:
        number: from 0.
        settle_s: requests scheduled before this do not count.
        requests: how many are to count at most.
        least_requests: how many must count before there is a verdict: in a queue the first few
            are one piece of luck.
        dispersion: of the probes so far (`loadgen.search.batches`), at least that of this one.
    """

    number: int
    rate_rps: float
    seed: int
    settle_s: float
    requests: int
    least_requests: int = 0
    dispersion: float = 1.0

    @property
    def longest(self) -> int:
        """Requests to plan, those that settle included: their mean and four deviations."""
        settling = self.rate_rps * self.settle_s
        return self.requests + round(settling + 4.0 * sqrt(settling)) + 1


class Verdict(StrEnum):
    """What a probe says of its rate."""

    HOLDS = "holds"
    FAILS = "fails"
    DOUBTFUL = "doubtful"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class Measured:
    """What came of a probe.

    Attributes:
        met: of the requests that count, in the order of the schedule, whether each met its SLO.
        sent: all that were sent, those that settled or were cut off included.
        invalid: why the generator did not keep up; then nothing is said about the server.
    """

    probe: Probe
    met: tuple[bool, ...]
    sent: int
    verdict: Verdict
    invalid: tuple[str, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether it was stopped before all that were to count did: then it was by luck, too."""
        return len(self.met) < self.probe.requests

    @property
    def share(self) -> float | None:
        """Of the requests that count, those that met their SLO."""
        return sum(self.met) / len(self.met) if self.met else None


class Stop(StrEnum):
    """Why a search ended."""

    PRECISE = "the interval is as narrow as wanted"
    REQUESTS = "all requests allowed were sent"
    GENERATOR = "this generator cannot send faster"
    MAX_RATE = "the highest rate allowed holds"
    NEVER = "not even the slowest rate tried holds"
    INTERRUPTED = "interrupted"


@dataclass(frozen=True, slots=True)
class Found:
    """What is known of the rate.

    Attributes:
        rate_rps: the best guess; None where there is none but a bound.
        low_rps, high_rps: its interval; 0 and infinity bound nothing.
        requests: sent by all probes.
        dispersion: how many times more a share over requests of a queue varies than one over
            independent ones.
    """

    rate_rps: float | None
    low_rps: float
    high_rps: float
    requests: int
    dispersion: float
    stop: Stop

    @property
    def relative_half_width(self) -> float:
        """Half the interval over the rate; infinite where it is open."""
        if self.rate_rps is None:
            return inf
        return (self.high_rps - self.low_rps) / 2 / self.rate_rps
