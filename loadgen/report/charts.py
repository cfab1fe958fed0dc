"""The plots of a run, as figures of plotly.js: traces and a layout, without colours of a theme."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from itertools import accumulate
from math import log10
from typing import Any, Final

from loadgen.audit import Verdict
from loadgen.decisions import Decision, decisions, decisions_of
from loadgen.figures import FIGURE, Figure, intact, ttft_s, values_of
from loadgen.health import lag_s
from loadgen.slo import met
from loadgen.types import Record, Run

COLOURS: Final = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#8C6D46")
FAILED: Final = "#D55E00"
"""Okabe and Ito's, which the colour-blind can tell apart, on white and on a dark ground."""

CURVE_POINTS: Final = 500
BARS: Final = 300
DOTS: Final = 2000
BINS: Final = 60
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


def charts(run: Run) -> list[Chart]:
    """Return all plots of a run for which it has data."""
    figures = ("ttft_s", "tpot_s", "latency_s", "chunk_gap_s")
    made = [distribution_chart(run, FIGURE[key]) for key in figures]
    return [
        *(chart for chart in made if chart.data),
        *((requests_chart(run), load_chart(run), first_text_chart(run)) if run.records else ()),
        *decision_charts(run),
    ]


def distribution_chart(run: Run, figure: Figure) -> Chart:
    """Return a figure's cumulative distribution, by class, with the limits promised."""
    names = class_names(run.records)
    data = []
    for place, name in enumerate(names):
        records = [r for r in run.records if r.planned.question.class_name == name]
        data.append(_curve(values_of(figure, records), name, COLOURS[place % len(COLOURS)]))
    sent = FIGURE.get(figure.key.replace("_s", "_sent_s"))
    if sent is not None:
        curve = _curve(values_of(sent, run.records), "all, from sending", "#888888")
        data.append(curve | {"line": {"color": "#888888", "width": 1.5, "dash": "dot"}})
    wide = _is_wide(values_of(figure, run.records))
    limits = sorted({limit for r in run.records if (limit := _limit(r, figure.key)) is not None})
    layout = {
        "xaxis": {"title": {"text": "ms"}, **({"type": "log"} if wide else FROM_ZERO)},
        "yaxis": {"title": {"text": "share at or below"}, "range": [0, 1.02]},
        "shapes": [_vertical(limit_s * 1e3) for limit_s in limits],
        "annotations": [_named(limit_s * 1e3, logarithmic=wide) for limit_s in limits],
    }
    return Chart(figure.title, figure.formula, [d for d in data if d["x"]], layout)


def requests_chart(run: Run) -> Chart:
    """Return each request as a bar in time, thinned out where there are many."""
    ordered = sorted(run.records, key=lambda record: (record.scheduled_s, record.planned.index))
    shown = thinned(ordered, BARS)
    states = (
        ("as promised", COLOURS[0], [r for r in shown if met(r)]),
        ("late", COLOURS[1], [r for r in shown if r.verdict == Verdict.OK and not met(r)]),
        ("failed", FAILED, [r for r in shown if r.verdict != Verdict.OK]),
    )
    data = []
    for name, colour, records in states:
        waits = [(r, r.scheduled_s, r.chunks[0].at_s if r.chunks else r.end_s) for r in records]
        streams = [(r, r.chunks[0].at_s, r.end_s) for r in records if r.chunks]
        waiting = {"color": colour, "width": 1}
        data.append(_bars(waits, f"{name}: waiting", {"line": waiting, "opacity": 0.6}))
        streaming = {"color": colour, "width": 3}
        data.append(_bars(streams, f"{name}: answering", {"line": streaming}))
    some = "" if len(shown) == len(ordered) else f" {len(shown)} of {len(ordered)}, evenly chosen."
    layout = {
        "xaxis": {"title": {"text": "s since the start"}, **FROM_ZERO},
        "yaxis": {"title": {"text": "request"}, "autorange": "reversed"},
    }
    caption = f"Thin: scheduled to first text. Thick: first text to end.{some}"
    return Chart("Requests", caption, [d for d in data if d["x"]], layout, wide=True)


def load_chart(run: Run) -> Chart:
    """Return rates, open requests and the generator's lag over time."""
    width_s = max(run.duration_s, 1e-3) / BINS
    times = [(place + 0.5) * width_s for place in range(BINS)]
    scheduled = _rates((r.scheduled_s for r in run.records), width_s)
    ended = _rates((r.end_s for r in intact(run.records)), width_s)
    lags = [0.0] * BINS
    for record in run.records:
        place = _bin(record.sent_s, width_s)
        lags[place] = max(lags[place], lag_s(record) * 1e3)
    instants, open_then = open_requests(run.records)
    data = [
        _line(times, scheduled, "scheduled/s", COLOURS[0]),
        _line(times, ended, "completed/s", COLOURS[2]),
        _line(instants, open_then, "open", COLOURS[3], "y2"),
        _line(times, lags, "largest lag, ms", "#888888", "y3"),
    ]
    layout = {
        "xaxis": {"title": {"text": "s since the start"}, "anchor": "y3", **FROM_ZERO},
        "yaxis": {"title": {"text": "requests/s"}, "domain": [0.56, 1], **FROM_ZERO},
        "yaxis2": {"title": {"text": "open"}, "domain": [0.26, 0.5], **FROM_ZERO},
        "yaxis3": {"title": {"text": "lag, ms"}, "domain": [0, 0.2], **FROM_ZERO},
    }
    caption = f"Rates and lag over intervals of {width_s:.3g} s; lag is the generator's own."
    return Chart("Load", caption, data, layout, wide=True)


