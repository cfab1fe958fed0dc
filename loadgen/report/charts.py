"""The plots of runs, as figures of plotly.js: traces and a layout, without colours of a theme."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any, Final

from draftgate.loadgen.measuring.metrics import METRICS, Metric, values_of
from draftgate.loadgen.measuring.speculation import SpeculationTotals, total_speculation
from draftgate.loadgen.types import Record

COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D46")
FAILED: Final = "#D55E00"
"""Okabe and Ito's, which the colour-blind can tell apart, on white and on a dark ground."""

GREY: Final = "#888888"
SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x")

CURVE_POINTS: Final = 500
DOTS: Final = 2000
"""What a page shows of a large run: curves and marks beyond these only make it slow."""

FROM_ZERO: Final = {"rangemode": "tozero"}

LOG_FROM: Final = 30.0
"""A distribution whose largest value is so many times its median gets a logarithmic axis."""


@dataclass(frozen=True, slots=True)
class Chart:
    """A plot.

    Attributes:
        caption: what is shown, with its formula.
        data, layout: of plotly.js.
        wide: whether it takes the page's whole width.
    """

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """What gets a colour of its own: a class of one run, or one of several runs."""

    name: str
    records: Sequence[Record]


def by_class(records: Sequence[Record]) -> list[ChartSeries]:
    """Return the classes of a run, in the order of their names."""
    names = sorted({record.planned.request.class_name for record in records})
    return [
        ChartSeries(name, [r for r in records if r.planned.request.class_name == name])
        for name in names
    ]


def colour(place: int) -> str:
    """Return the colour of a series by its place."""
    return COLOURS[place % len(COLOURS)]


def distribution_chart(
    figure: Metric, series: Sequence[ChartSeries], *, from_sending: bool = False
) -> Chart:
    """Return a figure's cumulative distribution, by series, with the limits promised.

    Args:
        from_sending: beside it that of all from the instants of sending, if there is such a figure.
    """
    data = [
        _curve(values_of(figure, one.records), one.name, colour(place))
        for place, one in enumerate(series)
    ]
    everybody = [record for one in series for record in one.records]
    sent = METRICS.get(figure.key.replace("_s", "_sent_s"))
    if from_sending and sent is not None:
        curve = _curve(values_of(sent, everybody), "all, from sending", GREY)
        data.append(curve | {"line": {"color": GREY, "width": 1.5, "dash": "dot"}})
    wide = _is_wide(values_of(figure, everybody))
    limits = sorted({limit for r in everybody if (limit := _limit(r, figure.key)) is not None})
    layout = {
        "xaxis": {"title": {"text": "ms"}, **({"type": "log"} if wide else FROM_ZERO)},
        "yaxis": {"title": {"text": "share at or below"}, "range": [0, 1.02]},
        "shapes": [_vertical(limit_s * 1e3) for limit_s in limits],
        "annotations": [_named(limit_s * 1e3, logarithmic=wide) for limit_s in limits],
    }
    return Chart(figure.title, figure.formula, [d for d in data if d["x"]], layout)


def decision_charts(series: Sequence[ChartSeries]) -> list[Chart]:
    """Return histograms of what the server decided and what came of it, if it tells."""

    def accepted(told: SpeculationTotals) -> dict[int, int]:
        return {tokens: steps for tokens, steps in enumerate(told.histogram) if steps}

    made = [
        _histogram("Most draft tokens", "decisions", series, lambda told: told.max_draft_tokens),
        _histogram("Accepted draft tokens", "steps of verification", series, accepted),
    ]
    return [chart for chart in made if chart.data]


def dots(
    x: Sequence[Any], y: Sequence[Any], name: str, place: int, size: int = 5
) -> dict[str, Any]:
    """Return marks without a line, in the colour of a place."""
    marker = {"color": colour(place), "size": size, "opacity": 0.7}
    shape = {"type": "scatter", "mode": "markers", "name": name, "marker": marker}
    return shape | {"x": list(x), "y": list(y)}


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most so many items, evenly spaced, the first and the last among them."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(place * last / (most - 1))] for place in range(most)]


def _curve(values: Sequence[float], name: str, colour: str) -> dict[str, Any]:
    ascending = sorted(values)
    points = [(v * 1e3, (place + 1) / len(values)) for place, v in enumerate(ascending)]
    shown = thinned(points, CURVE_POINTS)
    line = {"color": colour, "width": 2, "shape": "hv"}
    x, y = [value for value, _ in shown], [share for _, share in shown]
    return {"type": "scatter", "mode": "lines", "name": name, "line": line, "x": x, "y": y}


def _histogram(
    title: str,
    unit: str,
    series: Sequence[ChartSeries],
    counts_of: Callable[[SpeculationTotals], Mapping[int, int]],
) -> Chart:
    """Return bars side by side: of each series the shares of its values."""
    data = []
    for place, one in enumerate(series):
        told = total_speculation(one.records)
        counts = {} if told is None else counts_of(told)
        if total := sum(counts.values()):
            values = sorted(counts)
            shares = [counts[value] / total for value in values]
            bar = {"type": "bar", "x": values, "y": shares, "name": one.name}
            marker = {"color": colour(place)}
            data.append(bar | {"marker": marker, "customdata": [counts[v] for v in values]})
    layout = {
        "xaxis": {"title": {"text": "tokens"}, "tickformat": "d", "dtick": 1},
        "yaxis": {"title": {"text": f"share of {unit}"}, "tickformat": ".0%"},
        "barmode": "group",
    }
    return Chart(title, f"share of {unit}, by tokens", data, layout)


def _limit(record: Record, key: str) -> float | None:
    slo = record.planned.request.slo
    limits = {"ttft_s": slo.ttft_s, "tpot_s": slo.tpot_s, "latency_s": slo.latency_s}
    return limits.get(key)


def _is_wide(values: Sequence[float]) -> bool:
    ascending = sorted(values)
    return bool(ascending) and 0 < ascending[len(ascending) // 2] * LOG_FROM < ascending[-1]


def _vertical(at_ms: float) -> dict[str, Any]:
    line = {"color": FAILED, "width": 1, "dash": "dash"}
    ends = {"x0": at_ms, "x1": at_ms, "y0": 0, "y1": 1}
    return {"type": "line", "yref": "paper", "line": line, **ends}


def _named(at_ms: float, *, logarithmic: bool) -> dict[str, Any]:
    """Return the name of a limit; plotly wants the logarithm of its place, if of no shape's."""
    place = {"x": log10(at_ms) if logarithmic else at_ms, "y": 0.02, "yref": "paper"}
    text = {"text": f"limit {at_ms:g} ms", "font": {"color": FAILED, "size": 11}, "textangle": -90}
    return {**place, **text, "showarrow": False, "xanchor": "left", "yanchor": "bottom"}
