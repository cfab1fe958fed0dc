"""Metrics of `--as` for Draftgate's own run, by the names of each tool."""

from __future__ import annotations

from pathlib import Path
from typing import Final

from bench.tool_comparison.tools import Metrics
from draftgate.loadgen.events import read_events
from draftgate.loadgen.other_tools import TOOLS

NAMES: Final = {
    "vllm": {
        "ok": "Successful requests",
        "failed": "Failed requests",
        "ttft": "TTFT",
        "tpot": "TPOT",
        "itl": "ITL",
        "latency": "E2EL",
        "requests_rps": "Request throughput (req/s)",
        "tokens_per_s": "Output token throughput (tok/s)",
        "goodput_rps": "Request goodput (req/s)",
    },
    "guidellm": {
        "ok": "Requests successful",
        "failed": "Requests errored",
        "ttft": "TTFT",
        "tpot": "TPOT",
        "itl": "ITL",
        "latency": "Request latency",
        "scheduled": "Scheduled latency",
        "requests_rps": "Requests per second",
        "tokens_per_s": "Output tokens per second",
        "goodput_rps": "Request goodput",
    },
    "aiperf": {
        "ok": "Request Count",
        "failed": "Error Request Count",
        "ttft": "Time to First Token",
        "itl": "Inter Token Latency",
        "gap": "Inter Chunk Latency",
        "latency": "Request Latency",
        "scheduled": "Effective Latency",
        "requests_rps": "Request Throughput (/s)",
        "tokens_per_s": "Output Token Throughput (/s)",
        "goodput_rps": "Goodput (/s)",
    },
}
"""Draftgate's name of a metric and the tool's name, by dialect."""


def dialect_metrics(events: Path) -> dict[str, Metrics]:
    """Return the metrics of a run's events in each dialect."""
    run, _ = read_events(events)
    found: dict[str, Metrics] = {}
    for dialect, account in TOOLS.items():
        accounted = account(run)
        counts = {one.name: one.value for one in accounted.counts}
        spreads = {one.name: one.values for one in accounted.distributions}
        figures: Metrics = {}
        for key, name in NAMES[dialect].items():
            if name in counts:
                figures[key] = counts[name]
            elif (values := spreads[name]) is not None:
                figures[f"{key}_mean_ms"] = values[accounted.columns[0]]
                figures[f"{key}_p50_ms"] = values.get("p50", values.get("median"))
                figures[f"{key}_p99_ms"] = values["p99"]
        found[dialect] = figures
    return found


def differences(tool_metrics: Metrics, draftgate_metrics: Metrics) -> Metrics:
    """Return the differences of `--as` relative to the tool's metrics, where both exist."""
    return {
        key: None if not value else (draftgate_metrics[key] or 0.0) / value - 1.0
        for key, value in tool_metrics.items()
        if draftgate_metrics.get(key) is not None and value is not None
    }
