"""The run in tables, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.hops import hops
from draftgate.loadgen.measuring.metrics import (
    METRICS,
    PERCENTILES,
    distribution,
    errors,
    values_of,
)
from draftgate.loadgen.measuring.slo import Attainment, attainment, attainment_by_class, goodput_rps
from draftgate.loadgen.measuring.speculation import SpeculationTotals, total_speculation
from draftgate.loadgen.measuring.summary import accepted_tokens_per_s, invalid_reasons, schedule_s
from draftgate.loadgen.report.formatting import (
    HOP_COLUMNS,
    HOP_FIGURE_COLUMNS,
    hop_figure_rows,
    hop_row,
    number,
    percent,
    share_of,
    value_of,
)
from draftgate.loadgen.report.goodput import HEAD as GOODPUTS
from draftgate.loadgen.report.goodput import NOTES as GOODPUT_NOTES
from draftgate.loadgen.report.goodput import goodput_rows
from draftgate.loadgen.report.runs import HEAD, NARROW, TIMES_IN_MS, RunReport, points, row
from draftgate.loadgen.types import ClientHealth, LoadRun


def render(run: LoadRun, lossless: LosslessCheck | None = None) -> RenderableType:
    """Return the tables of a run: what came of it, its figures, and what failed."""
    parts: list[RenderableType] = []
    if reasons := invalid_reasons(run):
        text = "\n".join(["Believe none of these figures:", *reasons])
        parts.append(Panel(Text(text), title="INVALID", style="bold red"))
    parts += [_outcome(run), _classes(run), *_hops(run), _figures(run), *_errors(run)]
    if (told := total_speculation(run.records)) is not None:
        parts.append(_decisions(told))
    if lossless is not None:
        parts.append(lossless_in_words(lossless))
    return Group(*(line for part in parts for line in (part, "")))


def side_by_side(reports: Sequence[RunReport]) -> RenderableType:
    """Return a table of several runs, a line for each name and rate, and of their goodputs."""
    table = _plain(*(HEAD[place] for place in NARROW))
    known = points(reports)
    for point in known:
        cells = list(row(point))
        shown = (cells[place] for place in NARROW)
        table.add_row(*shown, style="" if point.valid else "red")
    parts: list[RenderableType] = [table, "", TIMES_IN_MS]
    if rows := list(goodput_rows(known)):
        goodputs = _plain(*GOODPUTS)
        for cells in rows:
            goodputs.add_row(*cells)
        parts += ["", goodputs, "", GOODPUT_NOTES]
    return Group(*parts)


def _plain(*columns: str, title: str | None = None) -> Table:
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False)
    for place, column in enumerate(columns):
        table.add_column(column, justify="left" if place == 0 else "right")
    return table


def _outcome(run: LoadRun) -> RenderableType:
    counted = attainment(run.records)
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_row("completed", f"{counted.intact} of {counted.requests} in {run.duration_s:.2f} s")
    table.add_row("goodput", f"{number(goodput_rps(counted.met, schedule_s(run)))} requests/s")
    table.add_row("as promised", share_of(counted))
    table.add_row("accepted tokens", f"{number(accepted_tokens_per_s(run), 1)} tokens/s")
    if run.health is not None:
        table.add_row("generator", _kept_up(run.health))
        for place, health in enumerate(run.health.processes, 1):
            table.add_row(f"  process {place}", "died" if health is None else _kept_up(health))
    return table


def _kept_up(health: ClientHealth) -> str:
    return f"lag p99 {health.p99_lag_s * 1e3:.1f} ms, {health.cpu_share:.0%} of a core"


def _classes(run: LoadRun) -> RenderableType:
    columns = ("class", "requests", "intact", "TTFT met", "TPOT met", "in time")
    table = _plain(*columns, "as promised [95 %]", "goodput/s")
    for counted in attainment_by_class(run.records):
        table.add_row(*_class_row(counted, schedule_s(run)))
    return table


def _class_row(counted: Attainment, seconds: float) -> Iterator[str]:
    yield counted.class_name
    met = (counted.ttft_met, counted.tpot_met, counted.latency_met)
    yield from map(str, (counted.requests, counted.intact, *met))
    yield share_of(counted)
    yield number(goodput_rps(counted.met, seconds))


def _hops(run: LoadRun) -> Iterator[RenderableType]:
    taken = hops(run.records)
    if not taken:
        return
    counts, figures = _plain(*HOP_COLUMNS), _plain(*HOP_FIGURE_COLUMNS)
    for hop in taken:
        counts.add_row(*hop_row(hop))
        for figure_row in hop_figure_rows(hop):
            figures.add_row(*figure_row)
    yield from (counts, figures)


def _figures(run: LoadRun) -> RenderableType:
    table = _plain("figure", "mean", *(f"p{p}" for p in PERCENTILES))
    table.add_column("formula", style="dim")
    for figure in METRICS.values():
        found = distribution(values_of(figure, run.records))
        if found is not None:
            values = (found.mean, *found.percentiles)
            shown = [value_of(figure, value) for value in values]
            table.add_row(figure.title, *shown, figure.formula)
    return table


def _errors(run: LoadRun) -> Iterator[RenderableType]:
    failed = errors(run.records)
    if failed:
        table = _plain("failed", "requests")
        table.add_column("for example")
        for cause, count in failed.items():
            example = next(r.detail for r in run.records if r.verdict == cause)
            table.add_row(cause, str(count), Text(example), style="red")
        yield table


def _decisions(told: SpeculationTotals) -> RenderableType:
    table = Table(box=None, show_header=False, pad_edge=False)
    counters = (
        ("speculation mode", told.modes),
        ("proposer", told.proposers),
        ("policy", told.policies),
        ("most draft tokens", told.max_draft_tokens),
        ("worker", told.workers),
    )
    for name, counter in counters:
        if counter:
            chosen = ", ".join(f"{value} x {n}" for value, n in counter.most_common(8))
            table.add_row(name, Text(chosen))
    accepted = f"{told.drafted} / {told.accepted} ({percent(told.acceptance)})"
    table.add_row("drafted / accepted", accepted)
    table.add_row("accepted per step", number(told.accepted_per_step))
    table.add_row("mean price of a slot", number(told.mean_price, 3))
    return table


def lossless_in_words(check: LosslessCheck) -> RenderableType:
    """Return what replaying without speculation showed."""
    compared = f"lossless: {check.compared} answers compared ({check.drafted} with drafts)"
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
