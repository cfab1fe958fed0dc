"""Did a request get what it was promised? And how sure is the share of those that did?"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from math import sqrt
from typing import Final, NamedTuple

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import latency_s, tpot_s, ttft_s
from draftgate.loadgen.types import Record

Z_95: Final = 1.959963984540054
"""Quantile 0.975 of the standard normal distribution: two-sided 95 %."""


class Interval(NamedTuple):
    """Of a share; both ends between 0 and 1."""

    low: float
    high: float


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests of a class were served as promised.

    Attributes:
        class_name: the class; empty for all of them together.
        requests: all that were scheduled, failed ones too.
        intact: those whose stream was intact.
        met: those that were intact and met all limits.
        ttft_met, tpot_met, latency_met: intact ones that met this limit; one that was not set is
            met.
    """

    class_name: str
    requests: int
    intact: int
    met: int
    ttft_met: int
    tpot_met: int
    latency_met: int

    @property
    def share(self) -> float | None:
        """Of the requests, those that were met; None if there were none."""
        return self.met / self.requests if self.requests else None

    @property
    def interval(self) -> Interval:
        """The 95 % Wilson interval of the share."""
        return wilson(self.met, self.requests)


def meets_slo(record: Record) -> bool:
    """Whether the stream was intact and all limits of the request's SLO were met."""
    return (
        record.verdict == Verdict.OK
        and met_ttft(record)
        and met_tpot(record)
        and met_latency(record)
    )


def met_ttft(record: Record) -> bool:
    """Whether text came in time, from the scheduled instant. An answer without text did not."""
    limit_s, value_s = record.planned.request.slo.ttft_s, ttft_s(record)
    return limit_s is None or (value_s is not None and value_s <= limit_s)


def met_tpot(record: Record) -> bool:
    """Whether tokens came fast enough. An answer of one token has no TPOT and meets any limit."""
    limit_s, value_s = record.planned.request.slo.tpot_s, tpot_s(record)
    return limit_s is None or value_s is None or value_s <= limit_s


def met_latency(record: Record) -> bool:
    """Whether the answer was complete by its deadline, from the scheduled instant."""
    limit_s = record.planned.request.slo.latency_s
    return limit_s is None or latency_s(record) <= limit_s


def attainment(records: Iterable[Record], class_name: str = "") -> Attainment:
    """Count the requests of a class, or all of them, that were served as promised."""
    chosen = [r for r in records if class_name in {"", r.planned.request.class_name}]
    intact = [record for record in chosen if record.verdict == Verdict.OK]
    return Attainment(
        class_name,
        requests=len(chosen),
        intact=len(intact),
        met=sum(map(meets_slo, chosen)),
        ttft_met=sum(map(met_ttft, intact)),
        tpot_met=sum(map(met_tpot, intact)),
        latency_met=sum(map(met_latency, intact)),
    )


def attainment_by_class(records: Sequence[Record]) -> list[Attainment]:
    """Count each class by itself, in the order of their names."""
    names = sorted({record.planned.request.class_name for record in records})
    return [attainment(records, name) for name in names]


def goodput_rps(met_requests: int, duration_s: float) -> float | None:
    """Return the requests served as promised per second of the schedule; None without a length.

    All scheduled requests count: those that failed or were shed are not met, so that dropping
    requests cannot improve it. In a closed loop, which has no schedule, it is per second of the
    run.
    """
    return met_requests / duration_s if duration_s > 0 else None


def wilson(successes: int, trials: int, z: float = Z_95) -> Interval:
    """Return Wilson's score interval of a share; (0, 1) if nothing was tried.

    `(p + z^2/2n -+ z sqrt(p(1 - p)/n + z^2/4n^2)) / (1 + z^2/n)` with `p = successes/n`
    (E. B. Wilson, JASA 22, 1927). Unlike the normal one it stays within [0, 1] and does not shrink
    to a point when all or none succeed.

    Raises:
        ValueError: there are more successes than trials, or a negative number of them.
    """
    if not 0 <= successes <= trials:
        raise ValueError(f"{successes} of {trials}")
    if trials == 0:
        return Interval(0.0, 1.0)
    share, spread = successes / trials, z * z / trials
    middle = share + spread / 2
    half = z * sqrt(share * (1 - share) / trials + spread / trials / 4)
    low, high = (middle - half) / (1 + spread), (middle + half) / (1 + spread)
    return Interval(max(0.0, low), min(1.0, high))
