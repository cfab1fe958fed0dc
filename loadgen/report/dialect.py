"""A run as another tool would report it, for a terminal."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftgate.loadgen.other_tools import DIALECTS
from draftgate.loadgen.other_tools.base import Account
from draftgate.loadgen.report.formatting import NOTHING, number
from draftgate.loadgen.types import LoadRun


def render_as(run: LoadRun, name: str) -> RenderableType:
    """Return the tables of a run in a tool's words and by its definitions.

    Args:
        name: a key of `DIALECTS`.
    """
    said = DIALECTS[name](run)
    title = Text(f"the same run as {said.tool} defines its figures", style="bold")
    remarks = (Text(f"note: {remark}", style="dim") for remark in said.remarks)
    return Group(title, _counts(said), "", _spreads(said), "", *remarks)


def _counts(said: Account) -> Table:
    table = Table(box=None, show_header=False, pad_edge=False)
    table.add_column()
    table.add_column(justify="right")
    table.add_column(style="dim")
    for one in said.counts:
        table.add_row(one.name, _count(one.value), one.formula)
    return table


def _count(value: float | None) -> str:
    return number(value, 0 if value is not None and float(value).is_integer() else 2)


def _spreads(said: Account) -> Table:
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(("ms", *said.columns)):
        table.add_column(column, justify="left" if place == 0 else "right")
    table.add_column("formula", style="dim")
    for one in said.spreads:
        table.add_row(one.name, *_cells(said, one.values), one.formula)
    return table


def _cells(said: Account, values: Mapping[str, float] | None) -> Iterator[str]:
    for column in said.columns:
        yield NOTHING if values is None else number(values[column])
