"""Reports the result of a search as text, and as `search/1`."""

from __future__ import annotations

from math import isinf
from typing import Any

from rich.console import Group, RenderableType
from rich.table import Table

from draftgate.loadgen.report.formatting import number, percent
from draftgate.loadgen.search.runner import SearchReport
from draftgate.loadgen.search.types import ProbeResult, SearchResult


def search_as_dict(report: SearchReport) -> dict[str, Any]:
    """Return the `search/1` result of a search, with the `summary/1` of each probe.

    An open end of the interval is None.
    """
    goal, result = report.goal, report.result
    high = None if isinf(result.high_rps) else result.high_rps
    return {
        "format": "search/1",
        "rate_rps": result.rate_rps,
        "interval": [result.low_rps or None, high],
        "confidence": goal.confidence,
        "share": goal.share,
        "precision": goal.precision,
        "stop": result.stop.name.lower(),
        "requests": result.requests,
        "dispersion": result.dispersion,
        "probes": [
            {
                "rate_rps": probed.probe.rate_rps,
                "seed": probed.probe.seed,
                "settle_s": probed.probe.warm_up_s,
                "sent": probed.sent,
                "counted": len(probed.met),
                "met": sum(probed.met),
                "verdict": probed.verdict.value,
                "invalid_reasons": list(probed.invalid),
                "summary": summary,
            }
            for probed, summary in report.probes
        ],
        "settings": report.settings,
    }


def describe_probe(probed: ProbeResult, result: SearchResult) -> str:
    """Return a line about a probe and the interval after it."""
    attained = f"{percent(probed.share)} of {len(probed.met)} met their SLO"
    why = f" ({probed.invalid[0]})" if probed.invalid else ""
    verdict = f"{probed.verdict.value}{why}; now {describe_interval(result)}"
    return f"{probed.probe.rate_rps:.3g}/s: {attained}, {verdict}"


def describe_interval(result: SearchResult) -> str:
    """Return the interval, or the bound of the rate."""
    if result.low_rps and not isinf(result.high_rps):
        return f"{result.low_rps:.3g} to {result.high_rps:.3g}/s"
    if result.low_rps:
        return f"at least {result.low_rps:.3g}/s"
    return "unknown" if isinf(result.high_rps) else f"at most {result.high_rps:.3g}/s"


def render_search(report: SearchReport) -> RenderableType:
    """Return the result, and a table of the probes by rate."""
    goal, result = report.goal, report.result
    interval = describe_interval(result)
    rate = interval if result.rate_rps is None else f"{result.rate_rps:.3g}/s"
    outcome = Table(box=None, show_header=False, pad_edge=False)
    outcome.add_row("highest rate", f"{rate}, at which {goal.share:.0%} of requests meet their SLO")
    outcome.add_row(f"{goal.confidence:.0%} interval", interval)
    outcome.add_row("ended", result.stop.value)
    outcome.add_row("requests", f"{result.requests} in {len(report.probes)} probes")
    dispersion = number(result.dispersion, 1)
    outcome.add_row("dispersion", f"{dispersion} times that of independent requests")
    table = Table(box=None, pad_edge=False)
    for column in ("rate/s", "counted", "attainment", "verdict"):
        table.add_column(column, justify="right")
    for probed, _ in sorted(report.probes, key=lambda pair: pair[0].probe.rate_rps):
        cells = (str(len(probed.met)), percent(probed.share), probed.verdict.value)
        table.add_row(f"{probed.probe.rate_rps:.3g}", *cells)
    return Group(outcome, "", table)
