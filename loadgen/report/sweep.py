"""A sweep in figures: `sweep/1`, and a table of goodputs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rich.console import Console, Group, RenderableType
from rich.table import Table

from loadgen.report.runs import Report, points
from loadgen.report.table import side_by_side
from loadgen.report.words import NOTHING, number
from loadgen.summary import summarize
from loadgen.sweep.goodput import Reading, readings
from loadgen.sweep.run import Done, Sweep, told

HEAD = ("goodput, requests/s", "share", "read off", "surely between")
NOTES = (
    "Read off: interpolated between the last rate that holds and the next. Surely between: the"
    " highest rate that holds and the lowest that does not, with 95 % confidence each."
)


def finish(sweep: Sweep, done: Done, html_out: Path | None) -> dict[str, Any]:
    """Print the tables of a sweep's cells, write its page if wanted, and return its `sweep/1`."""
    in_order = sorted(done, key=lambda one: (one[1].name, one[0].rate_rps, one[0].round))
    reports = [report for _, report in in_order]
    Console().print(render(reports))
    if html_out is not None:
        # plotly's bundle of 5 MB is read for this alone.
        from loadgen.report.page import page

        html_out.write_text(page(reports), encoding="utf-8")
    return as_sweep(sweep, done)


def as_sweep(sweep: Sweep, done: Done) -> dict[str, Any]:
    """Return the `sweep/1` of the cells that are done, in the order they were run."""
    cells = [
        {
            "name": cell.contender.name,
            "rate_rps": cell.rate_rps,
            "round": cell.round,
            "summary": summarize(report.run),
        }
        for cell, report in done
    ]
    return {
        "format": "sweep/1",
        "cells_planned": len(sweep.cells),
        "load": told(sweep.load) | {"rate_rps": None},
        "warm_up_requests": sweep.warm_up,
        "cells": cells,
        "goodput": [r.as_dict() for r in readings(points([report for _, report in done]))],
    }


def render(reports: Sequence[Report]) -> RenderableType:
    """Return the table of all cells, rounds pooled, and that of the goodputs."""
    table = Table(box=None, pad_edge=False)
    for place, name in enumerate(HEAD):
        table.add_column(name, justify="left" if place == 0 else "right", no_wrap=True)
    for reading in readings(points(reports)):
        table.add_row(*goodput_row(reading))
    return Group(side_by_side(reports), "", table, "", NOTES)


def goodput_row(reading: Reading) -> list[str]:
    """Return the words of a reading under `HEAD`."""
    if reading.rate_rps is not None:
        read = number(reading.rate_rps)
    elif reading.holds_rps is None:
        read = "below all rates"
    else:
        read = f"at least {number(reading.holds_rps)}"
    ends = [NOTHING if end is None else number(end) for end in (reading.low_rps, reading.high_rps)]
    return [reading.name, f"{reading.share:.0%}", read, " and ".join(ends)]
