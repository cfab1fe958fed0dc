"""What a search found, in words and as `search/1`. Pure."""

from __future__ import annotations

from math import isinf
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from draftgate.loadgen.report.formatting import number, percent
from draftgate.loadgen.search.runner import SearchReport
from draftgate.loadgen.search.types import Found, Measured

FORMAT: Final = "search/1"


def as_dict(report: SearchReport) -> dict[str, Any]:
    """Return the `search/1` of a search: what was found, and each probe with its `summary/1`.

    An end of the interval that nothing bounds is None.
    """
    aim, found = report.aim, report.found
    high = None if isinf(found.high_rps) else found.high_rps
    return {
        "format": FORMAT,
        "rate_rps": found.rate_rps,
        "interval": [found.low_rps or None, high],
        "confidence": aim.confidence,
        "share": aim.share,
        "precision": aim.precision,
        "stop": found.stop.name.lower(),
        "requests": found.requests,
        "dispersion": found.dispersion,
        "probes": [
            {
                "rate_rps": measured.probe.rate_rps,
                "seed": measured.probe.seed,
                "settle_s": measured.probe.settle_s,
                "sent": measured.sent,
                "counted": len(measured.met),
                "met": sum(measured.met),
                "verdict": measured.verdict.value,
                "invalid_reasons": list(measured.invalid),
                "summary": summary,
            }
            for measured, summary in report.probes
        ],
        "settings": report.settings,
    }


def probe_in_words(measured: Measured, found: Found) -> str:
    """Return a line about a probe, and what is known after it."""
    said = f"{measured.probe.rate_rps:.3g}/s: {percent(measured.share)} of {len(measured.met)}"
    why = f" ({measured.invalid[0]})" if measured.invalid else ""
    return f"{said}, {measured.verdict.value}{why}; now {interval_in_words(found)}"


def interval_in_words(found: Found) -> str:
    """Return the interval, or what bounds the rate."""
    if found.low_rps and not isinf(found.high_rps):
        return f"{found.low_rps:.3g} to {found.high_rps:.3g}/s"
    if found.low_rps:
        return f"at least {found.low_rps:.3g}/s"
    return "unknown" if isinf(found.high_rps) else f"at most {found.high_rps:.3g}/s"


def render(report: SearchReport) -> RenderableType:
    """Return what was found, and a table of the probes by rate."""
    aim, found = report.aim, report.found
    rate = interval_in_words(found) if found.rate_rps is None else f"{found.rate_rps:.3g}/s"
    told = Table(box=None, show_header=False, pad_edge=False)
    told.add_row("highest rate", f"{rate}, at which {aim.share:.0%} are as promised")
    told.add_row(f"{aim.confidence:.0%} interval", interval_in_words(found))
    told.add_row("ended", found.stop.value)
    effort = f"{found.requests} in {len(report.probes)} probes"
    told.add_row("requests", effort)
    told.add_row("dispersion", f"{number(found.dispersion, 1)} x that of independent requests")
    table = Table(box=None, pad_edge=False)
    for column in ("rate/s", "counted", "as promised", "verdict"):
        table.add_column(column, justify="right")
    for measured, _ in sorted(report.probes, key=lambda pair: pair[0].probe.rate_rps):
        rate_rps, counted = measured.probe.rate_rps, len(measured.met)
        table.add_row(
            f"{rate_rps:.3g}", str(counted), percent(measured.share), measured.verdict.value
        )
    return Group(told, "", table)
