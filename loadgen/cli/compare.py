"""`compare`: two runs against each other, with an exit status for CI."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from draftgate.loadgen.cli.ending import INVALID, REGRESSION, refuse, write_json
from draftgate.loadgen.cli.flags import JsonOut
from draftgate.loadgen.events import read_events


def compare(
    a: Annotated[Path, typer.Argument(help="Events of the run before (`--events`).")],
    b: Annotated[Path, typer.Argument(help="Events of the run after.")],
    threshold: Annotated[
        list[str] | None,
        typer.Option(
            help="Judge only this, and let it get so much worse: FIGURE[:STATISTIC]:MOST,"
            " e.g. ttft_s:p90:5% or attainment:0.02 (repeatable)."
        ),
    ] = None,
    json_out: JsonOut = None,
) -> None:
    """Compare run B with run A: what changed, with bootstrap intervals.

    Exit status: 0; 1 if a figure is surely worse (all of them are judged together, or those with a
    `--threshold`, beyond it); 2 if the runs cannot be compared; 3 if one of them is INVALID.
    """
    from draftgate.loadgen.compare.comparison import compare as compare_runs
    from draftgate.loadgen.compare.limits import parse_limit
    from draftgate.loadgen.compare.results import as_compare
    from draftgate.loadgen.report.comparison import render

    try:
        limits = [parse_limit(text) for text in threshold or ()]
        found = compare_runs(read_events(a)[0], read_events(b)[0], limits)
        Console().print(render(found))
        if json_out is not None:
            write_json(json_out, as_compare(found))
    except (OSError, ValueError) as error:
        raise refuse("cannot compare", error) from None
    if found.invalid:
        raise typer.Exit(INVALID)
    raise typer.Exit(REGRESSION if found.regressed else 0)
