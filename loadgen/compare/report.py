"""Reports a comparison of two runs as a table for a terminal, and as `compare/1`."""

from __future__ import annotations

from collections.abc import Iterator
from math import isfinite
from typing import Any, Final

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftgate.loadgen.compare.comparison import ERROR, Change, Comparison
from draftgate.loadgen.measuring.confidence import REPLICATES
from draftgate.loadgen.measuring.metrics import METRICS
from draftgate.loadgen.report.formatting import milliseconds, number, percent
from draftgate.loadgen.report.terminal import invalid_panel

STYLES: Final = {"worse": "red", "better": "green", "": ""}
TITLES: Final = {"goodput_rps": "goodput/s", "accepted_tokens_per_s": "accepted tokens/s"}

_FORMULAS: Final = {
    "interval": "change -+ t SE: SE over resamples of requests in blocks (stationary bootstrap), t"
    " of Student's distribution with n/block - 1 degrees of freedom; 95 % for each statistic alone",
    "verdict": "worse: by more than its threshold (without one, 0); better: by more than 0; Holm's"
    " correction over all judged statistics",
}


def render_comparison(comparison: Comparison) -> RenderableType:
    """Return the table of all changes, with notes."""
    table = Table(box=None, pad_edge=False)
    for place, column in enumerate(("metric", "A", "B", "change", "95 % interval", "")):
        table.add_column(column, justify="left" if place == 0 else "right", no_wrap=True)
    for change in comparison.changes:
        table.add_row(*_cells(change), style=STYLES[change.verdict])
    notes = Text("\n".join(_notes(comparison)))
    return Group(*invalid_panel(comparison.invalid), table, "", notes)


def _cells(change: Change) -> Iterator[str]:
    metric = METRICS.get(change.key)
    title = metric.title if metric else TITLES.get(change.key, change.key)
    yield f"{title} {change.statistic}".rstrip()
    for value in (change.a, change.b):
        if change.key in {"attainment", "fluidity"}:
            yield percent(value)
        else:
            yield milliseconds(value) if metric and metric.in_seconds else number(value)
    yield "-" if change.relative is None else f"{change.relative:+.1%}"
    ends = change.interval
    known = all(map(isfinite, ends)) and change.a
    yield f"[{ends[0] / abs(change.a):+.1%}, {ends[1] / abs(change.a):+.1%}]" if known else "-"
    yield change.verdict


def _notes(comparison: Comparison) -> Iterator[str]:
    a, b = comparison.requests
    pairs = f"{a} pairs of the same requests" if comparison.paired else f"{a} and {b} requests"
    judged = sum(change.judged for change in comparison.changes)
    yield f"{pairs}, resampled in blocks; {judged} statistics judged together (Holm)."
    for name, (ours, theirs) in comparison.settings.items():
        yield f"{name}: {ours} in A, {theirs} in B"
    allowed = [str(c.threshold) for c in comparison.changes if c.threshold is not None]
    if allowed:
        yield f"Thresholds: {', '.join(allowed)}."
    worse = sum(change.verdict == "worse" for change in comparison.changes)
    yield f"{worse} worse: a regression." if worse else "No regression found."


def comparison_as_dict(comparison: Comparison) -> dict[str, Any]:
    """Return the `compare/1` result of a comparison. Unknown ends of intervals are null."""
    return {
        "format": "compare/1",
        "valid": not comparison.invalid,
        "invalid_reasons": comparison.invalid,
        "regressed": comparison.regressed,
        "requests": list(comparison.requests),
        "paired": comparison.paired,
        "differing_settings": {name: list(both) for name, both in comparison.settings.items()},
        "changes": [_change(change) for change in comparison.changes],
        "family_wise_error": ERROR,
        "resamples": REPLICATES,
        "formulas": _FORMULAS,
    }


def _change(change: Change) -> dict[str, Any]:
    return {
        "figure": change.key,
        "statistic": change.statistic or None,
        "a": change.a,
        "b": change.b,
        "change": change.change,
        "relative": change.relative,
        "interval": [end if isfinite(end) else None for end in change.interval],
        "p_worse": change.p_worse,
        "p_better": change.p_better,
        "block_requests": change.block,
        "threshold": None if change.threshold is None else str(change.threshold),
        "judged": change.judged,
        "verdict": change.verdict or None,
    }
