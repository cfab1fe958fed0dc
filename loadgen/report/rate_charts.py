"""The plots of several runs over the rate at which was asked: latency, attainment, goodput."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, Final

from draftgate.loadgen.measuring.metrics import METRICS
from draftgate.loadgen.measuring.slo import attainment
from draftgate.loadgen.report.charts import FROM_ZERO, GREY, SYMBOLS, Chart, colour
from draftgate.loadgen.report.runs import RatePoint

RATE: Final = {"title": {"text": "offered requests/s"}, **FROM_ZERO}
TIMES: Final = ("ttft_s", "tpot_s", "latency_s", "chunk_gap_s")
DASHES: Final = {50: "solid", 99: "dot"}
LEVELS: Final = (0.90, 0.95, 0.99)
LEVEL: Final = {"width": 1, "dash": "dot", "color": GREY}


def rate_charts(points: Sequence[RatePoint]) -> list[Chart]:
    """Return the plots over the rate, for the points that have one."""
    known = [point for point in points if point.rate_rps is not None]
    names = list(dict.fromkeys(point.name for point in known))
    curves = [(name, [point for point in known if point.name == name]) for name in names]
    made = [_attainment(curves), _goodput(curves), *(_times(key, curves) for key in TIMES)]
    return [chart for chart in made if chart.data]


Curves = Sequence[tuple[str, Sequence[RatePoint]]]


def _attainment(curves: Curves) -> Chart:
    data = []
    for place, (name, points) in enumerate(curves):
        counted = [attainment(point.records) for point in points]
        shares = [c.share for c in counted]
        above = [c.interval.high - (c.share or 0.0) for c in counted]
        below = [(c.share or 0.0) - c.interval.low for c in counted]
        bars = {"type": "data", "symmetric": False, "array": above, "arrayminus": below}
        trace = _curve(points, shares, name, place)
        data.append(trace | {"error_y": bars | {"thickness": 1, "width": 3}})
    lines = [
        {"type": "line", "xref": "paper", "x0": 0, "x1": 1, "y0": share, "y1": share, "line": LEVEL}
        for share in LEVELS
    ]
    axis = {"title": {"text": "as promised"}, "tickformat": ".0%", "range": [0, 1.03]}
    caption = (
        "intact requests that met both limits / all scheduled, with 95 % Wilson intervals;"
        " lines at 90, 95 and 99 %"
    )
    layout = {"xaxis": RATE, "yaxis": axis, "shapes": lines}
    return Chart("Attainment against rate", caption, data, layout)


def _goodput(curves: Curves) -> Chart:
    data = [
        _curve(points, [point.goodput_rps for point in points], name, place)
        for place, (name, points) in enumerate(curves)
    ]
    layout = {"xaxis": RATE, "yaxis": {"title": {"text": "requests/s"}, **FROM_ZERO}}
    caption = "requests served as promised / seconds of the schedule"
    return Chart("Goodput against rate", caption, data, layout)


def _times(key: str, curves: Curves) -> Chart:
    figure, data = METRICS[key], []
    for place, (name, points) in enumerate(curves):
        found = [point.percentiles(key) for point in points]
        for percent, dash in DASHES.items():
            values = [None if not own else own[percent] * 1e3 for own in found]
            trace = _curve(points, values, f"{name} p{percent}", place, dash)
            data += [trace | {"legendgroup": name}] if any(values) else []
    layout = {"xaxis": RATE, "yaxis": {"title": {"text": "ms"}, "type": "log", "dtick": "D2"}}
    caption = f"{figure.formula}; solid: median, dotted: p99"
    return Chart(f"{figure.title} against rate", caption, data, layout)


def _curve(
    points: Sequence[RatePoint],
    values: Iterable[float | None],
    name: str,
    place: int,
    dash: str = "solid",
) -> dict[str, Any]:
    marker = {"symbol": SYMBOLS[place % len(SYMBOLS)], "size": 8, "color": colour(place)}
    line = {"color": colour(place), "width": 2, "dash": dash}
    shape = {"type": "scatter", "mode": "lines+markers", "name": name}
    rates = [point.rate_rps for point in points]
    return shape | {"line": line, "marker": marker, "x": rates, "y": list(values)}
