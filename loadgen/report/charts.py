"""Charts of runs as plotly.js specifications, without the colours of a theme."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from math import log10
from typing import Any, Final

from draftgate.loadgen.measuring.metrics import METRICS, Metric, values_of
from draftgate.loadgen.measuring.slo import SHARES, attainment
from draftgate.loadgen.measuring.speculation import SpeculationTotals, total_speculation
from draftgate.loadgen.report.runs import RatePoint
from draftgate.loadgen.types import Record

COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D46")
FAILED: Final = "#D55E00"
"""Okabe and Ito's colours, which colour-blind readers can distinguish on white and on black."""

GREY: Final = "#888888"
SYMBOLS: Final = ("circle", "square", "diamond", "triangle-up", "cross", "x")

CURVE_POINTS: Final = 500
DOTS: Final = 2000
"""Most points of a curve and most marks. More points only slow down the page."""

FROM_ZERO: Final = {"rangemode": "tozero"}

LOG_FROM: Final = 30.0
"""A distribution whose largest value is this many times its median gets a logarithmic axis."""

METRICS_DRAWN: Final = ("ttft_s", "tpot_s", "latency_s", "chunk_gap_s")

RATE_AXIS: Final = {"title": {"text": "offered requests/s"}, **FROM_ZERO}
DASHES: Final = {50: "solid", 99: "dot"}


@dataclass(frozen=True, slots=True)
class Chart:
    """A chart.

    Attributes:
        caption: a description of the values, with their formula.
        data, layout: the specification for plotly.js.
        wide: whether it takes the whole width of the page.
    """

    title: str
    caption: str
    data: list[dict[str, Any]]
    layout: dict[str, Any] = field(default_factory=dict)
    wide: bool = False


@dataclass(frozen=True, slots=True)
class ChartSeries:
    """Records with a colour of their own: a class of one run, or all records of several runs."""

    name: str
    records: Sequence[Record]


def by_class(records: Sequence[Record]) -> list[ChartSeries]:
    """Return the classes of a run in alphabetical order."""
    names = sorted({record.planned.request.class_name for record in records})
    return [
        ChartSeries(name, [r for r in records if r.planned.request.class_name == name])
        for name in names
    ]


def colour(place: int) -> str:
    """Return the colour of the series at a position."""
    return COLOURS[place % len(COLOURS)]


def scatter(
    x: Sequence[Any], y: Sequence[Any], name: str, mode: str, **style: Any
) -> dict[str, Any]:
    """Return a plotly trace of `lines`, `markers` or both."""
    return {"type": "scatter", "mode": mode, "name": name, "x": list(x), "y": list(y), **style}


def dots(
    x: Sequence[Any], y: Sequence[Any], name: str, place: int, size: int = 5
) -> dict[str, Any]:
    """Return a marker style in the colour of a position."""
    marker = {"color": colour(place), "size": size, "opacity": 0.7}
    return scatter(x, y, name, "markers", marker=marker)


def thinned(items: Sequence[Any], most: int) -> list[Any]:
    """Return at most `most` items, evenly spaced, with the first and the last."""
    if len(items) <= most:
        return list(items)
    last = len(items) - 1
    return [items[round(place * last / (most - 1))] for place in range(most)]


def distribution_charts(
    series: Sequence[ChartSeries], *, from_sending: bool = False
) -> list[Chart]:
    """Return the distributions of the main metrics that have values."""
    made = [
        distribution_chart(METRICS[key], series, from_sending=from_sending) for key in METRICS_DRAWN
    ]
    return [chart for chart in made if chart.data]


