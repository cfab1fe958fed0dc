"""Reports a run by the metric names and definitions of other load generators.

The definitions follow the sources of the named versions, and were checked against the tools' output
for a server of known behaviour (docs/guide/load-testing.md). Reports reproduce them without
corrections.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from enum import StrEnum
from itertools import accumulate, pairwise
from typing import Final, NamedTuple

from rich.console import Group, RenderableType
from rich.table import Table
from rich.text import Text

from draftgate.loadgen.checking.audit import ABORTS, Verdict
from draftgate.loadgen.measuring.metrics import completion_tokens, percentile
from draftgate.loadgen.report.formatting import NOTHING, number
from draftgate.loadgen.types import LoadRun, Record, Slo

BROKEN: Final = frozenset(
    {
        Verdict.NO_CONNECTION,
        Verdict.HTTP_STATUS,
        Verdict.NO_STREAM,
        Verdict.CUT,
        Verdict.TIMEOUT,
        Verdict.STALLED,
        Verdict.INTERRUPTED,
    }
)
"""Verdicts that every tool counts as failures. Only Draftgate's load generator has the two
timeouts, because those of the tools are hours."""

Columns = Mapping[str, float | None]
"""The columns of distributions, with the tool's names, and the share of each percentile. The column
without a share is the mean."""


class ToolCount(NamedTuple):
    """A single value, or None where the tool would show no value."""

    name: str
    value: float | None
    formula: str


class ToolDistribution(NamedTuple):
    """A distribution in milliseconds, by column, with None where the tool would show no value."""

    name: str
    formula: str
    values: Mapping[str, float] | None


@dataclass(frozen=True, slots=True)
class ToolReport:
    """A report about a run by the definitions of a tool.

    Attributes:
        tool: its name and the version of its definitions.
        remarks: values that the tool does not see, or that the records do not hold.
    """

    tool: str
    columns: tuple[str, ...]
    counts: Sequence[ToolCount]
    distributions: Sequence[ToolDistribution]
    remarks: tuple[str, ...]


@dataclass(frozen=True, slots=True)
class Success:
    """A request that a tool counts as a success, by the clock of the run in seconds.

    Attributes:
        began_s: the time from which the tool counts.
        times_s: the times of the chunks that the tool sees, at least one.
        tokens: the number of tokens by the tool, or None if it knows none.
    """

    record: Record
    began_s: float
    times_s: Sequence[float]
    tokens: int | None

    @property
    def slo(self) -> Slo:
        """The limits of the request."""
        return self.record.planned.request.slo

    @property
    def ttft_s(self) -> float:
        """The time to the first chunk."""
        return self.times_s[0] - self.began_s

    @property
    def latency_s(self) -> float:
        """The time to the last chunk."""
        return self.times_s[-1] - self.began_s

    @property
    def gaps_s(self) -> list[float]:
        """The times between chunks."""
        return [after - before for before, after in pairwise(self.times_s)]

    @property
    def itl_s(self) -> float | None:
        """The mean time per token after the first, or None for fewer than two known tokens."""
        if self.tokens is None or self.tokens < 2:
            return None
        return (self.times_s[-1] - self.times_s[0]) / (self.tokens - 1)


def vllm_report(run: LoadRun) -> ToolReport:
    """Return the report of `vllm bench serve`: `serve.py` and `lib/endpoint_request_func.py`.

    A request with any chunk is a success. The clock starts at the call of the HTTP client, so
    opening a connection counts. The clock ends at the last chunk, so the end of the stream does not
    count. In a chat a delta with a role is not a chunk, but an empty delta without a role is. In
    completions every delta is a chunk. TPOT is 0 for one token, which meets any limit.
    """
    columns = {"mean": None, "median": 0.5, "p90": 0.9, "p99": 0.99}
    good = []
    for record in run.records:
        times = sorted([*(chunk.at_s for chunk in record.chunks), *record.empty_s])
        if times and record.verdict not in BROKEN | {Verdict.MALFORMED}:
            tokens = completion_tokens(record) or len(times)
            good.append(Success(record, _called_s(record), times, tokens))
    tokens, seconds = sum(one.tokens or 0 for one in good), run.duration_s
    met = sum(within(o.ttft_s, o.slo.ttft_s) and within(o.itl_s or 0.0, o.slo.tpot_s) for o in good)
    goodput = "within TTFT and TPOT limits / duration; one token has TPOT 0"
    tpots_s = [one.itl_s for one in good if one.itl_s is not None]
    gaps_s = [gap for one in good for gap in one.gaps_s]
    return ToolReport(
        "vllm bench serve 0.33.0",
        tuple(columns),
        (
            ToolCount("Successful requests", len(good), "status 200 and at least one chunk"),
            ToolCount("Failed requests", len(run.records) - len(good), "all others"),
            ToolCount("Benchmark duration (s)", seconds, "start to end of the last request"),
            ToolCount("Total generated tokens", tokens, "usage of successes"),
            _rate("Request throughput (req/s)", len(good), seconds, "successes / duration"),
            _rate("Request goodput (req/s)", met, seconds, f"successes {goodput}"),
            _rate("Output token throughput (tok/s)", tokens, seconds, "tokens / duration"),
        ),
        (
            interpolated("TTFT", "first chunk - call", [o.ttft_s for o in good], columns),
            interpolated("TPOT", "(E2EL - TTFT) / (n - 1)", tpots_s, columns),
            interpolated("ITL", "chunk(i) - chunk(i - 1), pooled", gaps_s, columns),
            interpolated("E2EL", "last chunk - call", [o.latency_s for o in good], columns),
        ),
        (
            "vLLM tokenizes a text without a usage, but this report counts each chunk as a token",
            "no metric would include time spent waiting for --max-concurrency",
        ),
    )


def aiperf_report(run: LoadRun) -> ToolReport:
    """Return the report of `aiperf profile --use-server-token-count`: `aiperf/metrics/types/`.

    A request with any text is a success, unless an event of the type `error` arrived. The clock
    starts at the call of the HTTP client and ends at the last text. Only the effective latency
    counts from the schedule to the end of the stream. ITL and TPOT are one metric, a mean per
    request.
    """
    columns = {"avg": None, "p50": 0.5, "p90": 0.9, "p99": 0.99}
    good = [
        Success(one, _called_s(one), [chunk.at_s for chunk in one.chunks], completion_tokens(one))
        for one in run.records
        if one.chunks and one.verdict not in BROKEN
    ]
    tokens = sum(one.tokens or 0 for one in good)
    met = sum(within(o.ttft_s, o.slo.ttft_s) and within(o.itl_s, o.slo.tpot_s) for o in good)
    seconds = max((one.times_s[-1] for one in good), default=0.0)
    seconds -= min((one.began_s for one in good), default=0.0)
    goodput = "within TTFT and ITL limits / duration; without ITL not met"
    itls_s = [one.itl_s for one in good if one.itl_s is not None]
    gaps_s = [gap for one in good for gap in one.gaps_s]
    effective_s = [one.record.end_s - one.record.scheduled_s for one in good]
    ttfts_s, latencies_s = [o.ttft_s for o in good], [o.latency_s for o in good]
    return ToolReport(
        "aiperf 0.13.0",
        tuple(columns),
        (
            ToolCount("Request Count", len(good), "text arrived"),
            ToolCount("Error Request Count", len(run.records) - len(good), "all others"),
            ToolCount("Benchmark Duration (s)", seconds, "first call to last text, of successes"),
            ToolCount("Total Output Tokens", tokens, "usage of successes"),
            _rate("Request Throughput (/s)", len(good), seconds, "successes / duration"),
            _rate("Goodput (/s)", met, seconds, f"successes {goodput}"),
            _rate("Output Token Throughput (/s)", tokens, seconds, "tokens / duration"),
        ),
        (
            interpolated("Time to First Token", "first text - call", ttfts_s, columns),
            interpolated("Request Latency", "last text - call", latencies_s, columns),
            interpolated("Effective Latency", "end - scheduled", effective_s, columns),
            interpolated("Inter Token Latency", "(latency - TTFT) / (n - 1)", itls_s, columns),
            interpolated("Inter Chunk Latency", "text(i) - text(i - 1), pooled", gaps_s, columns),
        ),
        (
            "an error event counts, but an error that the server sends as data does not",
            "a request without a usage has no tokens, no ITL, and no goodput",
            "percentiles of inter-chunk latencies are exact, but aiperf estimates them (t-digest)",
        ),
    )


def guidellm_report(run: LoadRun) -> ToolReport:
    """Return the report of `guidellm run`: `schemas/base/request_stats.py` and `metrics.py`.

    A stream that ends is a success unless it held an error event. The clock starts when the client
    writes the head of the request. TPOT includes the time to the first token. TPOT and ITL are
    means over tokens rather than requests, so each request weighs as many tokens as it has.
    Percentiles are observed values, without interpolation.
    """
    columns = {"mean": None, "median": 0.5, "p90": 0.9, "p95": 0.95, "p99": 0.99}
    good = []
    for one in run.records:
        broken = one.verdict in BROKEN | {Verdict.MALFORMED} or has_error_event(one)
        if one.chunks and not broken:
            reported = completion_tokens(one)
            tokens = one.planned.request.max_tokens if reported is None else reported
            good.append(Success(one, one.sent_s, [chunk.at_s for chunk in one.chunks], tokens))
    stopped = sum(record.verdict == Verdict.INTERRUPTED for record in run.records)
    errored = len(run.records) - len(good) - stopped
    seconds = max((record.end_s for record in run.records), default=0.0)
    seconds -= min((record.sent_s for record in run.records), default=0.0)
    tokens, outcomes = sum(one.tokens or 0 for one in good), [_conforms(one) for one in good]
    conforming, judged = outcomes.count(True), len(good) - outcomes.count(None) + errored
    attainment = conforming / judged if judged else None

    def weighted(name: str, formula: str, pairs: Sequence[tuple[float, float]]) -> ToolDistribution:
        """Return a distribution of (seconds, weight) pairs."""
        known = sorted(pair for pair in pairs if pair[1] > 0)
        if not known:
            return ToolDistribution(name, formula, None)
        mean_s = sum(value * weight for value, weight in known) / sum(w for _, w in known)
        values = {
            column: (mean_s if share is None else weighted_percentile(known, share)) * 1e3
            for column, share in columns.items()
        }
        return ToolDistribution(name, formula, values)

    ends_s = [(one.record.end_s - one.began_s, 1.0) for one in good]
    scheduled_s = [(one.record.end_s - one.record.scheduled_s, 1.0) for one in good]
    tpots_s = [(one.latency_s / max(1, one.tokens or 0), float(one.tokens or 0)) for one in good]
    itls_s = [(one.itl_s, (one.tokens or 0) - 1.0) for one in good if one.itl_s is not None]
    return ToolReport(
        "guidellm 0.8.1",
        tuple(columns),
        (
            ToolCount("Requests successful", len(good), "the stream ended without an error event"),
            ToolCount("Requests errored", errored, "all others"),
            ToolCount("Requests incomplete", stopped, "open when the run was stopped"),
            _rate("Requests per second", len(good), seconds, "successes / window"),
            ToolCount("Output tokens", tokens, "usage of successes"),
            _rate("Output tokens per second", tokens, seconds, "output tokens / window"),
            _rate("Request goodput", conforming, seconds, "within TTFT and ITL limits / window"),
            ToolCount("SLO attainment", attainment, "the same / (successes + errored)"),
        ),
        (
            weighted("Request latency", "end of stream - head written", ends_s),
            weighted("Scheduled latency", "end of stream - scheduled", scheduled_s),
            weighted("TTFT", "first text - head written", [(o.ttft_s, 1.0) for o in good]),
            weighted("TPOT", "(last text - head written) / n, weight n", tpots_s),
            weighted("ITL", "(last text - first text) / (n - 1), weight n - 1", itls_s),
        ),
        (
            "a request without a usage counts all its requested tokens, even if fewer arrived",
            "attainment and goodput exclude a request without a second token",
        ),
    )


def _called_s(record: Record) -> float:
    """Return the time at which the HTTP client was called."""
    return record.sent_s - record.connect_s


def _conforms(one: Success) -> bool | None:
    """Return whether a request met its limits, or None if a limit cannot be checked."""
    checked = [one.slo.ttft_s is None or one.ttft_s <= one.slo.ttft_s]
    if one.slo.tpot_s is not None:
        if one.itl_s is None:
            return None
        checked.append(one.itl_s <= one.slo.tpot_s)
    return all(checked)


def has_error_event(record: Record) -> bool:
    """Whether the stream held an error event. The finish reason `abort` is no error event."""
    aborted = any(reason in ABORTS for reason in record.finish_reasons)
    return record.verdict == Verdict.ERROR_EVENT and not aborted


def interpolated(
    name: str, formula: str, seconds: Sequence[float], columns: Columns
) -> ToolDistribution:
    """Return a distribution with interpolated percentiles."""
    if not seconds:
        return ToolDistribution(name, formula, None)
    known = sorted(seconds)
    values = {
        column: (sum(known) / len(known) if share is None else percentile(known, share)) * 1e3
        for column, share in columns.items()
    }
    return ToolDistribution(name, formula, values)


def weighted_percentile(ascending: Sequence[tuple[float, float]], share: float) -> float:
    """Return the first of (value, weight) pairs at which that share of all weight is reached."""
    reached = list(accumulate(weight for _, weight in ascending))
    # Rounding may leave the running sum below the total.
    wanted = share * reached[-1] * (1 - 1e-12)
    return next(v for (v, _), r in zip(ascending, reached, strict=True) if r >= wanted)


def _rate(name: str, count: float, seconds: float, formula: str) -> ToolCount:
    """Return a count per second, without a value if there is no duration."""
    return ToolCount(name, count / seconds if seconds > 0 else None, formula)


def within(value: float | None, limit: float | None) -> bool:
    """Whether a value meets a limit. Any value meets a limit of None, and None meets no limit."""
    return limit is None or (value is not None and value <= limit)


class OtherTool(StrEnum):
    """The tools that `--as` accepts."""

    VLLM = "vllm"
    GUIDELLM = "guidellm"
    AIPERF = "aiperf"


TOOLS: Final[Mapping[OtherTool, Callable[[LoadRun], ToolReport]]] = {
    OtherTool.VLLM: vllm_report,
    OtherTool.GUIDELLM: guidellm_report,
    OtherTool.AIPERF: aiperf_report,
}


def render_as(run: LoadRun, tool: OtherTool) -> RenderableType:
    """Return the tables of a run by the definitions of one of `TOOLS`."""
    report = TOOLS[tool](run)
    counts = Table(box=None, show_header=False, pad_edge=False)
    for one in report.counts:
        whole = one.value is not None and float(one.value).is_integer()
        shown = Text(number(one.value, 0 if whole else 2), justify="right")
        counts.add_row(one.name, shown, Text(one.formula, style="dim"))
    times = Table("ms", box=None, pad_edge=False)
    for column in report.columns:
        times.add_column(column, justify="right")
    times.add_column("formula", style="dim")
    for spread in report.distributions:
        values = spread.values or {}
        cells = (number(values[c]) if c in values else NOTHING for c in report.columns)
        times.add_row(spread.name, *cells, spread.formula)
    title = Text(f"the same run as {report.tool} defines its metrics", style="bold")
    remarks = (Text(f"note: {remark}", style="dim") for remark in report.remarks)
    return Group(title, counts, "", times, "", *remarks)