def first_text_chart(run: Run) -> Chart:
    """Return TTFT by scheduled instant: warming up and queues that grow show here."""
    data = []
    for place, name in enumerate(class_names(run.records)):
        records = [r for r in intact(run.records) if r.planned.question.class_name == name]
        points = [(r.scheduled_s, value) for r in records if (value := ttft_s(r)) is not None]
        shown = thinned(sorted(points), DOTS)
        marker = {"color": COLOURS[place % len(COLOURS)], "size": 5, "opacity": 0.7}
        dots = {"type": "scatter", "mode": "markers", "name": name, "marker": marker}
        dots |= {"x": [at_s for at_s, _ in shown], "y": [value * 1e3 for _, value in shown]}
        data.append(dots)
    layout = {
        "xaxis": {"title": {"text": "scheduled, s since the start"}, **FROM_ZERO},
        "yaxis": {"title": {"text": "ms"}, **FROM_ZERO},
    }
    title, caption = "TTFT over time", FIGURE["ttft_s"].formula
    return Chart(title, caption, [d for d in data if d["x"]], layout, wide=True)


def decision_charts(run: Run) -> list[Chart]:
    """Return what the server decided, if it tells."""
    told = decisions(run.records)
    if told is None:
        return []
    made = [
        _counts("Most draft tokens", "k, by decision", told.max_draft_tokens, "decisions"),
        _counts(
            "Accepted draft tokens",
            "steps of verification, by accepted tokens",
            {accepted: steps for accepted, steps in enumerate(told.histogram) if steps},
            "steps",
        ),
    ]
    points = [
        (r.sent_s, decision.max_draft_tokens, _chosen(decision))
        for r in run.records
        for decision in decisions_of(r)
        if decision.max_draft_tokens is not None
    ]
    chosen = thinned(sorted(points), DOTS)
    data = []
    for place, name in enumerate(sorted({name for _, _, name in chosen})):
        marker = {"color": COLOURS[place % len(COLOURS)], "size": 6, "opacity": 0.7}
        own = [(at_s, k) for at_s, k, of in chosen if of == name]
        dots = {"type": "scatter", "mode": "markers", "name": name, "marker": marker}
        data.append(dots | {"x": [at_s for at_s, _ in own], "y": [k for _, k in own]})
    layout = {
        "xaxis": {"title": {"text": "sent, s since the start"}, **FROM_ZERO},
        "yaxis": {"title": {"text": "k"}, **FROM_ZERO, "tickformat": "d"},
    }
    caption = "most draft tokens allowed to each request, by mode and proposer"
    made.append(Chart("Decisions over time", caption, data, layout, wide=True))
    return [chart for chart in made if chart.data]


def class_names(records: Iterable[Record]) -> list[str]:
    """Return the classes of a run, in order."""
    return sorted({record.planned.question.class_name for record in records})


def open_requests(records: Iterable[Record]) -> tuple[list[float], list[int]]:
    """Return when the number of open requests changed, and what it was from then on."""
    changes = Counter[float]()
    for record in records:
        changes[record.sent_s] += 1
        changes[record.end_s] -= 1
    instants = sorted(changes)
    return instants, list(accumulate(changes[instant] for instant in instants))


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


def _bars(
    spans: Sequence[tuple[Record, float, float]], name: str, style: dict[str, Any]
) -> dict[str, Any]:
    """Return horizontal bars as one broken line."""
    x: list[float | None] = []
    y: list[int | None] = []
    for record, start_s, end_s in spans:
        x += [start_s, end_s, None]
        y += [record.planned.index] * 2 + [None]
    return {"type": "scatter", "mode": "lines", "name": name, "x": x, "y": y, **style}


def _line(
    x: Sequence[float], y: Sequence[float], name: str, colour: str, axis: str = "y"
) -> dict[str, Any]:
    line = {"color": colour, "width": 2, "shape": "hv" if axis == "y2" else "linear"}
    shape = {"type": "scatter", "mode": "lines", "name": name, "line": line, "yaxis": axis}
    return shape | {"x": list(x), "y": list(y)}


def _counts(title: str, caption: str, counts: dict[int, int], unit: str) -> Chart:
    bar = {"type": "bar", "x": sorted(counts), "y": [counts[value] for value in sorted(counts)]}
    data = [bar | {"marker": {"color": COLOURS[0]}, "name": unit}] if counts else []
    axis = {"title": {"text": "tokens"}, "tickformat": "d", "type": "category"}
    return Chart(title, caption, data, {"xaxis": axis, "yaxis": {"title": {"text": unit}}})


def _rates(instants: Iterable[float], width_s: float) -> list[float]:
    counts = Counter(_bin(instant, width_s) for instant in instants)
    return [counts[place] / width_s for place in range(BINS)]


def _bin(instant_s: float, width_s: float) -> int:
    return min(max(int(instant_s / width_s), 0), BINS - 1)


def _chosen(decision: Decision) -> str:
    return ", ".join(filter(None, (decision.mode, decision.proposer))) or "not told"


def _limit(record: Record, key: str) -> float | None:
    slo = record.planned.question.slo
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