def distribution_chart(
    metric: Metric, series: Sequence[ChartSeries], *, from_sending: bool = False
) -> Chart:
    """Return the cumulative distribution of a metric, by series, with the limits of the SLOs.

    Args:
        from_sending: also show the distribution from the sending times over all records, if the
            metric has such a variant.
    """
    data = [
        _cumulative(values_of(metric, one.records), one.name, colour(place))
        for place, one in enumerate(series)
    ]
    records = [record for one in series for record in one.records]
    sent = METRICS.get(metric.key.replace("_s", "_sent_s"))
    if from_sending and sent is not None:
        curve = _cumulative(values_of(sent, records), "all, from sending", GREY)
        data.append(curve | {"line": {"color": GREY, "width": 1.5, "dash": "dot"}})
    values = sorted(values_of(metric, records))
    wide = bool(values) and 0 < values[len(values) // 2] * LOG_FROM < values[-1]
    limits = sorted(
        {
            limit
            for record in records
            if (limit := getattr(record.planned.request.slo, metric.key, None)) is not None
        }
    )
    layout = {
        "xaxis": {"title": {"text": "ms"}, **({"type": "log"} if wide else FROM_ZERO)},
        "yaxis": {"title": {"text": "share at or below"}, "range": [0, 1.02]},
        "shapes": [_limit_line(limit_s * 1e3) for limit_s in limits],
        "annotations": [_limit_label(limit_s * 1e3, logarithmic=wide) for limit_s in limits],
    }
    return Chart(metric.title, metric.formula, [d for d in data if d["x"]], layout)


def decision_charts(series: Sequence[ChartSeries]) -> list[Chart]:
    """Return histograms of longest drafts and accepted tokens, if the server reports them."""

    def longest(totals: SpeculationTotals) -> Mapping[int, int]:
        return totals.count("max_draft_tokens")

    def accepted(totals: SpeculationTotals) -> Mapping[int, int]:
        return {tokens: steps for tokens, steps in enumerate(totals.histogram) if steps}

    made = [
        _histogram("Longest draft", "decisions", series, longest),
        _histogram("Accepted draft tokens", "steps of verification", series, accepted),
    ]
    return [chart for chart in made if chart.data]


def rate_charts(points: Sequence[RatePoint]) -> list[Chart]:
    """Return the charts over the rate, for the points with a known rate."""
    known = [point for point in points if point.rate_rps is not None]
    names = list(dict.fromkeys(point.name for point in known))
    curves = [(name, [point for point in known if point.name == name]) for name in names]
    made = [
        _attainments(curves),
        _goodputs(curves),
        *(_times(key, curves) for key in METRICS_DRAWN),
    ]
    return [chart for chart in made if chart.data]


def _cumulative(values: Sequence[float], name: str, colour: str) -> dict[str, Any]:
    points = [(v * 1e3, (place + 1) / len(values)) for place, v in enumerate(sorted(values))]
    shown = thinned(points, CURVE_POINTS)
    line = {"color": colour, "width": 2, "shape": "hv"}
    x, y = [value for value, _ in shown], [share for _, share in shown]
    return scatter(x, y, name, "lines", line=line)


def _histogram(
    title: str,
    unit: str,
    series: Sequence[ChartSeries],
    counts_of: Callable[[SpeculationTotals], Mapping[int, int]],
) -> Chart:
    """Return bars side by side, which show the shares of each series' values."""
    data = []
    for place, one in enumerate(series):
        totals = total_speculation(one.records)
        counts = {} if totals is None else counts_of(totals)
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


def _limit_line(at_ms: float) -> dict[str, Any]:
    line = {"color": FAILED, "width": 1, "dash": "dash"}
    ends = {"x0": at_ms, "x1": at_ms, "y0": 0, "y1": 1}
    return {"type": "line", "yref": "paper", "line": line, **ends}


def _limit_label(at_ms: float, *, logarithmic: bool) -> dict[str, Any]:
    # Plotly expects the logarithm for annotations on a logarithmic axis, but not for shapes.
    place = {"x": log10(at_ms) if logarithmic else at_ms, "y": 0.02, "yref": "paper"}
    text = {"text": f"limit {at_ms:g} ms", "font": {"color": FAILED, "size": 11}, "textangle": -90}
    return {**place, **text, "showarrow": False, "xanchor": "left", "yanchor": "bottom"}


Curves = Sequence[tuple[str, Sequence[RatePoint]]]


def _attainments(curves: Curves) -> Chart:
    data = []
    for place, (name, points) in enumerate(curves):
        counted = [attainment(point.records) for point in points]
        above = [c.interval.high - (c.share or 0.0) for c in counted]
        below = [(c.share or 0.0) - c.interval.low for c in counted]
        bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        trace = _over_rate(points, [c.share for c in counted], name, place)
        data.append(trace | {"error_y": bars | {"thickness": 1, "width": 3}})
    level = {"width": 1, "dash": "dot", "color": GREY}
    lines = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": share, "y1": share, "line": level}
        for share in SHARES
    ]
    axis = {"title": {"text": "attainment"}, "tickformat": ".0%", "range": [0, 1.03]}
    caption = (
        "intact requests that met their SLO / all scheduled, with 95 % Wilson intervals;"
        " lines at 90, 95 and 99 %"
    )
    layout = {"xaxis": RATE_AXIS, "yaxis": axis, "shapes": lines}
    return Chart("Attainment against rate", caption, data, layout)


def _goodputs(curves: Curves) -> Chart:
    data = [
        _over_rate(points, [point.goodput_rps for point in points], name, place)
        for place, (name, points) in enumerate(curves)
    ]
    layout = {"xaxis": RATE_AXIS, "yaxis": {"title": {"text": "requests/s"}, **FROM_ZERO}}
    caption = "requests that met their SLO / seconds of the schedule"
    return Chart("Goodput against rate", caption, data, layout)


def _times(key: str, curves: Curves) -> Chart:
    metric, data = METRICS[key], []
    for place, (name, points) in enumerate(curves):
        found = [point.percentiles(key) for point in points]
        for percent, dash in DASHES.items():
            values = [None if not own else own[percent] * 1e3 for own in found]
            trace = _over_rate(points, values, f"{name} p{percent}", place, dash)
            data += [trace | {"legendgroup": name}] if any(values) else []
    axis = {"title": {"text": "ms"}, "type": "log", "dtick": "D2"}
    caption = f"{metric.formula}; solid: median, dotted: p99"
    layout = {"xaxis": RATE_AXIS, "yaxis": axis}
    return Chart(f"{metric.title} against rate", caption, data, layout)


def _over_rate(
    points: Sequence[RatePoint],
    values: Iterable[float | None],
    name: str,
    place: int,
    dash: str = "solid",
) -> dict[str, Any]:
    marker = {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8, "color": colour(place)}
    line = {"color": colour(place), "width": 2, "dash": dash}
    rates = [point.rate_rps for point in points]
    return scatter(rates, list(values), name, "lines+markers", line=line, marker=marker)
