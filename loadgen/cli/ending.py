"""How commands end: what they print and write, and their exit status."""

from __future__ import annotations

import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.cli.flags import Output
from draftgate.loadgen.command_line import reason
from draftgate.loadgen.measuring.summary import invalid_reasons, summarize
from draftgate.loadgen.report.dialect import render_as
from draftgate.loadgen.report.runs import RunReport
from draftgate.loadgen.report.table import render, side_by_side
from draftgate.loadgen.types import LoadRun, Record

NOT_INTACT: Final = 1
REGRESSION: Final = 1
NO_USE: Final = 2
INVALID: Final = 3
REFUSED: Final = 4

REFUSALS: Final = frozenset({429, 503})
"""Statuses by which a server says that it takes no more now: an answer, and no broken stream."""


def exit_status(ran: LoadRun, check: LosslessCheck | None) -> int:
    """Return what a run's end says to a shell."""
    fine = {Verdict.OK.value, Verdict.INTERRUPTED.value}
    others = [record for record in ran.records if record.verdict not in fine]
    if not all(_is_refused(record) for record in others):
        return NOT_INTACT
    if check is not None and not check.passed:
        return NOT_INTACT
    if invalid_reasons(ran):
        return INVALID
    return REFUSED if others else 0


def worst(statuses: Iterable[int]) -> int:
    """Return what the ends of several runs say to a shell: that of the worst of them."""
    return max(statuses, key=(0, REFUSED, INVALID, NOT_INTACT).index, default=0)


def _is_refused(record: Record) -> bool:
    return record.verdict == Verdict.HTTP_STATUS.value and record.status in REFUSALS


def tell(reports: Sequence[RunReport], output: Output) -> None:
    """Print the tables of runs, and write their figures and their page where they are wanted."""
    console = Console()
    alone = reports[0] if len(reports) == 1 else None
    console.print(side_by_side(reports) if alone is None else render(alone.run, alone.lossless))
    if output.dialect is not None:
        for report in reports:
            console.print("" if alone else f"\n{report.name}", markup=False)
            console.print(render_as(report.run, output.dialect))
    if output.json_out is not None:
        summaries = [summarize(report.run, report.lossless) for report in reports]
        named = zip(reports, summaries, strict=True)
        runs = [{"name": report.name, "summary": summary} for report, summary in named]
        write_json(
            output.json_out,
            {"format": "reports/1", "runs": runs} if alone is None else summaries[0],
        )
    if output.html_out is not None:
        # plotly's bundle of 5 MB is read for this alone.
        from draftgate.loadgen.report.page import page

        output.html_out.write_text(page(reports), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value for people and programs."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def refuse(what: str, error: Exception) -> typer.Exit:
    """Say why a command cannot be carried out; raise what this returns."""
    typer.echo(f"{what}: {reason(error)}", err=True)
    return typer.Exit(NO_USE)
