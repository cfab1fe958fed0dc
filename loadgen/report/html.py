"""The run as one HTML file which needs nothing else: no network, no server."""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from plotly.offline import get_plotlyjs

from loadgen.decisions import Decisions, decisions
from loadgen.figures import (
    FIGURE,
    FIGURES,
    PERCENTILES,
    distribution,
    errors,
    values_of,
)
from loadgen.hops import HOP_FORMULAS, Hop, hops
from loadgen.report.charts import Chart, charts
from loadgen.report.words import (
    HOP_COLUMNS,
    HOP_FIGURE_COLUMNS,
    hop_figure_rows,
    hop_row,
    number,
    percent,
    share_of,
    value_of,
)
from loadgen.slo import attainment, attainment_by_class, goodput_rps
from loadgen.summary import FORMULAS, accepted_tokens_per_s, invalid_reasons, schedule_s
from loadgen.types import Run
from loadgen.verify import LosslessCheck


def page(run: Run, lossless: LosslessCheck | None = None) -> str:
    """Return the page of a run."""
    title = f"Load of {run.settings.get('model', 'a model')} at {run.settings.get('url', '?')}"
    return document(title, _body(title, run, lossless))


def document(title: str, body: Iterable[str]) -> str:
    """Return a page of such parts; it holds plotly and all else that its figures need."""
    return Template(_part("page.html")).substitute(
        title=escape(title),
        style=_part("page.css"),
        plotly=get_plotlyjs(),
        body="\n".join(body),
        script=_part("page.js"),
    )


def _part(name: str) -> str:
    return files("loadgen.report").joinpath(name).read_text(encoding="utf-8")


def _body(title: str, run: Run, lossless: LosslessCheck | None) -> Iterator[str]:
    started = run.settings.get("started", "")
    yield f'<h1>{escape(title)}</h1>\n<p class="quiet">{escape(str(started))}</p>'
    if reasons := invalid_reasons(run):
        listed = "".join(f"<li>{escape(reason)}</li>" for reason in reasons)
        told = "Believe none of these figures:"
        yield f'<div class="invalid"><strong>INVALID</strong> {told}<ul>{listed}</ul></div>'
    yield _tiles(run)
    drawn = charts(run)
    if drawn:
        yield "<h2>Plots</h2>"
        yield f'<div class="charts">{"".join(map(figure_part, drawn))}</div>'
    yield "<h2>Figures</h2>" + figures_part(run)
    yield "<h2>Classes</h2>" + classes_part(run)
    if taken := hops(run.records):
        yield "<h2>Hops of a question</h2>" + hops_part(taken)
    if errors(run.records):
        yield "<h2>Failed</h2>" + _errors(run)
    if (told_of := decisions(run.records)) is not None:
        yield "<h2>Decisions of the server</h2>" + decisions_part(told_of)
    if lossless is not None:
        yield "<h2>Lossless?</h2>" + _lossless(lossless)
    yield "<h2>The run</h2>" + _settings(run)


def _tiles(run: Run) -> str:
    counted = attainment(run.records)
    low, high = counted.interval
    tiles = [
        ("goodput, requests/s", number(goodput_rps(counted.met, schedule_s(run)))),
        (f"as promised (95 %: {low:.1%} to {high:.1%})", percent(counted.share)),
        ("accepted tokens/s", number(accepted_tokens_per_s(run), 1)),
        ("failed", f"{counted.requests - counted.intact} of {counted.requests}"),
    ]
    for figure in (FIGURE["ttft_s"], FIGURE["tpot_s"]):
        found = distribution(values_of(figure, run.records))
        if found is not None:
            shown = dict(zip(PERCENTILES, found.percentiles, strict=True))
            median = value_of(figure, shown[50])
            tiles.append((f"{figure.title} p99 (p50: {median})", value_of(figure, shown[99])))
    cells = "".join(
        f'<div class="tile"><b>{escape(value)}</b><span>{escape(name)}</span></div>'
        for name, value in tiles
    )
    return f'<div class="tiles">{cells}</div>'


def figure_part(chart: Chart) -> str:
    """Return a plot."""
    # JSON in a script element must not hold the characters that could end it.
    spec = json.dumps({"data": chart.data, "layout": chart.layout}).replace("<", "\\u003c")
    kind = ' class="wide"' if chart.wide else ""
    caption = f"{escape(chart.title)}<span>{escape(chart.caption)}</span>"
    return (
        f"<figure{kind}><figcaption>{caption}</figcaption>"
        f'<div class="plot"></div><script type="application/json">{spec}</script></figure>'
    )


