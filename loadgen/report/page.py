"""The page of one run, or of several side by side.

Of one run, curves are its classes. Of several, they are what was under load, over the rate where
there is more than one; each run's own figures are folded below.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.hops import hops
from draftgate.loadgen.measuring.metrics import (
    METRICS,
    PERCENTILES,
    distribution,
    errors,
    values_of,
)
from draftgate.loadgen.measuring.slo import attainment, goodput_rps
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.measuring.summary import accepted_tokens_per_s, invalid_reasons, schedule_s
from draftgate.loadgen.report.charts import (
    Chart,
    ChartSeries,
    by_class,
    decision_charts,
    distribution_chart,
)
from draftgate.loadgen.report.formatting import number, percent, value_of
from draftgate.loadgen.report.goodput import HEAD as GOODPUTS
from draftgate.loadgen.report.goodput import NOTES as GOODPUT_NOTES
from draftgate.loadgen.report.goodput import goodput_rows
from draftgate.loadgen.report.html import (
    classes_part,
    decisions_part,
    figures_part,
    flattened,
    hops_part,
    html_chart,
    html_page,
    html_table,
)
from draftgate.loadgen.report.rate_charts import rate_charts
from draftgate.loadgen.report.runs import HEAD, TIMES_IN_MS, RunReport, points, row
from draftgate.loadgen.report.time_charts import time_charts
from draftgate.loadgen.types import LoadRun

FIGURES_DRAWN = ("ttft_s", "tpot_s", "latency_s", "chunk_gap_s")


def page(reports: Sequence[RunReport]) -> str:
    """Return the page of at least one run."""
    title = _title(reports)
    return html_page(title, _body(title, reports))


def charts(reports: Sequence[RunReport]) -> list[Chart]:
    """Return all plots for which there is data."""
    if len(reports) == 1:
        run = reports[0].run
        classes = by_class(run.records)
        return [*_distributions(classes, alone=True), *time_charts(run), *decision_charts(classes)]
    places = points(reports)
    names = dict.fromkeys(report.name for report in reports)
    series = [
        ChartSeries(name, [r for place in places if place.name == name for r in place.records])
        for name in names
    ]
    several = len({place.rate_rps for place in places}) > 1
    drawn = rate_charts(places) if several else _distributions(series)
    return [*drawn, *decision_charts(series)]


def _distributions(series: Sequence[ChartSeries], *, alone: bool = False) -> list[Chart]:
    made = [distribution_chart(METRICS[key], series, from_sending=alone) for key in FIGURES_DRAWN]
    return [chart for chart in made if chart.data]


def _title(reports: Sequence[RunReport]) -> str:
    settings = reports[0].run.settings
    if len(reports) == 1:
        return f"Load of {settings.get('model', 'a model')} at {settings.get('url', '?')}"
    return f"{len(reports)} runs of load: {', '.join(dict.fromkeys(r.name for r in reports))}"


def _body(title: str, reports: Sequence[RunReport]) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    alone = reports[0] if len(reports) == 1 else None
    if alone is not None:
        yield from _beginning(alone.run)
    else:
        known = points(reports)
        rows = [list(row(point)) for point in known]
        notes = f"{TIMES_IN_MS} Runs of one name and rate are pooled; accepted tokens/s: the mean."
        yield html_table(HEAD, rows, notes, kind="dense")
        if goodputs := list(goodput_rows(known)):
            yield "<h2>Goodput</h2>" + html_table(GOODPUTS, goodputs, GOODPUT_NOTES)
    if drawn := charts(reports):
        yield "<h2>Plots</h2>"
        yield f'<div class="charts">{"".join(map(html_chart, drawn))}</div>'
    if alone is not None:
        yield from _details(alone)
        return
    yield "<h2>Each run</h2>"
    for place, report in enumerate(reports, 1):
        yield f"<details><summary>{escape(_summary(place, report))}</summary>"
        yield from _beginning(report.run)
        yield from _details(report)
        yield "</details>"


def _summary(place: int, report: RunReport) -> str:
    counted = attainment(report.run.records)
    rate = report.run.settings.get("rate_rps")
    told = [f"{place}. {report.name}", "" if rate is None else f"{rate:g} requests/s"]
    told += [f"{percent(counted.share)} as promised"]
    told += ["INVALID"] if invalid_reasons(report.run) else []
    return ", ".join(filter(None, told))


def _beginning(run: LoadRun) -> Iterator[str]:
    """Yield when it was, whether it is to be believed, and its main figures."""
    yield f'<p class="quiet">{escape(str(run.settings.get("started", "")))}</p>'
    if reasons := invalid_reasons(run):
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        told = "Believe none of these figures:"
        yield f'<div class="invalid"><strong>INVALID</strong> {told}<ul>{listed}</ul></div>'
    yield _tiles(run)


def _details(report: RunReport) -> Iterator[str]:
    run = report.run
    yield "<h2>Figures</h2>" + figures_part(run)
    yield "<h2>Classes</h2>" + classes_part(run)
    if taken := hops(run.records):
        yield "<h2>Hops of a question</h2>" + hops_part(taken)
    if errors(run.records):
        yield "<h2>Failed</h2>" + _errors(run)
    if (told := total_speculation(run.records)) is not None:
        yield "<h2>Decisions of the server</h2>" + decisions_part(told)
    if report.lossless is not None:
        yield "<h2>Lossless?</h2>" + _lossless(report.lossless)
    yield "<h2>The run</h2>" + _settings(run)


def _tiles(run: LoadRun) -> str:
    counted = attainment(run.records)
    low, high = counted.interval
    tiles = [
        ("goodput, requests/s", number(goodput_rps(counted.met, schedule_s(run)))),
        (f"as promised (95 %: {low:.1%} to {high:.1%})", percent(counted.share)),
        ("accepted tokens/s", number(accepted_tokens_per_s(run), 1)),
        ("failed", f"{counted.requests - counted.intact} of {counted.requests}"),
    ]
    for figure in (METRICS["ttft_s"], METRICS["tpot_s"]):
        found = distribution(values_of(figure, run.records))
        if found is not None:
            shown = dict(zip(PERCENTILES, found.percentiles, strict=True))
            median = value_of(figure, shown[50])
            tiles.append((f"{figure.title} p99 (p50: {median})", value_of(figure, shown[99])))
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def _errors(run: LoadRun) -> str:
    rows = []
    for cause, count in errors(run.records).items():
        example = next(r.detail for r in run.records if r.verdict == cause)
        rows.append([cause, str(count), example])
    return html_table(["cause", "requests", "for example"], rows, words=(2,), kind="failed")


def _lossless(check: LosslessCheck) -> str:
    verdict = "passed" if check.passed else "FAILED"
    bound = (
        ""
        if check.rate_bound is None
        else (f" At most {check.rate_bound:.1%} of answers differ, with 95 % confidence.")
    )
    told = (
        f"{verdict}: {check.compared} answers asked again without speculation,"
        f" {check.drafted} of them with drafts; {len(check.differences)} differ,"
        f" {len(check.failed)} replays failed, {check.incomparable} of another numerics class."
    )
    rows = [[str(d.index), str(d.at), d.run, d.replay] for d in check.differences]
    rows += [[str(index), "", "", words] for index, words in check.failed]
    head = ["request", "from character", "in the run", "in the replay"]
    table = html_table(head, rows, words=(2, 3), kind="failed") if rows else ""
    kind = "" if check.passed else ' class="failed"'
    return f"<p{kind}>{escape(told + bound)}</p>{table}"


def _settings(run: LoadRun) -> str:
    rows = [[name, value] for name, value in flattened(run.settings) if value is not None]
    rows.append(["duration, s", number(run.duration_s)])
    rows.append(["schedule, s", number(run.scheduled_duration_s)])
    if run.health is not None:
        health = run.health
        lags = f"p99 {health.p99_lag_s * 1e3:.2f} ms, at most {health.max_lag_s * 1e3:.2f} ms"
        rows.append(["generator's lag behind schedule", lags])
        rows.append(["generator's CPU", f"{health.cpu_share:.0%} of a core"])
        rows.append(["generator's longest stall", f"{health.loop_stall_s * 1e3:.2f} ms"])
    return html_table(
        ["setting", "value"], [[name, str(value)] for name, value in rows], words=(1,)
    )
