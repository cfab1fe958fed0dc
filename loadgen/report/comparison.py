"""Two runs against each other, in a table for a terminal."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite

from rich.console import Group, RenderableType
from rich.panel import Panel
from rich.table import Table
from rich.text import Text

from draftgate.loadgen.compare.comparison import Change, Comparison
from draftgate.loadgen.measuring.metrics import METRICS
from draftgate.loadgen.report.formatting import milliseconds, number, percent

STYLES = {"worse": "red", "better": "green", "": ""}
TITLES = {
    "attainment": "as promised",
    "goodput_rps": "goodput/s",
    "accepted_tokens_per_s": "accepted tokens/s",
}


def render(comparison: Comparison) -> RenderableType:
    """Return the table of all changes, and what to think of them."""
    parts: list[RenderableType] = []
    if comparison.invalid:
        text = "\n".join(["Believe none of these figures:", *comparison.invalid])
        parts += [Panel(Text(text), title="INVALID", style="bold red"), ""]
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(("figure", "A", "B", "change", "95 % interval", "")):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for change in comparison.changes:
        table.add_row(*_row(change), style=STYLES[change.verdict])
    return Group(*parts, table, "", Text("\n".join(_notes(comparison))))


def _row(change: Change) -> Iterator[str]:
    title = TITLES[change.key] if change.key in TITLES else METRICS[change.key].title
    yield f"{title} {change.point}".rstrip()
    yield from (_value(change.key, value) for value in (change.a, change.b))
    yield "-" if change.relative is None else f"{change.relative:+.1%}"
    ends = change.interval
    known = all(map(isfinite, ends)) and change.a
    yield f"[{ends[0] / abs(change.a):+.1%}, {ends[1] / abs(change.a):+.1%}]" if known else "-"
    yield change.verdict


def _value(key: str, value: float) -> str:
    if key in {"attainment", "fluidity"}:
        return percent(value)
    return milliseconds(value) if key.endswith("_s") and key in METRICS else number(value)


def _notes(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.requests
    pairs = f"{a} pairs of the same requests" if comparison.paired else f"{a} and {b} requests"
    judged = sum(change.judged for change in comparison.changes)
    yield f"{pairs}, resampled in blocks; {judged} figures judged together (Holm)."
    for name, (ours, theirs) in comparison.settings.items():
        yield f"{name}: {ours} in A, {theirs} in B"
    limits = [change.limit.in_words for change in comparison.changes if change.limit is not None]
    if limits:
        yield f"Allowed to get so much worse: {', '.join(limits)}."
    worse = sum(change.verdict == "worse" for change in comparison.changes)
    yield f"{worse} worse: a regression." if worse else "No regression to be seen."
