"""Definitions of `aiperf profile --use-server-token-count`, from `aiperf/metrics/types/`.

A request with any text is a success, unless an event of the type `error` arrived. The clock starts
at the call of the HTTP client and ends at the last text. Only the effective latency counts from the
schedule to the end of the stream. ITL and TPOT are one metric, a mean per request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from draftgate.loadgen.measuring.metrics import completion_tokens
from draftgate.loadgen.other_tools.base import (
    BROKEN,
    ToolReport,
    interpolated,
    make_counts,
    per_second,
    within,
)
from draftgate.loadgen.types import LoadRun, Record, Slo

_TOOL: Final = "aiperf 0.13.0"
_COLUMNS: Final = {"avg": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}

_REMARKS: Final = (
    "an error event counts, but an error that the server sends as data does not",
    "a request without a usage has no tokens, no ITL, and no goodput",
    "aiperf estimates percentiles of the inter-chunk latency (t-digest), but these are exact",
)


@dataclass(frozen=True, slots=True)
class _Success:
    """A request that aiperf counts as a success. All times are in seconds."""

    slo: Slo
    called_s: float
    last_s: float
    ttft_s: float
    latency_s: float
    effective_s: float
    gaps_s: tuple[float, ...]
    tokens: int | None

    @property
    def itl_s(self) -> float | None:
        """The mean inter-token latency, or None for fewer than two tokens or an unknown count."""
        if self.tokens is None or self.tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.tokens - 1)


def aiperf_report(run: LoadRun) -> ToolReport:
    """Return the report of aiperf for a run."""
    good = [one for record in run.records if (one := _success(record)) is not None]
    failed, tokens = len(run.records) - len(good), sum(one.tokens or 0 for one in good)
    met = sum(within(o.ttft_s, o.slo.ttft_s) and within(o.itl_s, o.slo.tpot_s) for o in good)
    first_s = min((one.called_s for one in good), default=0.0)
    seconds = max((one.last_s for one in good), default=0.0) - first_s
    itls = [one.itl_s for one in good if one.itl_s is not None]
    gaps = [gap for one in good for gap in one.gaps_s]
    effective = [one.effective_s for one in good]
    return ToolReport(
        _TOOL,
        tuple(_COLUMNS),
        make_counts(
            ("Request Count", len(good), "text arrived"),
            ("Error Request Count", failed, "all others"),
            ("Benchmark Duration (s)", seconds, "first call to last text, of successes"),
            ("Total Output Tokens", tokens, "usage of successes"),
            ("Request Throughput (/s)", per_second(len(good), seconds), "successes / duration"),
            (
                "Goodput (/s)",
                per_second(met, seconds),
                "successes within TTFT and ITL limits / duration; without ITL not met",
            ),
            ("Output Token Throughput (/s)", per_second(tokens, seconds), "tokens / duration"),
        ),
        (
            interpolated(
                "Time to First Token", "first text - call", [o.ttft_s for o in good], _COLUMNS
            ),
            interpolated(
                "Request Latency", "last text - call", [o.latency_s for o in good], _COLUMNS
            ),
            interpolated("Effective Latency", "end - scheduled", effective, _COLUMNS),
            interpolated("Inter Token Latency", "(latency - TTFT) / (n - 1)", itls, _COLUMNS),
            interpolated("Inter Chunk Latency", "text(i) - text(i - 1), pooled", gaps, _COLUMNS),
        ),
        _REMARKS,
    )


def _success(record: Record) -> _Success | None:
    if record.verdict in BROKEN or not record.chunks:
        return None
    called_s = record.sent_s - record.connect_s
    instants = [chunk.at_s for chunk in record.chunks]
    return _Success(
        record.planned.request.slo,
        called_s,
        instants[-1],
        instants[0] - called_s,
        instants[-1] - called_s,
        record.end_s - record.scheduled_s,
        tuple(after - before for before, after in pairwise(instants)),
        completion_tokens(record),
    )
