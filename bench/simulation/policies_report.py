"""Page of `draftgate bench policies` with latency over the rate and comparisons with `auto`."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Final

from draftgate.loadgen.report.charts import COLOURS, FAILED, Chart
from draftgate.loadgen.report.html import html_chart, html_table

LINES: Final = {
    "off": {"color": "#888888", "dash": "dot"},
    "fixed:2": {"color": COLOURS[4]},
    "fixed:4": {"color": COLOURS[4], "dash": "dash"},
    "fixed:8": {"color": COLOURS[4], "dash": "dot"},
    "smartspec": {"color": COLOURS[1]},
    "adaptive_verification": {"color": COLOURS[3]},
    "threshold_by_batch:batch_tiers.json": {"color": COLOURS[5]},
    "oracle": {"color": COLOURS[2]},
    "auto": {"color": FAILED, "width": 3},
}
"""Lines of the chart, with the most important line on top."""

SHOWN: Final = (
    ("latency_s.mean", "Mean latency"),
    ("latency_s.p99", "P99 latency"),
    ("accepted_tokens_per_s", "Tokens per second"),
    ("goodput_rps", "Goodput"),
)

HEAD: Final = (
    "workload",
    "rate/s",
    "of highest",
    "best fixed",
    "auto to it",
    "to off",
    "to smartspec",
    "to adaptive",
    "of oracle's gain",
)


def body(results: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the page."""
    yield "<h1>Speculation policies over the rate of requests</h1>"
    yield f"<p>{results['command']}, {results['commit']}, {results['date']}</p>"
    cells = results["cells"]
    for workload in dict.fromkeys(cell["workload"] for cell in cells):
        own = [cell for cell in cells if cell["workload"] == workload]
        drawn = [_chart(workload, own, figure, title) for figure, title in SHOWN]
        yield f'<div class="charts">{"".join(map(html_chart, drawn))}</div>'
    note = "Differences of mean latency, paired by seed, with half of the 95% interval."
    yield html_table(list(HEAD), list(map(_row, cells)), note)


def _chart(workload: str, cells: Sequence[dict[str, Any]], figure: str, title: str) -> Chart:
    """Return a chart of all policies over the rate, as multiples of `off`."""
    data = []
    for name, line in LINES.items():
        points = [
            (cell["share"], cell["policies"][name][figure]["mean"], cell["policies"]["off"][figure])
            for cell in cells
            if figure in cell["policies"][name] and figure in cell["policies"]["off"]
        ]
        kept = [(share, mean / off["mean"]) for share, mean, off in points if off["mean"]]
        data.append(
            {
                "type": "scatter",
                "mode": "lines+markers",
                "name": name.partition(":batch")[0],
                "line": line,
                "x": [share for share, _ in kept],
                "y": [ratio for _, ratio in kept],
            }
        )
    layout = {
        "xaxis": {"title": {"text": "rate, of the highest without speculation"}},
        "yaxis": {"title": {"text": "of off's"}},
    }
    caption = "Values are relative to the value without speculation."
    return Chart(f"{title}: {workload}", caption, data, layout)


def _row(cell: dict[str, Any]) -> list[str]:
    auto = cell["auto"]
    names = (auto["best_fixed"], "off", "smartspec", "adaptive_verification")
    share = auto["share_of_oracle"]
    return [
        cell["workload"],
        f"{cell['rate_rps']:.3g}",
        f"{cell['share']:g}",
        auto["best_fixed"],
        *(_difference(auto["differences"][name]) for name in names),
        "" if share is None else f"{share:.0%}",
    ]


def _difference(difference: dict[str, Any]) -> str:
    text = f"{difference['relative']:+.1%}"
    if difference["interval"] is None:
        return text
    half = (difference["interval"][1] - difference["interval"][0]) / 2
    relative = difference["relative"] / difference["mean"] if difference["mean"] else 0.0
    return f"{text} ± {abs(half * relative):.1%}"
