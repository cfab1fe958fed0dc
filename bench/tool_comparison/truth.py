"""Actions of the mock, as the metrics that tools report."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import count

from bench.tool_comparison.cases import RATE, TPOT_LIMIT_MS, TTFT_LIMIT_MS
from bench.tool_comparison.mock import ResponseRecord
from bench.tool_comparison.tools import Metrics
from draftgate.loadgen.measuring.metrics import percentile


def truth(responses: Sequence[ResponseRecord], requests: int) -> Metrics:
    """Return the true metrics of the last requests of a tool.

    Some tools send a test request first, so earlier requests do not count. `scheduled` counts from
    the time at which a user would have sent each request, which is the first arrival plus constant
    gaps. `scheduled` and goodput include all requests, and the limits of goodput apply to complete
    responses.
    """
    records = sorted(responses, key=lambda response: response.arrived_s)[-requests:]
    intact = [response for response in records if response.intact]
    began_s = records[0].arrived_s
    dues_s = [began_s + place / RATE for place, _ in zip(count(), records, strict=False)]
    waited_s = [response.end_s - due for response, due in zip(records, dues_s, strict=True)]
    ttfts_s = [response.first_s - due for response, due in zip(records, dues_s, strict=True)]
    met = sum(
        response.intact
        and ttft_s <= TTFT_LIMIT_MS / 1e3
        and _tpot_s(response) <= TPOT_LIMIT_MS / 1e3
        for response, ttft_s in zip(records, ttfts_s, strict=True)
    )
    seconds = max(response.end_s for response in records) - began_s
    return {
        "ok": len(intact),
        "failed": len(records) - len(intact),
        **_spread("ttft", [response.first_s - response.arrived_s for response in records]),
        **_spread("tpot", [_tpot_s(response) for response in records]),
        **_spread("latency", [response.end_s - response.arrived_s for response in records]),
        **_spread("scheduled", waited_s),
        "requests_rps": len(intact) / seconds,
        "tokens_per_s": sum(response.tokens for response in intact) / seconds,
        "goodput_rps": met / seconds,
    }


def _tpot_s(response: ResponseRecord) -> float:
    """Return the mean time per token after the first one."""
    return (response.last_s - response.first_s) / max(1, response.tokens - 1)


def _spread(name: str, seconds: Sequence[float]) -> Metrics:
    ascending = sorted(seconds)
    return {
        f"{name}_mean_ms": sum(ascending) / len(ascending) * 1e3,
        f"{name}_p50_ms": percentile(ascending, 0.5) * 1e3,
        f"{name}_p99_ms": percentile(ascending, 0.99) * 1e3,
    }
