"""Builds the tables of reports as text for a terminal or a page."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

from draftgate.loadgen.measuring.hops import HOP_FORMULAS, summarize_hops
from draftgate.loadgen.measuring.metrics import (
    METRICS,
    PERCENTILES,
    distribution,
    errors,
    values_of,
)
from draftgate.loadgen.measuring.slo import attainment, attainment_by_class, goodput_rps
from draftgate.loadgen.measuring.speculation import SpeculationTotals
from draftgate.loadgen.measuring.summary import FORMULAS, schedule_s
from draftgate.loadgen.report.formatting import (
    NOTHING,
    attainment_interval,
    interval,
    metric_value,
    milliseconds,
    number,
    percent,
)
from draftgate.loadgen.report.goodput import estimate_goodputs
from draftgate.loadgen.report.runs import RatePoint
from draftgate.loadgen.types import LoadRun, Record

MOST_SHOWN: Final = 8
"""Most different values of a decision in a list."""

RUN_COLUMNS: Final = (
    *("run", "rate/s", "requests", "failed", "attainment", "[95 %]", "goodput/s", "tokens/s"),
    *("TTFT p50", "p99", "TPOT p50", "p99", "latency p50", "p99"),
)
NARROW: Final = (0, 1, 3, 4, 6, 8, 9, 10, 11)
"""Positions of the columns that fit a terminal of 80 columns."""


@dataclass(frozen=True, slots=True)
class ReportTable:
    """A table.

    Attributes:
        notes: the text below the table.
        words: positions of the columns that hold text. The first column always does.
    """

    head: Sequence[str]
    rows: list[list[str]]
    notes: str = ""
    words: tuple[int, ...] = ()


def metric_table(run: LoadRun) -> ReportTable:
    """Return the distribution of each metric that has values."""
    rows = []
    for metric in METRICS.values():
        found = distribution(values_of(metric, run.records))
        if found is not None:
            values = [metric_value(metric, value) for value in (found.mean, *found.percentiles)]
            rows.append([metric.title, *values, str(found.count), metric.formula])
    head = ("metric", "mean", *(f"p{p}" for p in PERCENTILES), "values", "formula")
    notes = f"Over intact responses. {FORMULAS['percentiles']}."
    return ReportTable(head, rows, notes, (len(head) - 1,))


def class_table(run: LoadRun) -> ReportTable:
    """Return the attainment of each class, and of all classes if several exist.

    The table has a column for each limit that any request has.
    """
    slos = {record.planned.request.slo for record in run.records}
    limits = [
        column
        for column, limited in (
            (("TTFT ok", "ttft_met"), any(slo.ttft_s is not None for slo in slos)),
            (("TPOT ok", "tpot_met"), any(slo.tpot_s is not None for slo in slos)),
            (("in time", "latency_met"), any(slo.latency_s is not None for slo in slos)),
            (("gaps ok", "gap_met"), any(slo.chunk_gap_s is not None for slo in slos)),
        )
        if limited
    ]
    classes = attainment_by_class(run.records)
    rows = []
    for one in classes if len(classes) == 1 else [attainment(run.records), *classes]:
        counts = [one.requests, one.intact, *(getattr(one, name) for _, name in limits)]
        goodput = number(goodput_rps(one.met, schedule_s(run)))
        rows.append([one.class_name or "all", *map(str, counts), attainment_interval(one), goodput])
    names = [name for name, _ in limits]
    head = ("class", "sent", "intact", *names, "attainment [95 %]", "goodput/s")
    notes = f"Attainment: {FORMULAS['attainment']}. Goodput: {FORMULAS['goodput_rps']}."
    return ReportTable(head, rows, notes)


def hop_tables(records: Sequence[Record]) -> Iterator[ReportTable]:
    """Yield the outcomes and the times of hops, or nothing without hops."""
    hops = summarize_hops(records)
    if not hops:
        return
    outcomes, times = [], []
    for hop in hops:
        facts = (f"{fact}: {true} of {known}" for fact, (true, known) in hop.facts.items())
        announced = NOTHING if hop.announced_met is None else hop.announced_met
        counts = (hop.requests, hop.intact, announced)
        outcomes.append([hop.name, *map(str, counts), ", ".join(facts).replace("_", " ")])
        for name, found, text in (
            ("TTFT", hop.ttft_s, milliseconds),
            ("latency", hop.latency_s, milliseconds),
            ("of the deadline", hop.share, percent),
        ):
            if found is not None:
                times.append([hop.name, name, *map(text, (found.mean, *found.percentiles))])
    yield ReportTable(("hop", "requests", "intact", "as announced", "facts"), outcomes, words=(4,))
    head = ("hop", "metric", "mean", *(f"p{p}" for p in PERCENTILES))
    notes = ". ".join(f"{name}: {formula}" for name, formula in HOP_FORMULAS.items())
    yield ReportTable(head, times, f"{notes}.", (1,))


def error_table(records: Sequence[Record]) -> ReportTable:
    """Return the failed requests by cause, each with an example."""
    rows = [
        [cause, str(count), next(r.detail for r in records if r.verdict == cause)]
        for cause, count in errors(records).items()
    ]
    return ReportTable(("failed", "requests", "for example"), rows, words=(2,))


def speculation_table(totals: SpeculationTotals) -> ReportTable:
    """Return the server's decisions about speculation, and the number of accepted drafts."""
    rows = []
    for title, name in (
        ("mode", "mode"),
        ("proposer", "proposer"),
        ("policy", "policy"),
        ("longest draft", "max_draft_tokens"),
        ("worker", "worker_id"),
    ):
        if counted := totals.count(name):
            shown = (f"{value} x {n}" for value, n in counted.most_common(MOST_SHOWN))
            more = f", {len(counted) - MOST_SHOWN} more" if len(counted) > MOST_SHOWN else ""
            rows.append([title, ", ".join(shown) + more])
    drafted, accepted = totals.sum("drafted"), totals.sum("accepted")
    accepted_share = percent(totals.acceptance)
    rows.append(["draft tokens", f"{drafted} drafted, {accepted} accepted ({accepted_share})"])
    rows.append(["accepted per step", number(totals.accepted_per_step)])
    rows.append(["mean price of a slot", number(totals.mean_price, 3)])
    return ReportTable(("speculation", "requests"), rows, words=(1,))


