"""Results for people: a table on the terminal, a page with loadgen's plots."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from html import escape
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table

from draftgate.gateway.cli.simulate.experiment import Outcome, Results, Setup
from draftgate.gateway.cli.simulate.intervals import differences, estimate, known
from draftgate.gateway.cli.simulate.results import mean_summary, settings_of
from draftgate.loadgen.measuring.metrics import METRICS
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.report.charts import Chart, ChartSeries, distribution_chart
from draftgate.loadgen.report.formatting import number, percent
from draftgate.loadgen.report.html import (
    classes_part,
    decisions_part,
    figures_part,
    flattened,
    html_chart,
    html_page,
    html_table,
)
from draftgate.loadgen.report.time_charts import load_chart
from draftgate.loadgen.types import LoadRun

HEAD: Final = (
    "policy",
    "latency",
    "p99",
    "TTFT p99",
    "TPOT",
    "tokens/s",
    "promised",
    "vs first",
)

NOTES: Final = (
    "Means, unless said; times in ms; promised: share of requests that met their SLO."
    " Last column: paired difference of mean latency, with its 95 % interval."
)


def render(results: Results) -> RenderableType:
    """Return the table of all policies."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(HEAD):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    for row in _rows(results):
        table.add_row(*row)
    return Group(table, "", NOTES)


def _rows(results: Results) -> Iterator[list[str]]:
    first = results.outcomes[0]
    for outcome in results.outcomes:
        summary = mean_summary(outcome.summaries)
        times = [
            _ms(summary[name], value)
            for name, value in (
                ("latency_s", "mean"),
                ("latency_s", "p99"),
                ("ttft_s", "p99"),
                ("tpot_s", "mean"),
            )
        ]
        yield [
            outcome.policy,
            *times,
            number(summary["accepted_tokens_per_s"], 0),
            percent(summary["attainment"]),
            "" if outcome is first else _difference(outcome, first),
        ]


def _ms(distribution: dict[str, Any] | None, value: str) -> str:
    if distribution is None:
        return "-"
    shown = distribution[value] * 1e3
    return f"{shown:.4g}" if shown < 1e4 else f"{shown:.0f}"


def _difference(outcome: Outcome, first: Outcome) -> str:
    figure = "latency_s.mean"
    found = estimate(differences(outcome.samples[figure], first.samples[figure]))
    base = estimate(known(first.samples[figure]))
    if found is None or base is None or not base.mean:
        return "-"
    half = "" if found.half is None else f" ± {found.half / base.mean:.1%}"
    return f"{found.mean / base.mean:+.1%}{half}"


def page(setup: Setup, results: Results) -> str:
    """Return one HTML file: the policies side by side, then each by itself."""
    what = setup.load.workload or setup.load.trace or setup.load.prompt
    title = f"{what} on {setup.workers} x {setup.config.profile}, simulated"
    return html_page(title, _body(title, setup, results))


def _body(title: str, setup: Setup, results: Results) -> Iterator[str]:
    yield f"<h1>{escape(title)}</h1>"
    yield html_table(list(HEAD), list(_rows(results)), NOTES)
    drawn = list(_charts(results))
    yield f'<h2>Plots</h2><div class="charts">{"".join(map(html_chart, drawn))}</div>'
    for outcome in results.outcomes:
        if outcome.run is not None:
            yield f"<h2>{escape(outcome.policy)}</h2>" + _own(outcome.run)
    settings = [[name, str(value)] for name, value in flattened(settings_of(setup))]
    yield "<h2>The simulation</h2>" + html_table(["setting", "value"], settings, words=(1,))


def _charts(results: Results) -> Iterator[Chart]:
    """Yield distributions with a curve for each policy, then each policy's load."""
    runs = [(o.policy, o.run) for o in results.outcomes if o.run is not None and o.run.records]
    series = [ChartSeries(policy, run.records) for policy, run in runs]
    for key in ("latency_s", "ttft_s", "tpot_s", "chunk_gap_s"):
        chart = distribution_chart(METRICS[key], series)
        if chart.data:
            yield chart
    for policy, run in runs:
        chart = load_chart(run)
        yield replace(chart, title=f"{chart.title}, {policy}")


def _own(run: LoadRun) -> str:
    told = total_speculation(run.records)
    return figures_part(run) + classes_part(run) + ("" if told is None else decisions_part(told))
