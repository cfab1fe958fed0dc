"""Reports for a terminal, readable at 80 columns."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.slo import attainment, goodput_rps
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.measuring.summary import accepted_tokens_per_s, schedule_s
from draftgate.loadgen.report.formatting import attainment_interval, number
from draftgate.loadgen.report.runs import RunReport, points
from draftgate.loadgen.report.tables import (
    NARROW,
    ReportTable,
    class_table,
    error_table,
    goodput_table,
    hop_tables,
    metric_table,
    run_table,
    speculation_table,
)
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.types import ClientHealth, LoadRun


def render_run(run: LoadRun, lossless: LosslessCheck | None = None) -> RenderableType:
    """Return the tables of a run: its outcome, its metrics and its failures."""
    metrics = metric_table(run)
    formulas = "; ".join(f"{row[0]}: {row[-1]}" for row in metrics.rows)
    parts: list[RenderableType] = [
        *invalid_panel(invalid_reasons(run)),
        _outcome(run),
        rich_table(class_table(run)),
        *map(rich_table, hop_tables(run.records)),
        rich_table(metrics, range(len(metrics.head) - 2)),
        Text(formulas, style="dim"),
    ]
    if (failed := error_table(run.records)).rows:
        parts.append(rich_table(failed, style="red"))
    if (totals := total_speculation(run.records)) is not None:
        parts.append(rich_table(speculation_table(totals)))
    if lossless is not None:
        parts.append(describe_lossless(lossless))
    return Group(*(line for part in parts for line in (part, "")))


def render_side_by_side(reports: Sequence[RunReport]) -> RenderableType:
    """Return a table of several runs, a row for each name and rate, and their goodputs."""
    known = points(reports)
    runs, goodputs = run_table(known), goodput_table(known)
    styles = ["" if point.valid else "red" for point in known]
    parts: list[RenderableType] = [rich_table(runs, NARROW, styles=styles), "", runs.notes]
    if goodputs.rows:
        parts += ["", rich_table(goodputs), "", goodputs.notes]
    return Group(*parts)


def rich_table(
    table: ReportTable,
    columns: Sequence[int] | None = None,
    *,
    style: str = "",
    styles: Sequence[str] = (),
) -> Table:
    """Return some columns of a table, by default all. `styles` has one style per row."""
    shown = range(len(table.head)) if columns is None else columns
    # A table with many columns has one space between them instead of two.
    rich = Table(box=None, pad_edge=False, padding=(0, 1 if len(shown) > 6 else 2, 0, 0))
    for column in shown:
        left = column == 0 or column in table.words
        rich.add_column(table.head[column], justify="left" if left else "right", overflow="fold")
    for place, row in enumerate(table.rows):
        row_style = styles[place] if styles else style
        rich.add_row(*(Text(row[column]) for column in shown), style=row_style)
    return rich


def invalid_panel(reasons: Sequence[str]) -> Iterator[Panel]:
    """Yield a warning with the reasons why a run is INVALID, or nothing for a valid run."""
    if reasons:
        text = "\n".join(["Do not use these results:", *reasons])
        yield Panel(Text(text), title="INVALID", style="bold red")


def _outcome(run: LoadRun) -> Table:
    counted = attainment(run.records)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("completed", f"{counted.intact} of {counted.requests} in {run.duration_s:.2f} s")
    table.add_row("goodput", f"{number(goodput_rps(counted.met, schedule_s(run)))} requests/s")
    table.add_row("attainment", attainment_interval(counted))
    table.add_row("accepted tokens", f"{number(accepted_tokens_per_s(run), 1)} tokens/s")
    if run.health is not None:
        table.add_row("generator", _describe_health(run.health))
        for place, health in enumerate(run.health.processes, 1):
            described = "died" if health is None else _describe_health(health)
            table.add_row(f"  process {place}", described)
    return table


def _describe_health(health: ClientHealth) -> str:
    return f"lag p99 {health.p99_lag_s * 1e3:.1f} ms, {health.cpu_share:.0%} of a core"


def describe_lossless(check: LosslessCheck) -> Text:
    """Return the result of the lossless check in words."""
    compared = f"lossless: {check.compared} responses compared ({check.drafted} with drafts)"
    if check.passed:
        bound = check.rate_bound
        sure = "" if bound is None else f"; at most {bound:.1%} differ, with 95 % confidence"
        return Text(f"{compared}, all equal{sure}")
    lines = [f"{compared}, {len(check.differences)} differ, {len(check.failed)} replays failed"]
    if check.incomparable:
        lines.append(f"{check.incomparable} replays were of another numerics class")
    for difference in check.differences[:3]:
        lines.append(f"request {difference.index}, from character {difference.at}:")
        lines += [f"  run     {difference.run!r}", f"  replay  {difference.replay!r}"]
    lines += [f"request {index}: {words}" for index, words in check.failed[:3]]
    return Text("\n".join(lines), style="red")
