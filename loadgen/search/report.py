"""Reports the result of a search as text, as `search/1`, and as a page with a plot."""

from __future__ import annotations

from collections.abc import Iterator
from html import escape
from math import isinf
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from draftgate.loadgen.measuring.confidence import Interval, wilson
from draftgate.loadgen.report.charts import GREY, RATE_AXIS, Chart, colour, scatter
from draftgate.loadgen.report.formatting import number, percent
from draftgate.loadgen.report.html import html_chart, html_page, html_settings, html_table
from draftgate.loadgen.search.runner import SearchReport
from draftgate.loadgen.search.types import ProbeResult, ProbeVerdict, SearchResult, StopReason

_HEAD: Final = ("rate/s", "counted", "attainment", "95% interval", "verdict")


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
    for column in _HEAD:
        table.add_column(column, justify="right")
    for row in _rows(report):
        table.add_row(*row)
    return Group(outcome, "", table)


def search_page(report: SearchReport) -> str:
    """Return an HTML page with the answer, the attainment at each rate, and the probes."""
    title = f"Highest rate of {report.settings['url']}"
    return html_page(title, _body(title, report))


def answer(report: SearchReport) -> str:
    """Return the result in one sentence."""
    goal, result = report.goal, report.result
    share = f"{goal.share:.0%} of the requests meet their SLO"
    if result.rate_rps is not None:
        within = f"{goal.confidence:.0%} interval: {describe_interval(result)}"
        found = f"At up to {result.rate_rps:.3g} requests/s ({within}), {share}"
    elif result.low_rps:
        found = f"At {result.low_rps:.3g} requests/s and perhaps more, {share}"
    elif not isinf(result.high_rps):
        found = f"Fewer than {share} at {result.high_rps:.3g} requests/s and above"
    else:
        found = "No probe has measured the server"
    return found + ("." if result.stop is StopReason.PRECISE else f" ({result.stop.value}).")


def _rows(report: SearchReport) -> list[list[str]]:
    """Return the probes by rate."""
    rows = []
    for probed in _by_rate(report):
        low, high = attainment_interval(probed, report.result.dispersion)
        cells = [f"{probed.probe.rate_rps:.3g}", str(len(probed.met)), percent(probed.share)]
        rows.append([*cells, f"{low:.1%} to {high:.1%}", probed.verdict.value])
    return rows


def _by_rate(report: SearchReport) -> list[ProbeResult]:
    return sorted((probed for probed, _ in report.probes), key=lambda one: one.probe.rate_rps)


def attainment_interval(probed: ProbeResult, dispersion: float) -> Interval:
    """Return the 95% Wilson interval of a probe's share, for correlated requests.

    The requests count as independent requests, of which there are fewer by the dispersion.
    """
    trials = round(len(probed.met) / dispersion)
    return wilson(round((probed.share or 0.0) * trials), trials)


def _body(title: str, report: SearchReport) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1><p><strong>{escape(answer(report))}</strong></p>"
    chart = attainment_chart(report)
    if chart.data:
        yield f'<div class="charts">{html_chart(chart)}</div>'
    yield "<h2>Probes</h2>" + html_table(_HEAD, _rows(report), words=(4,))
    goal, result = report.goal, report.result
    facts = {
        "share": goal.share,
        "precision": goal.precision,
        "requests of all probes": result.requests,
        "dispersion": number(result.dispersion, 1),
        "ended": result.stop.value,
    }
    yield "<h2>The search</h2>" + html_settings(facts | report.settings)


def attainment_chart(report: SearchReport) -> Chart:
    """Return the share of each probe over its rate, and the interval of the highest rate."""
    goal, result, data = report.goal, report.result, []
    for place, verdict in enumerate(ProbeVerdict):
        probes = [one for one in _by_rate(report) if one.verdict is verdict and one.met]
        shares = [one.share or 0.0 for one in probes]
        ends = [attainment_interval(one, result.dispersion) for one in probes]
        bars = {
            "type": "data",
            "symmetric": False,
            "array": [end.high - share for end, share in zip(ends, shares, strict=True)],
            "arrayminus": [share - end.low for end, share in zip(ends, shares, strict=True)],
        }
        rates = [one.probe.rate_rps for one in probes]
        marker = {"color": colour(place), "size": 8}
        if probes:
            trace = scatter(rates, shares, verdict.value, "markers", marker=marker)
            data.append(trace | {"error_y": bars | {"thickness": 1, "width": 3}})
    level = {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": goal.share, "y1": goal.share}
    shapes = [level | {"line": {"width": 1, "dash": "dot", "color": GREY}}]
    if result.low_rps and not isinf(result.high_rps):
        band = {"type": "rect", "yref": "paper", "y0": 0, "y1": 1, "line": {"width": 0}}
        ends_of_band = {"x0": result.low_rps, "x1": result.high_rps}
        shapes.append(band | ends_of_band | {"fillcolor": GREY, "opacity": 0.3})
    layout = {
        "xaxis": RATE_AXIS,
        "yaxis": {"title": {"text": "attainment"}, "tickformat": ".0%", "range": [0, 1.03]},
        "shapes": shapes,
    }
    caption = (
        "share of counted requests that met their SLO, with 95% intervals, by the verdict of the"
        f" probe; line at {goal.share:.0%}, band: interval of the highest rate"
    )
    return Chart("Attainment against rate", caption, data, layout, wide=True)
