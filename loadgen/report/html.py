"""The parts of a page: an HTML file which needs nothing else, no network, no server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from draftgate.loadgen.measuring.hops import HOP_FORMULAS, Hop
from draftgate.loadgen.measuring.metrics import METRICS, PERCENTILES, distribution, values_of
from draftgate.loadgen.measuring.slo import attainment, attainment_by_class, goodput_rps
from draftgate.loadgen.measuring.speculation import SpeculationTotals
from draftgate.loadgen.measuring.summary import FORMULAS, schedule_s
from draftgate.loadgen.report.charts import Chart
from draftgate.loadgen.report.formatting import (
    HOP_COLUMNS,
    HOP_FIGURE_COLUMNS,
    hop_figure_rows,
    hop_row,
    number,
    percent,
    share_of,
    value_of,
)
from draftgate.loadgen.types import LoadRun


def html_page(title: str, body: Iterable[str]) -> str:
    """Return a page of such parts; it holds plotly and all else that its figures need."""
    from plotly.offline import get_plotlyjs

    return Template(_part("page.html")).substitute(
        title=escape(title),
        style=_part("page.css"),
        plotly=get_plotlyjs(),
        body="\n".join(body),
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return files("draftgate.loadgen.report").joinpath(name).read_text(encoding="utf-8")


def html_chart(chart: Chart) -> str:
    """Return a plot."""
    # JSON in a script element must not hold the characters that could end it.
    spec = json.dumps({"data": chart.data, "layout": chart.layout}).replace("<", "\\u003c")
    kind = ' class="wide"' if chart.wide else ""
    caption = f"{escape(chart.title)}<span>{escape(chart.caption)}</span>"
    return (
        f"<figure{kind}><figcaption>{caption}</figcaption>"
        f'<div class="plot" role="img" aria-label="{escape(chart.title)}"></div>'
        f'<script type="application/json">{spec}</script></figure>'
    )


def figures_part(run: LoadRun) -> str:
    """Return the table of all figures."""
    rows = []
    for figure in METRICS.values():
        found = distribution(values_of(figure, run.records))
        if found is not None:
            values = [value_of(figure, value) for value in (found.mean, *found.percentiles)]
            rows.append([figure.title, *values, str(found.count), figure.formula])
    head = ["figure", "mean", *(f"p{p}" for p in PERCENTILES), "values", "formula"]
    notes = f"Of intact answers. {FORMULAS['percentiles']}."
    return html_table(head, rows, notes, words=(len(head) - 1,))


def classes_part(run: LoadRun) -> str:
    """Return the table of classes."""
    seconds = schedule_s(run)
    rows = []
    for c in [attainment(run.records), *attainment_by_class(run.records)]:
        counts = map(str, (c.requests, c.intact, c.ttft_met, c.tpot_met, c.latency_met, c.met))
        goodput = number(goodput_rps(c.met, seconds))
        rows.append([c.class_name or "all", *counts, share_of(c), goodput])
    head = ["class", "requests", "intact", "TTFT met", "TPOT met", "in time", "all met"]
    notes = f"As promised: {FORMULAS['attainment']}. Goodput: {FORMULAS['goodput_rps']}."
    return html_table([*head, "as promised", "goodput/s"], rows, notes)


def hops_part(taken: Sequence[Hop]) -> str:
    """Return the tables of the requests that questions took."""
    notes = ". ".join(f"{name}: {formula}" for name, formula in HOP_FORMULAS.items())
    counts = html_table(HOP_COLUMNS, map(hop_row, taken), words=(len(HOP_COLUMNS) - 1,))
    rows = [row for hop in taken for row in hop_figure_rows(hop)]
    return counts + html_table(HOP_FIGURE_COLUMNS, rows, f"{notes}.", words=(1,))


def decisions_part(told: SpeculationTotals) -> str:
    """Return the table of what was decided."""
    counters = (
        ("mode", told.modes),
        ("proposer", told.proposers),
        ("policy", told.policies),
        ("most draft tokens", told.max_draft_tokens),
        ("worker", told.workers),
    )
    rows = [
        [name, ", ".join(f"{value} x {n}" for value, n in counter.most_common())]
        for name, counter in counters
        if counter
    ]
    accepted = f"{told.drafted} drafted, {told.accepted} accepted ({percent(told.acceptance)})"
    rows.append(["draft tokens", accepted])
    rows.append(["accepted per step", number(told.accepted_per_step)])
    rows.append(["mean price of a slot", number(told.mean_price, 3)])
    return html_table(["decision", "requests"], rows, words=(1,))


def flattened(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values, those of inner dictionaries by dotted names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: str = "",
    *,
    words: Sequence[int] = (),
    kind: str = "",
) -> str:
    """Return a table; columns of `words` hold no numbers, `kind` is the class of its style."""

    def cells(tag: str, values: Sequence[str]) -> str:
        kinds = (' class="words"' if place in words else "" for place in range(len(values)))
        made = (f"<{tag}{k}>{escape(v)}</{tag}>" for k, v in zip(kinds, values, strict=True))
        return f"<tr>{''.join(made)}</tr>"

    body = "\n".join(cells("td", row) for row in rows)
    caption = f"<caption>{escape(notes)}</caption>" if notes else ""
    return (
        '<div class="scroll" tabindex="0" role="region" aria-label="table">'
        f'<table class="{kind}">{caption}<thead>{cells("th", head)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
