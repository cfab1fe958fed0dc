"""Reports a run by the metric names and definitions of other load generators.

Each tool has a module that turns the records of a run into a `ToolReport`. The definitions follow
the sources of the named versions, and were checked against the tools' output for a server of known
behaviour (docs/guide/load-testing.md). Reports reproduce the tools' definitions without
corrections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from enum import StrEnum
from typing import Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftgate.loadgen.other_tools import aiperf, guidellm, vllm
from draftgate.loadgen.other_tools.base import ToolReport
from draftgate.loadgen.report.formatting import NOTHING, number
from draftgate.loadgen.types import LoadRun


class OtherTool(StrEnum):
    """The tools that `--as` accepts."""

    VLLM = "vllm"
    GUIDELLM = "guidellm"
    AIPERF = "aiperf"


TOOLS: Final[Mapping[OtherTool, Callable[[LoadRun], ToolReport]]] = {
    OtherTool.VLLM: vllm.vllm_report,
    OtherTool.GUIDELLM: guidellm.guidellm_report,
    OtherTool.AIPERF: aiperf.aiperf_report,
}


def render_as(run: LoadRun, tool: OtherTool) -> RenderableType:
    """Return the tables of a run by the definitions of one of `TOOLS`."""
    report = TOOLS[tool](run)
    counts = Table(box=None, show_header=False, pad_edge=False)
    for one in report.counts:
        whole = one.value is not None and float(one.value).is_integer()
        formula = Text(one.formula, style="dim")
        counts.add_row(
            one.name, Text(number(one.value, 0 if whole else 2), justify="right"), formula
        )
    times = Table("ms", box=None, pad_edge=False)
    for column in report.columns:
        times.add_column(column, justify="right")
    times.add_column("formula", style="dim")
    for spread in report.distributions:
        values = spread.values or {}
        cells = (number(values[c]) if c in values else NOTHING for c in report.columns)
        times.add_row(spread.name, *cells, spread.formula)
    title = Text(f"the same run as {report.tool} defines its metrics", style="bold")
    remarks = (Text(f"note: {remark}", style="dim") for remark in report.remarks)
    return Group(title, counts, "", times, "", *remarks)
