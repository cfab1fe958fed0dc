"""Charts of one run over time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from itertools import accumulate
from typing import Any, Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import METRICS, intact, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.measuring.speculation import speculation_reports
from draftgate.loadgen.report.charts import (
    COLOURS,
    DOTS,
    FAILED,
    FROM_ZERO,
    GREY,
    Chart,
    by_class,
    dots,
    scatter,
    thinned,
)
from draftgate.loadgen.sending.health import lag_s
from draftgate.loadgen.types import LoadRun, Record

BARS: Final = 300
BINS: Final = 60


def time_charts(run: LoadRun) -> list[Chart]:
    """Return the charts over time for which the run has data."""
    if not run.records:
        return []
    made = [request_chart(run), load_chart(run), ttft_chart(run), decision_chart(run)]
    return [chart for chart in made if chart.data]


def request_chart(run: LoadRun) -> Chart:
    """Return each request as a bar in time, thinned out if the run has many requests."""
    ordered = sorted(run.records, key=lambda record: (record.scheduled_s, record.planned.index))
    shown = thinned(ordered, BARS)
    states = (
        ("SLO met", COLOURS[0], [r for r in shown if meets_slo(r)]),
        ("late", COLOURS[1], [r for r in shown if r.verdict == Verdict.OK and not meets_slo(r)]),
        ("failed", FAILED, [r for r in shown if r.verdict != Verdict.OK]),
    )
    data = []
    for name, colour, records in states:
        waits = [(r, r.scheduled_s, r.chunks[0].at_s if r.chunks else r.end_s) for r in records]
        streams = [(r, r.chunks[0].at_s, r.end_s) for r in records if r.chunks]
        waiting = {"color": colour, "width": 1}
        data.append(_bars(waits, f"{name}: waiting", line=waiting, opacity=0.6))
        data.append(_bars(streams, f"{name}: streaming", line={"color": colour, "width": 3}))
    some = "" if len(shown) == len(ordered) else f" {len(shown)} of {len(ordered)}, evenly chosen."
    layout = {
        "xaxis": {"title": {"text": "s since the start"}, **FROM_ZERO},
        "yaxis": {"title": {"text": "request"}, "autorange": "reversed"},
    }
    caption = f"Thin: scheduled to first text. Thick: first text to end.{some}"
    return Chart("Requests", caption, [d for d in data if d["x"]], layout, wide=True)


def load_chart(run: LoadRun) -> Chart:
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
        _line(times, lags, "largest lag, ms", GREY, "y3"),
    ]
    layout = {
        "xaxis": {"title": {"text": "s since the start"}, "anchor": "y3", **FROM_ZERO},
        "yaxis": {"title": {"text": "requests/s"}, "domain": [0.56, 1], **FROM_ZERO},
        "yaxis2": {"title": {"text": "open"}, "domain": [0.26, 0.5], **FROM_ZERO},
        "yaxis3": {"title": {"text": "lag, ms"}, "domain": [0, 0.2], **FROM_ZERO},
    }
    caption = f"Rates and lag over intervals of {width_s:.3g} s; lag is the generator's own."
    return Chart("Load", caption, data, layout, wide=True)


def ttft_chart(run: LoadRun) -> Chart:
    """Return TTFT by scheduled time, which shows warm-up and growing queues."""
    data = []
    for place, series in enumerate(by_class(run.records)):
        records = intact(series.records)
        points = [(r.scheduled_s, value) for r in records if (value := ttft_s(r)) is not None]
        shown = thinned(sorted(points), DOTS)
        instants, values_ms = [at_s for at_s, _ in shown], [value * 1e3 for _, value in shown]
        data.append(dots(instants, values_ms, series.name, place))
    layout = {
        "xaxis": {"title": {"text": "scheduled, s since the start"}, **FROM_ZERO},
        "yaxis": {"title": {"text": "ms"}, **FROM_ZERO},
    }
    title, caption = "TTFT over time", METRICS["ttft_s"].formula
    return Chart(title, caption, [d for d in data if d["x"]], layout, wide=True)


def decision_chart(run: LoadRun) -> Chart:
    """Return the longest draft allowed to each request, without data if the server reports none."""
    points = [
        (
            r.sent_s,
            report.max_draft_tokens,
            ", ".join(filter(None, (report.mode, report.proposer))) or "not reported",
        )
        for r in run.records
        for report in speculation_reports(r)
        if report.max_draft_tokens is not None
    ]
    chosen = thinned(sorted(points), DOTS)
    data = []
    for place, name in enumerate(sorted({name for _, _, name in chosen})):
        own = [(at_s, k) for at_s, k, of in chosen if of == name]
        data.append(dots([at_s for at_s, _ in own], [k for _, k in own], name, place, 6))
    layout = {
        "xaxis": {"title": {"text": "sent, s since the start"}, **FROM_ZERO},
        "yaxis": {"title": {"text": "k"}, **FROM_ZERO, "tickformat": "d"},
    }
    caption = "longest draft allowed to each request, by mode and proposer"
    return Chart("Decisions over time", caption, data, layout, wide=True)


def open_requests(records: Iterable[Record]) -> tuple[list[float], list[int]]:
    """Return the times at which the number of open requests changed, and the new numbers."""
    changes = Counter[float]()
    for record in records:
        changes[record.sent_s] += 1
        changes[record.end_s] -= 1
    instants = sorted(changes)
    return instants, list(accumulate(changes[instant] for instant in instants))


def _bars(spans: Sequence[tuple[Record, float, float]], name: str, **style: Any) -> dict[str, Any]:
    """Return horizontal bars as one broken line."""
    x: list[float | None] = []
    y: list[int | None] = []
    for record, start_s, end_s in spans:
        x += [start_s, end_s, None]
        y += [record.planned.index] * 2 + [None]
    return scatter(x, y, name, "lines", **style)


def _line(
    x: Sequence[float], y: Sequence[float], name: str, colour: str, axis: str = "y"
) -> dict[str, Any]:
    line = {"color": colour, "width": 2, "shape": "hv" if axis == "y2" else "linear"}
    return scatter(x, y, name, "lines", line=line, yaxis=axis)


def _rates(instants: Iterable[float], width_s: float) -> list[float]:
    counts = Counter(_bin(instant, width_s) for instant in instants)
    return [counts[place] / width_s for place in range(BINS)]


def _bin(instant_s: float, width_s: float) -> int:
    return min(max(int(instant_s / width_s), 0), BINS - 1)
