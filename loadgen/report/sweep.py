"""What a sweep leaves: its tables, its page, `sweep/1`."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from rich.console import Console

from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.report.runs import points
from draftgate.loadgen.report.table import side_by_side
from draftgate.loadgen.sweep.goodput import readings
from draftgate.loadgen.sweep.run import Done, Sweep, told


def finish(sweep: Sweep, done: Done, html_out: Path | None) -> dict[str, Any]:
    """Print the tables of a sweep's cells, write its page if wanted, and return its `sweep/1`."""
    in_order = sorted(done, key=lambda one: (one[1].name, one[0].rate_rps, one[0].round))
    reports = [report for _, report in in_order]
    Console().print(side_by_side(reports))
    if html_out is not None and reports:
        # plotly's bundle of 5 MB is read for this alone.
        from draftgate.loadgen.report.page import page

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
