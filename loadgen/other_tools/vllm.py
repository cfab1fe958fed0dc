"""`vllm bench serve`: its definitions (`vllm/benchmarks/serve.py`, `lib/endpoint_request_func.py`).

Any request that brought a chunk is a success. The clock starts when the HTTP client is called, so
a connection's setting up counts; the end is the last chunk, so what follows it does not. In a chat
a delta with a role is no chunk, an empty one without is; in completions all are.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from typing import Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import completion_tokens
from draftgate.loadgen.other_tools.base import BROKEN, Account, Count, linear, rate, within
from draftgate.loadgen.types import LoadRun, Record

TOOL: Final = "vllm bench serve 0.33.0"
COLUMNS: Final = {"mean": None, "median": 0.5, "p90": 0.9, "p99": 0.99}

_REMARKS: Final = (
    "without a usage vLLM counts the tokens of the text with a tokenizer; here each chunk is one",
    "time spent waiting for --max-concurrency would not be in any of these",
)


@dataclass(frozen=True, slots=True)
class _Success:
    """One that vLLM calls successful. Times in seconds."""

    ttft_s: float
    latency_s: float
    gaps_s: tuple[float, ...]
    tokens: int

    @property
    def tpot_s(self) -> float:
        """0 of one token, which meets any limit."""
        return (self.latency_s - self.ttft_s) / (self.tokens - 1) if self.tokens > 1 else 0.0


def account(run: LoadRun) -> Account:
    """Return what vLLM's bench would say of a run."""
    judged = [(record, _success(record)) for record in run.records]
    good = [one for _, one in judged if one is not None]
    tokens = sum(one.tokens for one in good)
    met = sum(one is not None and _met(record, one) for record, one in judged)
    tpots = [one.tpot_s for one in good if one.tokens > 1]
    gaps = [gap for one in good for gap in one.gaps_s]
    seconds = run.duration_s
    return Account(
        TOOL,
        tuple(COLUMNS),
        (
            Count("Successful requests", len(good), "status 200 and at least one chunk"),
            Count("Failed requests", len(judged) - len(good), "all others"),
            Count("Benchmark duration (s)", seconds, "start to end of the last request"),
            Count("Total generated tokens", tokens, "usage of successes"),
            Count("Request throughput (req/s)", rate(len(good), seconds), "successes / duration"),
            Count(
                "Request goodput (req/s)",
                rate(met, seconds),
                "successes within TTFT and TPOT limits / duration; one token has TPOT 0",
            ),
            Count("Output token throughput (tok/s)", rate(tokens, seconds), "tokens / duration"),
        ),
        (
            linear("TTFT", "first chunk - call", [one.ttft_s for one in good], COLUMNS),
            linear("TPOT", "(E2EL - TTFT) / (n - 1)", tpots, COLUMNS),
            linear("ITL", "chunk(i) - chunk(i - 1), pooled", gaps, COLUMNS),
            linear("E2EL", "last chunk - call", [one.latency_s for one in good], COLUMNS),
        ),
        _REMARKS,
    )


def _success(record: Record) -> _Success | None:
    instants = sorted([*(chunk.at_s for chunk in record.chunks), *record.empty_s])
    if record.verdict in BROKEN | {Verdict.MALFORMED} or not instants:
        return None
    called_s = record.sent_s - record.connect_s
    return _Success(
        instants[0] - called_s,
        instants[-1] - called_s,
        tuple(after - before for before, after in pairwise(instants)),
        completion_tokens(record) or len(instants),
    )


def _met(record: Record, one: _Success) -> bool:
    slo = record.planned.request.slo
    return within(one.ttft_s, slo.ttft_s) and within(one.tpot_s, slo.tpot_s)
