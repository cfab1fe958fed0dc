"""Results of the comparison as Markdown tables, with a table for each case."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import groupby
from typing import Any, Final

from bench.tool_comparison.cases import CASES
from bench.tool_comparison.tools import Metrics

COLUMNS: Final = (
    ("TTFT", "ttft_p50_ms"),
    ("TPOT", "tpot_p50_ms"),
    ("ITL", "itl_p50_ms"),
    ("latency p99", "latency_p99_ms"),
    ("goodput/s", "goodput_rps"),
    ("from schedule p99", "scheduled_p99_ms"),
)


def table(rows: Sequence[dict[str, Any]]) -> str:
    """Return the tables, with the true values of Draftgate's run before the metrics of each tool.

    If the server stalls, the true values depend on when the tool sent, so each run has its own.
    """
    return "\n".join(_lines(rows))


def _lines(rows: Sequence[dict[str, Any]]) -> Iterator[str]:
    for name, group in groupby(rows, key=lambda row: row["case"]):
        measured = [row for row in group if "said" in row]
        yield f"\n**{CASES[name].description}**\n"
        yield "| | intact | " + " | ".join(title for title, _ in COLUMNS) + " |"
        yield "| --- |" + " ---: |" * (len(COLUMNS) + 1)
        for row in measured:
            if row is measured[0] or CASES[name].stall_s:
                yield _line(f"*truth ({row['tool']})*", row["truth"])
            yield _line(row["tool"], row["said"])


def _line(name: str, figures: Metrics) -> str:
    ok, failed = figures["ok"] or 0, figures["failed"] or 0
    cells = [_cell(figures.get(key)) for _, key in COLUMNS]
    return f"| {name} | {ok:g} of {ok + failed:g} | " + " | ".join(cells) + " |"


def _cell(value: float | None) -> str:
    if value is None:
        return "-"
    return f"{value:.0f}" if value >= 100 else f"{value:.1f}"
