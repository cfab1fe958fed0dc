"""Builds an HTML report as a single file that needs no network and no server."""

from __future__ import annotations

import json
from base64 import b64encode
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING, Any, Final

if TYPE_CHECKING:
    # Charts need the client of the load test, and pages with tables alone do not.
    from draftgate.loadgen.report.charts import Chart
    from draftgate.loadgen.report.tables import ReportTable

PLOTLY: Final = "plotly-basic.min.js.gz"
"""The basic bundle of plotly.js 4.1.1, which has lines, marks and bars, from the npm package
plotly.js-basic-dist-min. A page with the bundle of all charts would have 5 MB."""


def html_page(title: str, body: Iterable[str], *, charts: bool = True) -> str:
    """Return a page of HTML elements, with plotly.js embedded for its charts.

    Args:
        charts: whether the page may have charts of plotly.js.
    """
    return Template(_asset("page.html")).substitute(
        title=escape(title),
        style=_asset("page.css"),
        plotly=plotly_base64() if charts else "",
        body="\n".join(body),
        script=_asset("page.js") if charts else "",
    )


def plotly_base64() -> str:
    """Return plotly.js as it is embedded, which `page.js` decompresses."""
    return b64encode(files("draftgate.loadgen.report").joinpath(PLOTLY).read_bytes()).decode()


def _asset(name: str) -> str:
    return files("draftgate.loadgen.report").joinpath(name).read_text(encoding="utf-8")


def html_chart(chart: Chart) -> str:
    """Return the HTML element of a chart."""
    # JSON in a script element must not contain characters that could end the element.
    spec = json.dumps({"data": chart.data, "layout": chart.layout}).replace("<", "\\u003c")
    kind = ' class="wide"' if chart.wide else ""
    caption = f"{escape(chart.title)}<span>{escape(chart.caption)}</span>"
    return (
        f"<figure{kind}><figcaption>{caption}</figcaption>"
        f'<div class="plot" role="img" aria-label="{escape(chart.title)}"></div>'
        f'<script type="application/json">{spec}</script></figure>'
    )


def html_table(
    head: Sequence[str],
    rows: Iterable[Sequence[str]],
    notes: str = "",
    *,
    words: Sequence[int] = (),
    kind: str = "",
) -> str:
    """Return the HTML element of a table.

    Args:
        words: positions of the columns that hold text.
        kind: the CSS class.
    """

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


def html_report_table(table: ReportTable, kind: str = "") -> str:
    """Return the HTML element of one of the tables of `report.tables`."""
    return html_table(table.head, table.rows, table.notes, words=table.words, kind=kind)


def html_settings(settings: dict[str, Any], more: Iterable[Sequence[str]] = ()) -> str:
    """Return a table of settings, with dotted names for the keys of inner dictionaries."""
    rows = [[name, str(value)] for name, value in _flatten(settings) if value is not None]
    return html_table(["setting", "value"], [*rows, *more], words=(1,))


def _flatten(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from _flatten(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value
