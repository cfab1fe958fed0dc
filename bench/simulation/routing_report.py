"""Page of `draftgate bench routing` with metrics over the number of workers, by policy."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Final

from draftgate.loadgen.report.charts import COLOURS, FAILED, SYMBOLS, Chart
from draftgate.loadgen.report.formatting import percent
from draftgate.loadgen.report.html import html_chart, html_table

HEAD: Final = (
    "cluster", "workers", "share", "policy", "TTFT p50, ms", "TTFT p99", "TPOT p50", "TPOT p99",
    "mean latency, s", "goodput/s", "in time", "cached", "max / mean",
)  # fmt: skip

SHOWN: Final = (
    ("ttft_p50_s", "Median TTFT", "s"),
    ("ttft_p99_s", "P99 TTFT", "s"),
    ("tpot_p50_s", "Median TPOT", "s"),
    ("latency_mean_s", "Mean latency", "s"),
    ("attainment", "Requests in time", "share"),
    ("cached", "Prompt tokens from caches", "share"),
)


def line(cell: dict[str, Any], policy: str) -> list[str]:
    """Return the table row of a policy."""
    metrics = cell["policies"][policy]
    times = [metrics[key] * 1e3 for key in ("ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s")]
    return [
        cell["cluster"],
        str(cell["workers"]),
        f"{cell['share']:g}",
        policy,
        *(f"{value:.4g}" if value < 1e4 else f"{value:.0f}" for value in times),
        f"{metrics['latency_mean_s']:.3f}",
        f"{metrics['goodput_rps']:.2f}",
        percent(metrics["attainment"]),
        percent(metrics["cached"]),
        f"{metrics['imbalance']:.2f}",
    ]


def body(title: str, results: dict[str, Any]) -> Iterator[str]:
    """Yield the parts of the page."""
    yield f"<h1>{title}</h1>"
    yield f"<p>{results['command']}, {results['commit']}, {results['date']}</p>"
    cells = results["cells"]
    for cluster in dict.fromkeys(cell["cluster"] for cell in cells):
        own = [cell for cell in cells if cell["cluster"] == cluster]
        charts = [_chart(cluster, own, *shown) for shown in SHOWN]
        yield f'<div class="charts">{"".join(map(html_chart, charts))}</div>'
    rows = [line(cell, policy) for cell in cells for policy in cell["policies"]]
    note = "Requests in time meet both targets. Max / mean counts all tokens of each worker."
    yield html_table(list(HEAD), rows, note)


def _chart(cluster: str, cells: list[dict[str, Any]], key: str, title: str, unit: str) -> Chart:
    policies = list(cells[0]["policies"])
    data = [
        {
            "type": "scatter",
            "mode": "lines+markers",
            "name": policy,
            "line": {"color": FAILED if policy == policies[-1] else COLOURS[place]},
            "marker": {"symbol": SYMBOLS[place % len(SYMBOLS)]},
            "x": [cell["workers"] for cell in cells],
            "y": [cell["policies"][policy][key] for cell in cells],
        }
        for place, policy in enumerate(policies)
    ]
    layout = {
        "xaxis": {"title": {"text": "workers"}, "type": "log"},
        "yaxis": {"title": {"text": unit}, "rangemode": "tozero"},
    }
    return Chart(
        f"{title}, {cluster} workers",
        "The rate is proportional to the number of workers.",
        data,
        layout,
    )