def figures_part(run: Run) -> str:
    """Return the table of all figures."""
    rows = []
    for figure in FIGURES:
        found = distribution(values_of(figure, run.records))
        if found is not None:
            values = [value_of(figure, value) for value in (found.mean, *found.percentiles)]
            rows.append([figure.title, *values, str(found.count), figure.formula])
    head = ["figure", "mean", *(f"p{p}" for p in PERCENTILES), "values", "formula"]
    notes = f"Of intact answers. {FORMULAS['percentiles']}."
    return table_part(head, rows, notes, words=(len(head) - 1,))


def classes_part(run: Run) -> str:
    """Return the table of classes."""
    seconds = schedule_s(run)
    rows = []
    for c in [attainment(run.records), *attainment_by_class(run.records)]:
        counts = map(str, (c.requests, c.intact, c.ttft_met, c.tpot_met, c.latency_met, c.met))
        goodput = number(goodput_rps(c.met, seconds))
        rows.append([c.class_name or "all", *counts, share_of(c), goodput])
    head = ["class", "requests", "intact", "TTFT met", "TPOT met", "in time", "all met"]
    notes = f"As promised: {FORMULAS['attainment']}. Goodput: {FORMULAS['goodput_rps']}."
    return table_part([*head, "as promised", "goodput/s"], rows, notes)


def hops_part(taken: Sequence[Hop]) -> str:
    """Return the tables of the requests that questions took."""
    notes = ". ".join(f"{name}: {formula}" for name, formula in HOP_FORMULAS.items())
    counts = table_part(HOP_COLUMNS, map(hop_row, taken), words=(len(HOP_COLUMNS) - 1,))
    rows = [row for hop in taken for row in hop_figure_rows(hop)]
    return counts + table_part(HOP_FIGURE_COLUMNS, rows, f"{notes}.", words=(1,))


def _errors(run: Run) -> str:
    rows = []
    for cause, count in errors(run.records).items():
        example = next(r.detail for r in run.records if r.verdict == cause)
        rows.append([cause, str(count), example])
    return table_part(["cause", "requests", "for example"], rows, words=(2,), kind="failed")


def decisions_part(told: Decisions) -> str:
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
    return table_part(["decision", "requests"], rows, words=(1,))


def _lossless(check: LosslessCheck) -> str:
    verdict = "passed" if check.passed else "FAILED"
    bound = (
        ""
        if check.rate_bound is None
        else (f" At most {check.rate_bound:.1%} of answers differ, with 95 % confidence.")
    )
    told = (
        f"{verdict}: {check.compared} answers asked again without speculation,"
        f" {check.drafted} of them with drafts; {len(check.differences)} differ,"
        f" {len(check.failed)} replays failed, {check.incomparable} of another numerics class."
    )
    rows = [[str(d.index), str(d.at), d.run, d.replay] for d in check.differences]
    rows += [[str(index), "", "", words] for index, words in check.failed]
    head = ["request", "from character", "in the run", "in the replay"]
    table = table_part(head, rows, words=(2, 3), kind="failed") if rows else ""
    kind = "" if check.passed else ' class="failed"'
    return f"<p{kind}>{escape(told + bound)}</p>{table}"


def _settings(run: Run) -> str:
    rows = [[name, value] for name, value in flattened(run.settings) if value is not None]
    rows.append(["duration, s", number(run.duration_s)])
    rows.append(["schedule, s", number(run.scheduled_duration_s)])
    if run.health is not None:
        health = run.health
        lags = f"p99 {health.p99_lag_s * 1e3:.2f} ms, at most {health.max_lag_s * 1e3:.2f} ms"
        rows.append(["generator's lag behind schedule", lags])
        rows.append(["generator's CPU", f"{health.cpu_share:.0%} of a core"])
        rows.append(["generator's longest stall", f"{health.loop_stall_s * 1e3:.2f} ms"])
    return table_part(
        ["setting", "value"], [[name, str(value)] for name, value in rows], words=(1,)
    )


def flattened(settings: dict[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """Yield names and values, those of inner dictionaries by dotted names."""
    for name, value in settings.items():
        if isinstance(value, dict):
            yield from flattened(value, f"{prefix}{name}.")
        else:
            yield f"{prefix}{name}", value


def table_part(
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
        f'<div class="scroll"><table class="{kind}">{caption}<thead>{cells("th", head)}</thead>'
        f"<tbody>{body}</tbody></table></div>"
    )
