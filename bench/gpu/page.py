"""The page of a first run: the state of each stage, tables of its rows, and a roofline."""

from __future__ import annotations

import json
import sys
from collections.abc import Iterable, Iterator
from html import escape
from math import log10
from pathlib import Path
from typing import Any, Final

from bench.gpu.first_run import STAGES
from draftgate.loadgen.report.html import html_page, html_table

WIDTH: Final = 760
HEIGHT: Final = 360
MARGIN: Final = 60
"""Size and margin of the roofline, in pixels."""

Row = dict[str, Any]


def write_page(out: Path) -> None:
    """Write `index.html` from the results in a folder."""
    results = {stage.name: _read(out / f"{stage.name}.json") for stage in STAGES}
    body = list(page_body(results))
    page = html_page("First run on a GPU", body, charts=False)
    (out / "index.html").write_text(page, encoding="utf-8")


def page_body(results: dict[str, Row]) -> Iterator[str]:
    """Yield the elements of the page.

    Args:
        results: JSON by stage, empty for a stage that has not run.
    """
    device = results["environment"].get("device", "unknown device")
    yield f"<h1>First run on a GPU</h1><p class='quiet'>{escape(str(device))}</p>"
    yield html_table(
        ["stage", "purpose", "result", "seconds", "reason"],
        [
            [
                stage.name,
                stage.purpose,
                str(results[stage.name].get("status", "not run")),
                str(results[stage.name].get("seconds", "")),
                str(results[stage.name].get("reason", "")),
            ]
            for stage in STAGES
        ],
        words=(1, 4),
    )
    models = [stage.name for stage in STAGES if stage.name.startswith("steps-")]
    steps = [row for name in models for row in results[name].get("steps", [])]
    rates = results["rates"].get("rates")
    if steps and rates:
        yield "<h2>Roofline</h2>"
        yield roofline(steps, rates)
    for stage in STAGES:
        tables = list(_tables(results[stage.name]))
        if tables:
            yield f"<h2>{escape(stage.name)}</h2>"
            yield from tables
        if "log" in results[stage.name]:
            yield f"<h2>{escape(stage.name)}, end of the log</h2>"
            yield f"<pre>{escape(chr(10).join(results[stage.name]['log']))}</pre>"


def roofline(steps: Iterable[Row], rates: Row) -> str:
    """Return an SVG of the matrix rate that each step reaches over its operations per byte.

    The position follows from the shares of a row: with the time t of a step, it performs
    `share_of_matrix_rate` x t x rate operations, and reads `share_of_bandwidth` x t x bandwidth
    bytes.

    Args:
        rates: `bytes_per_s` and `flops_per_s` of the device.
    """
    ridge = rates["flops_per_s"] / rates["bytes_per_s"]
    points = [
        (ridge * row["share_of_matrix_rate"] / row["share_of_bandwidth"], row)
        for row in steps
        if row.get("share_of_bandwidth") and row.get("share_of_matrix_rate")
    ]
    high = max([ridge * 10, *(intensity for intensity, _ in points)])
    low = min([ridge / 100, *(intensity for intensity, _ in points)])
    floor = min([1e-3, *(row["share_of_matrix_rate"] for _, row in points)])

    def place(intensity: float, share: float) -> str:
        x = MARGIN + (WIDTH - 2 * MARGIN) * log10(intensity / low) / log10(high / low)
        y = MARGIN + (HEIGHT - 2 * MARGIN) * log10(share) / log10(floor)
        return f"{x:.1f},{y:.1f}"

    # The roof leaves the drawing below if a step is slower than all others by far.
    start = max(low, ridge * floor)
    roof = " ".join((place(start, start / ridge), place(ridge, 1.0), place(high, 1.0)))
    marks = "".join(
        f'<circle cx="{xy.split(",")[0]}" cy="{xy.split(",")[1]}" r="4" fill="#0072B2">'
        f"<title>{escape(_label(row))}</title></circle>"
        for intensity, row in points
        for xy in [place(intensity, row["share_of_matrix_rate"])]
    )
    caption = (
        f"{1e-12 * rates['flops_per_s']:.1f} TFLOP/s and {1e-9 * rates['bytes_per_s']:.0f} GB/s; "
        f"the roof bends at {ridge:.0f} operations per byte"
    )
    return (
        f'<figure class="wide"><figcaption>Share of the matrix rate over operations per byte'
        f"<span>{escape(caption)}. Both axes are logarithmic.</span></figcaption>"
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="roofline">'
        f'<polyline points="{roof}" fill="none" stroke="#E69F00" stroke-width="2"/>{marks}'
        f'<text x="{MARGIN}" y="{HEIGHT - 20}" fill="currentColor">{low:.3g}</text>'
        f'<text x="{WIDTH - MARGIN}" y="{HEIGHT - 20}" fill="currentColor" text-anchor="end">'
        f"{high:.3g} operations per byte</text>"
        f'<text x="{MARGIN - 8}" y="{MARGIN}" fill="currentColor" text-anchor="end">1</text>'
        f'<text x="{MARGIN - 8}" y="{HEIGHT - MARGIN}" fill="currentColor" text-anchor="end">'
        f"{floor:.2g}</text></svg></figure>"
    )


def _label(row: Row) -> str:
    return (
        f"{row['name']}, {row['batch']} x {row['tokens']} tokens after {row['context_tokens']}: "
        f"{row['ms']} ms, {row['over_roofline']} x the roofline"
    )


def _tables(result: Row) -> Iterator[str]:
    """Yield a table for each list of rows of a result."""
    for name, rows in result.items():
        if isinstance(rows, list) and rows and all(isinstance(row, dict) for row in rows):
            heads = list(dict.fromkeys(key for row in rows for key in row if key != "output"))
            cells = [[_cell(row.get(head)) for head in heads] for row in rows]
            yield html_table(heads, cells, name, kind="dense")


def _cell(value: Any) -> str:
    return "" if value is None else str(value)


def _read(path: Path) -> Row:
    try:
        result: Row = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return {}
    return result


if __name__ == "__main__":
    write_page(Path(sys.argv[1]))
