"""How commands end: what they print and write, and their exit status."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any, Final

import typer
from rich.console import Console

from loadgen.audit import Verdict
from loadgen.report.table import render
from loadgen.summary import invalid_reasons, summarize
from loadgen.types import Record, Run
from loadgen.verify import LosslessCheck

NOT_INTACT: Final = 1
NO_USE: Final = 2
INVALID: Final = 3
REFUSED: Final = 4

REFUSALS: Final = frozenset({429, 503})
"""Statuses by which a server says that it takes no more now: an answer, and no broken stream."""


def exit_status(ran: Run, check: LosslessCheck | None) -> int:
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


def _is_refused(record: Record) -> bool:
    return record.verdict == Verdict.HTTP_STATUS.value and record.status in REFUSALS


def tell(
    ran: Run, check: LosslessCheck | None, json_out: Path | None, html_out: Path | None
) -> None:
    """Print the tables of a run, and write its figures and its page where they are wanted."""
    Console().print(render(ran, check))
    if json_out is not None:
        write_json(json_out, summarize(ran, check))
    if html_out is not None:
        # plotly's bundle of 5 MB is read for this alone.
        from loadgen.report.html import page

        html_out.write_text(page(ran, check), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value for people and programs."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def refuse(what: str, error: Exception) -> typer.Exit:
    """Say why a command cannot be carried out; raise what this returns."""
    Console(stderr=True).print(f"{what}: {type(error).__name__}: {error}", markup=False)
    return typer.Exit(NO_USE)
