"""How commands end: what they print and write, and their exit status."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Coroutine
from pathlib import Path
from typing import Any, Final, TypeVar

import typer
from rich.console import Console

from loadgen.audit import Verdict
from loadgen.cli.flags import Reports
from loadgen.report.dialect import render_as
from loadgen.report.table import render
from loadgen.summary import invalid_reasons, summarize
from loadgen.types import Run
from loadgen.verify import LosslessCheck

NOT_INTACT: Final = 1
NO_USE: Final = 2
INVALID: Final = 3

T = TypeVar("T")


def exit_status(ran: Run, check: LosslessCheck | None) -> int:
    """Return what a run's end says to a shell."""
    fine = {Verdict.OK.value, Verdict.INTERRUPTED.value}
    if any(record.verdict not in fine for record in ran.records):
        return NOT_INTACT
    if check is not None and not check.passed:
        return NOT_INTACT
    return INVALID if invalid_reasons(ran) else 0


def tell(ran: Run, check: LosslessCheck | None, reports: Reports) -> None:
    """Print the tables of a run, and write its figures and its page where they are wanted."""
    Console().print(render(ran, check))
    if reports.dialect is not None:
        Console().print(render_as(ran, reports.dialect))
    if reports.json_out is not None:
        write_json(reports.json_out, summarize(ran, check))
    if reports.html_out is not None:
        # plotly's bundle of 5 MB is read for this alone.
        from loadgen.report.html import page

        reports.html_out.write_text(page(ran, check), encoding="utf-8")


def write_json(path: Path, value: Any) -> None:
    """Write a value for people and programs."""
    path.write_text(json.dumps(value, indent=2) + "\n", encoding="utf-8")


def refuse(what: str, error: Exception) -> typer.Exit:
    """Say why a command cannot be carried out; raise what this returns."""
    Console(stderr=True).print(f"{what}: {type(error).__name__}: {error}", markup=False)
    return typer.Exit(NO_USE)


def in_loop(main: Coroutine[Any, Any, T]) -> T:
    """Run to the end, on uvloop where it is installed: it takes less of the one core."""
    runner: Callable[[Coroutine[Any, Any, T]], T] = asyncio.run
    try:
        import uvloop
    except ImportError:
        return runner(main)
    return uvloop.run(main)
