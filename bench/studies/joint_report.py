"""The page of `draftgate bench joint`: what each way of deciding gave."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from draftgate.loadgen.report.formatting import percent
from draftgate.loadgen.report.html import html_table

HEAD: Final = (
    "cluster", "steps", "rate", "way", "goodput/s", "to joint", "95 %", "in time", "TTFT p50, ms",
    "TTFT p99", "TPOT p50", "TPOT p99", "latency, s", "cap",
)  # fmt: skip


def line(cell: dict[str, Any], name: str) -> list[str]:
    """Return a way's row of the table."""
    told = {figure: mean["mean"] for figure, mean in cell["ways"][name].items()}
    to_joint, ends = "-", "-"
    if name in cell["to_joint"]:
        difference = cell["to_joint"][name]["goodput_rps"]
        to_joint = f"{difference['relative']:+.2%}"
        if difference["interval"] is not None:
            half = (difference["interval"][1] - difference["interval"][0]) / 2.0
            ends = f"± {half / next(iter(cell['ways'].values()))['goodput_rps']['mean']:.2%}"
    times = ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")
    return [
        cell["cluster"],
        cell["steps"],
        f"{cell['rate_rps']:g}",
        name,
        f"{told['goodput_rps']:.2f}",
        to_joint,
        ends,
        percent(told["attainment"]),
        *(f"{told[figure] * 1e3:.4g}" for figure in times),
        f"{told['latency_mean_s']:.3f}",
        f"{told['planned_slots']:.1f}",
    ]


def body(title: str, results: dict[str, Any], words: str) -> Iterator[str]:
    """Yield the parts of the page."""
    yield f"<h1>{title}</h1>"
    yield f"<p>{results['command']}, {results['commit']}, {results['date']}</p>"
    rows = [line(cell, name) for cell in results["cells"] for name in cell["ways"]]
    yield html_table(list(HEAD), rows, words)
