"""Definitions of `guidellm run`, from `guidellm/schemas/base/request_stats.py` and `metrics.py`.

A stream that ends is a success unless it held an error event. The clock starts when the client
writes the head of the request. TPOT includes the time to the first token. TPOT and ITL are means
over tokens rather than requests, so each request weighs as many tokens as it has. Percentiles are
observed values, without interpolation.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import completion_tokens
from draftgate.loadgen.other_tools.base import (
    BROKEN,
    ToolDistribution,
    ToolReport,
    has_error_event,
    make_counts,
    per_second,
    weighted_percentile,
)
from draftgate.loadgen.types import LoadRun, Record, Slo

_TOOL: Final = "guidellm 0.8.1"
_COLUMNS: Final = {"mean": None, "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}

_REMARKS: Final = (
    "a request without a usage counts all its requested tokens, even if fewer arrived",
    "attainment and goodput exclude a request without a second token",
)


@dataclass(frozen=True, slots=True)
class _Success:
    """A request that guidellm counts as a success. All times are in seconds."""

    slo: Slo
    ttft_s: float
    latency_s: float
    scheduled_s: float
    tpot_s: float
    itl_s: float | None
    tokens: int

    @property
    def conforming(self) -> bool | None:
        """Whether the request met its limits, or None if a limit cannot be checked."""
        limits = ((self.ttft_s, self.slo.ttft_s), (self.itl_s, self.slo.tpot_s))
        checked = [(value, limit) for value, limit in limits if limit is not None]
        if any(value is None for value, _ in checked):
            return None
        return all(value is not None and value <= limit for value, limit in checked)


def guidellm_report(run: LoadRun) -> ToolReport:
    """Return the report of guidellm for a run."""
    good = [one for record in run.records if (one := _success(record)) is not None]
    stopped = sum(record.verdict == Verdict.INTERRUPTED for record in run.records)
    errored = len(run.records) - len(good) - stopped
    first_s = min((record.sent_s for record in run.records), default=0.0)
    seconds = max((record.end_s for record in run.records), default=0.0) - first_s
    tokens, outcomes = sum(one.tokens for one in good), [one.conforming for one in good]
    conforming = outcomes.count(True)
    determined = len(good) - outcomes.count(None) + errored
    return ToolReport(
        _TOOL,
        tuple(_COLUMNS),
        make_counts(
            ("Requests successful", len(good), "the stream ended without an error event"),
            ("Requests errored", errored, "all others"),
            ("Requests incomplete", stopped, "open when the run was stopped"),
            ("Requests per second", per_second(len(good), seconds), "successes / window"),
            ("Output tokens", tokens, "usage of successes"),
            ("Output tokens per second", per_second(tokens, seconds), "output tokens / window"),
            (
                "Request goodput",
                per_second(conforming, seconds),
                "within TTFT and ITL limits / window",
            ),
            (
                "SLO attainment",
                conforming / determined if determined else None,
                "the same / (successes + errored)",
            ),
        ),
        tuple(_distributions(good)),
        _REMARKS,
    )


def _distributions(good: Sequence[_Success]) -> list[ToolDistribution]:
    itl_formula = "(last text - first text) / (n - 1), weight n - 1"
    itls = [(one.itl_s, one.tokens - 1.0) for one in good if one.itl_s is not None]
    tpots = [(one.tpot_s, float(one.tokens)) for one in good]
    scheduled = [(one.scheduled_s, 1.0) for one in good]
    return [
        _weighted(
            "Request latency", "end of stream - head written", [(o.latency_s, 1.0) for o in good]
        ),
        _weighted("Scheduled latency", "end of stream - scheduled", scheduled),
        _weighted("TTFT", "first text - head written", [(o.ttft_s, 1.0) for o in good]),
        _weighted("TPOT", "(last text - head written) / n, weight n", tpots),
        _weighted("ITL", itl_formula, itls),
    ]


def _weighted(name: str, formula: str, pairs: list[tuple[float, float]]) -> ToolDistribution:
    """Return a distribution of (seconds, weight) pairs."""
    known = sorted(pair for pair in pairs if pair[1] > 0)
    if not known:
        return ToolDistribution(name, None, formula)
    weight = sum(w for _, w in known)
    mean_s = sum(value * w for value, w in known) / weight
    values = {
        column: (mean_s if share is None else weighted_percentile(known, share)) * 1e3
        for column, share in _COLUMNS.items()
    }
    return ToolDistribution(name, values, formula)


def _success(record: Record) -> _Success | None:
    broken = record.verdict in BROKEN | {Verdict.MALFORMED} or has_error_event(record)
    if broken or not record.chunks:
        return None
    first_s, last_s = record.chunks[0].at_s, record.chunks[-1].at_s
    reported, requested = completion_tokens(record), record.planned.request.max_tokens
    tokens = requested if reported is None else reported
    return _Success(
        record.planned.request.slo,
        first_s - record.sent_s,
        record.end_s - record.sent_s,
        record.end_s - record.scheduled_s,
        (last_s - record.sent_s) / max(1, tokens),
        (last_s - first_s) / (tokens - 1) if tokens > 1 else None,
        tokens,
    )