def run_table(points: Sequence[RatePoint]) -> ReportTable:
    """Return a row for each name and rate, with the columns `RUN_COLUMNS`."""
    rows = []
    for point in points:
        counted = attainment(point.records)
        row = [point.label, number(point.rate_rps), str(counted.requests)]
        row += [str(counted.requests - counted.intact), percent(counted.share)]
        row += [interval(counted)]
        row += [number(point.goodput_rps), number(point.accepted_tokens_per_s, 1)]
        for key in ("ttft_s", "tpot_s", "latency_s"):
            known = point.percentiles(key)
            row += [milliseconds(known.get(p)).removesuffix(" ms") for p in (50, 99)]
        rows.append(row)
    notes = "Times in ms from the scheduled times, over intact responses."
    return ReportTable(RUN_COLUMNS, rows, notes)


def goodput_table(points: Sequence[RatePoint]) -> ReportTable:
    """Return the goodput of each name and share, without rows for a single rate."""
    rows = []
    several = len({point.rate_rps for point in points}) > 1
    for found in estimate_goodputs(points) if several else ():
        if found.rate_rps is not None:
            estimate = number(found.rate_rps)
        elif found.holds_rps is None:
            estimate = "below all rates"
        else:
            estimate = f"at least {number(found.holds_rps)}"
        ends = (NOTHING if end is None else number(end) for end in (found.low_rps, found.high_rps))
        rows.append([found.name, f"{found.share:.0%}", estimate, " to ".join(ends)])
    notes = (
        "Estimate: interpolated between the last rate that holds and the next. Bracket: the highest"
        " rate that holds and the lowest that does not, with 95 % confidence each."
    )
    head = ("goodput, requests/s", "share", "estimate", "bracket")
    return ReportTable(head, rows, notes)
