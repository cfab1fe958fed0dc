"""Values that the parts of a search exchange. Names end with the unit."""

from __future__ import annotations

from dataclasses import dataclass
from enum import StrEnum
from math import inf, sqrt
from typing import Final

LEAST_CONFIDENCE: Final = 0.5


@dataclass(frozen=True, slots=True)
class SearchGoal:
    """The goal of a search and its precision.

    Attributes:
        start_rps: the first rate to try.
        limit_s: the longest wait that any SLO allows, which determines the warm-up of queues.
        answer_s: the length of a response. The warm-up lasts at least as long.
        share: the share of scheduled requests that must meet their SLO.
        precision: half the width of the interval over the rate at which the search ends.
        confidence: the confidence of the interval.
        max_rate_rps: the highest rate to try.
        most_requests: the limit for all probes together.
        seed: the seed of the first probe. Each further probe has the next seed.
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
        warm_up_s: requests scheduled before this time do not count.
        requests: the most requests that count.
        least_requests: how many requests must count before a verdict, because the first few
            outcomes in a queue depend on each other.
        dispersion: the dispersion of the earlier probes (`search.rate_fit`), a lower bound here.
    """

    rate_rps: float
    seed: int
    warm_up_s: float
    requests: int
    least_requests: int = 0
    dispersion: float = 1.0

    @property
    def longest(self) -> int:
        """Requests to plan, including the warm-up: their mean and four deviations."""
        warming = self.rate_rps * self.warm_up_s
        return self.requests + round(warming + 4.0 * sqrt(warming)) + 1


class ProbeVerdict(StrEnum):
    """The verdict of a probe about its rate."""

    HOLDS = "holds"
    FAILS = "fails"
    DOUBTFUL = "doubtful"
    INVALID = "invalid"


@dataclass(frozen=True, slots=True)
class ProbeResult:
    """The outcome of a probe.

    Attributes:
        met: for each counted request, in the order of the schedule, whether it met its SLO.
        sent: the number of requests sent, including warm-up and interrupted requests.
        invalid: why the generator did not keep up. An invalid probe does not measure the server.
    """

    probe: SearchProbe
    met: tuple[bool, ...]
    sent: int
    verdict: ProbeVerdict
    invalid: tuple[str, ...] = ()

    @property
    def cut(self) -> bool:
        """Whether the probe ended early. Whether a probe ends early also depends on chance."""
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
    """The estimate of the rate.

    Attributes:
        rate_rps: the estimate, or None if the search found only a bound.
        low_rps, high_rps: the interval, with 0 and infinity for missing bounds.
        requests: the number of requests sent by all probes.
        dispersion: the variance of a share over that of independent requests.
    """

    rate_rps: float | None
    low_rps: float
    high_rps: float
    requests: int
    dispersion: float
    stop: StopReason

    @property
    def converged(self) -> bool:
        """Whether the interval is as narrow as requested, or certainly no rate holds."""
        return self.stop in {StopReason.PRECISE, StopReason.NEVER}

    @property
    def relative_half_width(self) -> float:
        """Half the interval over the rate, infinite without an estimate."""
        if self.rate_rps is None:
            return inf
        return (self.high_rps - self.low_rps) / 2 / self.rate_rps
