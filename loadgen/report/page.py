"""Builds the HTML report of one run, or of several runs side by side.

The charts of one run have a curve per class. The charts of several runs have a curve per name, over
the rate if it varies. The details of each run are folded below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.metrics import METRICS, PERCENTILES, distribution, values_of
from draftgate.loadgen.measuring.slo import attainment, goodput_rps
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.measuring.summary import accepted_tokens_per_s, schedule_s
from draftgate.loadgen.report.charts import (
    Chart,
    ChartSeries,
    by_class,
    decision_charts,
    distribution_charts,
    rate_charts,
)
from draftgate.loadgen.report.formatting import metric_value, number, percent
from draftgate.loadgen.report.html import (
    html_chart,
    html_page,
    html_report_table,
    html_settings,
    html_table,
)
from draftgate.loadgen.report.runs import RunReport, points
from draftgate.loadgen.report.tables import (
    class_table,
    error_table,
    goodput_table,
    hop_tables,
    metric_table,
    run_table,
    speculation_table,
)
from draftgate.loadgen.report.time_charts import time_charts
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.types import LoadRun


def run_page(reports: Sequence[RunReport]) -> str:
    """Return the page of one or more runs."""
    settings = reports[0].run.settings
    if len(reports) == 1:
        title = f"Load of {settings.get('model', 'a model')} at {settings.get('url', '?')}"
    else:
        names = ", ".join(dict.fromkeys(report.name for report in reports))
        title = f"{len(reports)} runs of load: {names}"
    return html_page(title, _body(title, reports))


def charts(reports: Sequence[RunReport]) -> list[Chart]:
    """Return all charts that have data."""
    if len(reports) == 1:
        run = reports[0].run
        classes = by_class(run.records)
        return [
            *distribution_charts(classes, from_sending=True),
            *time_charts(run),
            *decision_charts(classes),
        ]
    known = points(reports)
    names = dict.fromkeys(report.name for report in reports)
    series = [
        ChartSeries(name, [r for point in known if point.name == name for r in point.records])
        for name in names
    ]
    several = len({point.rate_rps for point in known}) > 1
    drawn = rate_charts(known) if several else distribution_charts(series)
    return [*drawn, *decision_charts(series)]


def _body(title: str, reports: Sequence[RunReport]) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    alone = reports[0] if len(reports) == 1 else None
    if alone is not None:
        yield from _overview(alone.run)
    else:
        known = points(reports)
        yield html_report_table(run_table(known), kind="dense")
        if (goodputs := goodput_table(known)).rows:
            yield "<h2>Goodput</h2>" + html_report_table(goodputs)
    if drawn := charts(reports):
        yield "<h2>Plots</h2>"
        yield f'<div class="charts">{"".join(map(html_chart, drawn))}</div>'
    if alone is not None:
        yield from _details(alone)
        return
    yield "<h2>Each run</h2>"
    for place, report in enumerate(reports, 1):
        yield f"<details><summary>{escape(_summary(place, report))}</summary>"
        yield from _overview(report.run)
        yield from _details(report)
        yield "</details>"


def _summary(place: int, report: RunReport) -> str:
    parts = [f"{place}. {report.name}"]
    if (rate := report.run.settings.get("rate_rps")) is not None:
        parts.append(f"{rate:g} requests/s")
    parts.append(f"attainment {percent(attainment(report.run.records).share)}")
    if invalid_reasons(report.run):
        parts.append("INVALID")
    return ", ".join(parts)


def _overview(run: LoadRun) -> Iterator[str]:
    """Yield the date, the validity and the main results of a run."""
    yield f'<p class="quiet">{escape(str(run.settings.get("started", "")))}</p>'
    if reasons := invalid_reasons(run):
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        warning = "Do not use these results:"
        yield f'<div class="invalid"><strong>INVALID</strong> {warning}<ul>{listed}</ul></div>'
    counted = attainment(run.records)
    low, high = counted.interval
    tiles = [
        ("goodput, requests/s", number(goodput_rps(counted.met, schedule_s(run)))),
        (f"attainment (95 %: {low:.1%} to {high:.1%})", percent(counted.share)),
        ("accepted tokens/s", number(accepted_tokens_per_s(run), 1)),
        ("failed", f"{counted.requests - counted.intact} of {counted.requests}"),
    ]
    for metric in (METRICS["ttft_s"], METRICS["tpot_s"]):
        found = distribution(values_of(metric, run.records))
        if found is not None:
            shown = dict(zip(PERCENTILES, found.percentiles, strict=True))
            median = metric_value(metric, shown[50])
            tiles.append((f"{metric.title} p99 (p50: {median})", metric_value(metric, shown[99])))
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles
    )
    yield f'<div class="tiles">{cells}</div>'


def _details(report: RunReport) -> Iterator[str]:
    run = report.run
    yield "<h2>Metrics</h2>" + html_report_table(metric_table(run))
    yield "<h2>Classes</h2>" + html_report_table(class_table(run))
    if hops := list(hop_tables(run.records)):
        yield "<h2>Hops</h2>" + "".join(map(html_report_table, hops))
    if (failed := error_table(run.records)).rows:
        yield "<h2>Failed</h2>" + html_report_table(failed, kind="failed")
    if (totals := total_speculation(run.records)) is not None:
        yield "<h2>Speculation</h2>" + html_report_table(speculation_table(totals))
    if report.lossless is not None:
        yield "<h2>Lossless</h2>" + _lossless(report.lossless)
    yield "<h2>The run</h2>" + _settings(run)


def _lossless(check: LosslessCheck) -> str:
    text = (
        f"{'passed' if check.passed else 'FAILED'}: {check.compared} responses replayed without"
        f" speculation, {check.drafted} with drafts, {len(check.differences)} different,"
        f" {len(check.failed)} replays failed, {check.incomparable} in another numerics class."
    )
    if check.rate_bound is not None:
        text += f" At most {check.rate_bound:.1%} of responses differ, with 95 % confidence."
    rows = [[str(d.index), str(d.at), d.run, d.replay] for d in check.differences]
    rows += [[str(index), "", "", words] for index, words in check.failed]
    head = ["request", "from character", "in the run", "in the replay"]
    table = html_table(head, rows, words=(2, 3), kind="failed") if rows else ""
    kind = "" if check.passed else ' class="failed"'
    return f"<p{kind}>{escape(text)}</p>{table}"


def _settings(run: LoadRun) -> str:
    rows = [["duration, s", number(run.duration_s)]]
    rows.append(["schedule, s", number(run.scheduled_duration_s)])
    if run.health is not None:
        health = run.health
        lags = f"p99 {health.p99_lag_s * 1e3:.2f} ms, at most {health.max_lag_s * 1e3:.2f} ms"
        rows.append(["generator's lag", lags])
        rows.append(["generator's CPU", f"{health.cpu_share:.0%} of a core"])
        rows.append(["generator's longest stall", f"{health.loop_stall_s * 1e3:.2f} ms"])
    return html_settings(run.settings, rows)
