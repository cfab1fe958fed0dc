"""Counts the requests that met their SLO."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.confidence import Interval, wilson
from draftgate.loadgen.measuring.metrics import chunk_gaps_s, latency_s, tpot_s, ttft_s
from draftgate.loadgen.types import Record

SHARES: Final = (0.90, 0.95, 0.99)
"""The shares that papers and tools use (DistServe 0.90, aiperf 0.95, MLPerf's p99)."""


@dataclass(frozen=True, slots=True)
class Attainment:
    """How many requests of a class met their SLO.

    Attributes:
        class_name: the class, or empty for all classes together.
        requests: all scheduled requests, including failed requests.
        intact: requests with an intact stream.
        met: intact requests that met all limits.
        ttft_met, tpot_met, latency_met, gap_met: intact requests that met this limit, or had
            none.
    """

    class_name: str
    requests: int
    intact: int
    met: int
    ttft_met: int
    tpot_met: int
    latency_met: int
    gap_met: int

    @property
    def share(self) -> float | None:
        """The share of requests that met their SLO, or None without requests."""
        return self.met / self.requests if self.requests else None

    @property
    def interval(self) -> Interval:
        """The 95 % Wilson interval of the share."""
        return wilson(self.met, self.requests)


def meets_slo(record: Record) -> bool:
    """Whether the stream was intact and met all limits of the request's SLO."""
    return (
        record.verdict == Verdict.OK
        and met_ttft(record)
        and met_tpot(record)
        and met_latency(record)
        and met_gap(record)
    )


def met_ttft(record: Record) -> bool:
    """Whether text arrived in time after the scheduled time, which requires some text."""
    limit_s, value_s = record.planned.request.slo.ttft_s, ttft_s(record)
    return limit_s is None or (value_s is not None and value_s <= limit_s)


def met_tpot(record: Record) -> bool:
    """Whether tokens arrived fast enough. A response of one token meets any limit."""
    limit_s, value_s = record.planned.request.slo.tpot_s, tpot_s(record)
    return limit_s is None or value_s is None or value_s <= limit_s


def met_latency(record: Record) -> bool:
    """Whether the response was complete by its deadline after the scheduled time."""
    limit_s = record.planned.request.slo.latency_s
    return limit_s is None or latency_s(record) <= limit_s


def met_gap(record: Record) -> bool:
    """Whether no gap between two chunks was too long."""
    limit_s = record.planned.request.slo.chunk_gap_s
    return limit_s is None or max(chunk_gaps_s(record), default=0.0) <= limit_s


def attainment(records: Iterable[Record], class_name: str = "") -> Attainment:
    """Return the counts for the requests of a class, or of all classes."""
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
        gap_met=sum(map(met_gap, intact)),
    )


def attainment_by_class(records: Sequence[Record]) -> list[Attainment]:
    """Return the counts for each class, in alphabetical order."""
    names = sorted({record.planned.request.class_name for record in records})
    return [attainment(records, name) for name in names]


def goodput_rps(met_requests: int, duration_s: float) -> float | None:
    """Return the requests that met their SLO per second of the schedule, or None if it is empty.

    All scheduled requests count. Failed and shed requests have not met their SLO, so a server
    cannot improve its goodput by dropping requests. The rate in a closed loop, which has no
    schedule, is per second of the run.
    """
    return met_requests / duration_s if duration_s > 0 else None
