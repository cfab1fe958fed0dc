"""`guidellm run`: its definitions (`guidellm/schemas/base/request_stats.py`, `.../metrics.py`).

A stream that ends is a success unless it held an error event. The clock starts when the request's
head is written. TPOT holds the time to the first token; TPOT and ITL are means over tokens, not
over requests: each request weighs as many tokens as it has. Percentiles are values that occurred.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import completion_tokens
from draftgate.loadgen.other_tools.base import (
    BROKEN,
    Account,
    Count,
    Spread,
    rate,
    told_error,
    weighted_percentile,
)
from draftgate.loadgen.types import LoadRun, Record, Slo

TOOL: Final = "guidellm 0.8.1"
COLUMNS: Final[Mapping[str, float | None]] = {
    "mean": None,
    "median": 0.5,
    "p90": 0.9,
    "p95": 0.95,
    "p99": 0.99,
}

_REMARKS: Final = (
    "without a usage a request is credited with all the tokens it asked for, however few came",
    "a request without a second token is left out of attainment and goodput",
)


@dataclass(frozen=True, slots=True)
class _Success:
    """One that guidellm calls successful. Times in seconds."""

    slo: Slo
    ttft_s: float
    latency_s: float
    scheduled_s: float
    tpot_s: float
    itl_s: float | None
    tokens: int

    @property
    def conforming(self) -> bool | None:
        """Whether it met its limits; None if one could not be looked at."""
        limits = ((self.ttft_s, self.slo.ttft_s), (self.itl_s, self.slo.tpot_s))
        asked = [(value, limit) for value, limit in limits if limit is not None]
        if any(value is None for value, _ in asked):
            return None
        return all(value is not None and value <= limit for value, limit in asked)


def account(run: LoadRun) -> Account:
    """Return what guidellm would say of a run."""
    judged = [(record, _success(record)) for record in run.records]
    good = [one for _, one in judged if one is not None]
    stopped = sum(record.verdict == Verdict.INTERRUPTED for record, _ in judged)
    errored = len(judged) - len(good) - stopped
    seconds = _window_s(run)
    return Account(
        TOOL,
        tuple(COLUMNS),
        (
            Count("Requests successful", len(good), "the stream ended and held no error event"),
            Count("Requests errored", errored, "all others"),
            Count("Requests incomplete", stopped, "open when the run was stopped"),
            Count("Requests per second", rate(len(good), seconds), "successes / window"),
            *_tokens(good, seconds),
            *_goodput(good, errored, seconds),
        ),
        tuple(_spreads(good)),
        _REMARKS,
    )


def _tokens(good: Sequence[_Success], seconds: float) -> tuple[Count, ...]:
    tokens = sum(one.tokens for one in good)
    return (
        Count("Output tokens", tokens, "usage of successes"),
        Count("Output tokens per second", rate(tokens, seconds), "output tokens / window"),
    )


def _goodput(good: Sequence[_Success], errored: int, seconds: float) -> tuple[Count, ...]:
    found = [one.conforming for one in good]
    conforming, determined = found.count(True), len(found) - found.count(None) + errored
    return (
        Count("Request goodput", rate(conforming, seconds), "within TTFT and ITL limits / window"),
        Count(
            "SLO attainment",
            conforming / determined if determined else None,
            "the same / (successes + errored)",
        ),
    )


def _spreads(good: Sequence[_Success]) -> list[Spread]:
    def once(value: Callable[[_Success], float]) -> list[tuple[float, float]]:
        return [(value(one), 1.0) for one in good]

    tpots = [(one.tpot_s, float(one.tokens)) for one in good]
    itls = [(one.itl_s, one.tokens - 1.0) for one in good if one.itl_s is not None]
    return [
        _spread("Request latency", "end of stream - head written", once(lambda o: o.latency_s)),
        _spread("Scheduled latency", "end of stream - scheduled", once(lambda o: o.scheduled_s)),
        _spread("TTFT", "first text - head written", once(lambda o: o.ttft_s)),
        _spread("TPOT", "(last text - head written) / n, weight n", tpots),
        _spread("ITL", "(last text - first text) / (n - 1), weight n - 1", itls),
    ]


def _spread(name: str, formula: str, weighted_s: list[tuple[float, float]]) -> Spread:
    """Return a distribution of (seconds, weight) pairs; percentiles are values that occurred."""
    known = sorted(pair for pair in weighted_s if pair[1] > 0)
    if not known:
        return Spread(name, None, formula)
    weight = sum(w for _, w in known)
    mean_s = sum(value * w for value, w in known) / weight
    values = {
        column: (mean_s if share is None else weighted_percentile(known, share)) * 1e3
        for column, share in COLUMNS.items()
    }
    return Spread(name, values, formula)


def _success(record: Record) -> _Success | None:
    broken = record.verdict in BROKEN | {Verdict.MALFORMED} or told_error(record)
    if broken or not record.chunks:
        return None
    first_s, last_s = record.chunks[0].at_s, record.chunks[-1].at_s
    told, asked = completion_tokens(record), record.planned.request.max_tokens
    tokens = asked if told is None else told
    return _Success(
        record.planned.request.slo,
        first_s - record.sent_s,
        record.end_s - record.sent_s,
        record.end_s - record.scheduled_s,
        (last_s - record.sent_s) / max(1, tokens),
        (last_s - first_s) / (tokens - 1) if tokens > 1 else None,
        tokens,
    )


def _window_s(run: LoadRun) -> float:
    """Return the seconds from the first sending to the last end."""
    if not run.records:
        return 0.0
    began_s = min(record.sent_s for record in run.records)
    return max(record.end_s for record in run.records) - began_s
