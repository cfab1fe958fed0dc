"""`aiperf profile --use-server-token-count`: its definitions (`aiperf/metrics/types/`).

Any request that brought text is a success, unless an event of the type `error` came. The clock
starts when the HTTP client is called; the end is the last text, but for the effective latency,
which counts from the schedule to the end of the stream. ITL and TPOT are one figure, a mean per
request.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from draftgate.loadgen.measuring.metrics import completion_tokens
from draftgate.loadgen.other_tools.base import BROKEN, Account, Count, linear, rate, within
from draftgate.loadgen.types import LoadRun, Record

TOOL: Final = "aiperf 0.13.0"
COLUMNS: Final = {"avg": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}

_REMARKS: Final = (
    "an error counts if it came as an event of that type; one that came as data, as here, does not",
    "a request without a usage has no tokens, no ITL, and no goodput",
    "aiperf's percentiles of the inter-chunk latency are estimates (t-digest), these are exact",
)


@dataclass(frozen=True, slots=True)
class _Success:
    """One that aiperf calls successful. Instants and times in seconds."""

    called_s: float
    last_s: float
    ttft_s: float
    latency_s: float
    effective_s: float
    gaps_s: tuple[float, ...]
    tokens: int | None

    @property
    def itl_s(self) -> float | None:
        """None of fewer than two tokens, or if they were not counted."""
        if self.tokens is None or self.tokens < 2:
            return None
        return (self.latency_s - self.ttft_s) / (self.tokens - 1)


def account(run: LoadRun) -> Account:
    """Return what aiperf would say of a run."""
    judged = [(record, _success(record)) for record in run.records]
    good = [one for _, one in judged if one is not None]
    tokens = sum(one.tokens or 0 for one in good)
    met = sum(one is not None and _met(record, one) for record, one in judged)
    seconds = _duration_s(good)
    itls = [one.itl_s for one in good if one.itl_s is not None]
    gaps = [gap for one in good for gap in one.gaps_s]
    return Account(
        TOOL,
        tuple(COLUMNS),
        (
            Count("Request Count", len(good), "text came"),
            Count("Error Request Count", len(judged) - len(good), "all others"),
            Count("Benchmark Duration (s)", seconds, "first call to last text, of successes"),
            Count("Total Output Tokens", tokens, "usage of successes"),
            Count("Request Throughput (/s)", rate(len(good), seconds), "successes / duration"),
            Count(
                "Goodput (/s)",
                rate(met, seconds),
                "successes within TTFT and ITL limits / duration; without ITL not met",
            ),
            Count("Output Token Throughput (/s)", rate(tokens, seconds), "tokens / duration"),
        ),
        (
            linear("Time to First Token", "first text - call", [o.ttft_s for o in good], COLUMNS),
            linear("Request Latency", "last text - call", [o.latency_s for o in good], COLUMNS),
            linear("Effective Latency", "end - scheduled", [o.effective_s for o in good], COLUMNS),
            linear("Inter Token Latency", "(latency - TTFT) / (n - 1)", itls, COLUMNS),
            linear("Inter Chunk Latency", "text(i) - text(i - 1), pooled", gaps, COLUMNS),
        ),
        _REMARKS,
    )


def _success(record: Record) -> _Success | None:
    if record.verdict in BROKEN or not record.chunks:
        return None
    called_s = record.sent_s - record.connect_s
    instants = [chunk.at_s for chunk in record.chunks]
    return _Success(
        called_s,
        instants[-1],
        instants[0] - called_s,
        instants[-1] - called_s,
        record.end_s - record.scheduled_s,
        tuple(after - before for before, after in pairwise(instants)),
        completion_tokens(record),
    )


def _met(record: Record, one: _Success) -> bool:
    slo = record.planned.request.slo
    return within(one.ttft_s, slo.ttft_s) and within(one.itl_s, slo.tpot_s)


def _duration_s(good: list[_Success]) -> float:
    if not good:
        return 0.0
    return max(one.last_s for one in good) - min(one.called_s for one in good)
