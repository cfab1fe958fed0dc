"""Definitions of `vllm bench serve`, from `serve.py` and `lib/endpoint_request_func.py`.

A request with any chunk is a success. The clock starts at the call of the HTTP client, so opening a
connection counts. The clock ends at the last chunk, so the end of the stream does not count. In a
chat a delta with a role is not a chunk, but an empty delta without a role is. In completions every
delta is a chunk.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from draftgate.loadgen.checking.audit import Verdict
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

_TOOL: Final = "vllm bench serve 0.33.0"
_COLUMNS: Final = {"mean": None, "median": 0.5, "p90": 0.9, "p99": 0.99}

_REMARKS: Final = (
    "vLLM tokenizes a text without a usage, but this report counts each chunk as a token",
    "no metric would include time spent waiting for --max-concurrency",
)


@dataclass(frozen=True, slots=True)
class _Success:
    """A request that vLLM counts as a success."""

    slo: Slo
    ttft_s: float
    latency_s: float
    gaps_s: tuple[float, ...]
    tokens: int

    @property
    def tpot_s(self) -> float:
        """The mean time per token after the first. It is 0 for one token, which meets any limit."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


def vllm_report(run: LoadRun) -> ToolReport:
    """Return the report of vLLM's benchmark for a run."""
    good = [one for record in run.records if (one := _success(record)) is not None]
    failed, tokens = len(run.records) - len(good), sum(one.tokens for one in good)
    met = sum(within(o.ttft_s, o.slo.ttft_s) and within(o.tpot_s, o.slo.tpot_s) for o in good)
    tpots = [one.tpot_s for one in good if one.tokens > 1]
    gaps = [gap for one in good for gap in one.gaps_s]
    seconds = run.duration_s
    return ToolReport(
        _TOOL,
        tuple(_COLUMNS),
        make_counts(
            ("Successful requests", len(good), "status 200 and at least one chunk"),
            ("Failed requests", failed, "all others"),
            ("Benchmark duration (s)", seconds, "start to end of the last request"),
            ("Total generated tokens", tokens, "usage of successes"),
            ("Request throughput (req/s)", per_second(len(good), seconds), "successes / duration"),
            (
                "Request goodput (req/s)",
                per_second(met, seconds),
                "successes within TTFT and TPOT limits / duration; one token has TPOT 0",
            ),
            ("Output token throughput (tok/s)", per_second(tokens, seconds), "tokens / duration"),
        ),
        (
            interpolated("TTFT", "first chunk - call", [one.ttft_s for one in good], _COLUMNS),
            interpolated("TPOT", "(E2EL - TTFT) / (n - 1)", tpots, _COLUMNS),
            interpolated("ITL", "chunk(i) - chunk(i - 1), pooled", gaps, _COLUMNS),
            interpolated("E2EL", "last chunk - call", [one.latency_s for one in good], _COLUMNS),
        ),
        _REMARKS,
    )


def _success(record: Record) -> _Success | None:
    instants = sorted([*(chunk.at_s for chunk in record.chunks), *record.empty_s])
    if record.verdict in BROKEN | {Verdict.MALFORMED} or not instants:
        return None
    called_s = record.sent_s - record.connect_s
    return _Success(
        record.planned.request.slo,
        instants[0] - called_s,
        instants[-1] - called_s,
        tuple(after - before for before, after in pairwise(instants)),
        completion_tokens(record) or len(instants),
    )
