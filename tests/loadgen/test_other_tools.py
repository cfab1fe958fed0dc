"""Tests of the metrics of other tools, on records calculated by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.other_tools import TOOLS, ToolReport, weighted_percentile
from draftgate.loadgen.types import LoadRun, Slo
from tests.loadgen.known_records import a_run, failed, record

PLAIN = record(0, 0.0, first_s=0.51, gaps_s=(0.1, 0.1, 0.2), tokens=5, connect_s=0.004)
"""Sent at 0.01 after 4 ms of connecting, with text at 0.51, 0.61, 0.71 and 0.91, ends at 0.93."""

ONE_TOKEN = record(1, 1.0, first_s=0.31, gaps_s=(), tokens=1)
"""Sent at 1.01, with text at 1.31, ends at 1.33."""


def report_of(name: str, *records, **fields) -> ToolReport:
    """Return the report of a tool about a run of these records."""
    return TOOLS[name](a_run(list(records), **fields))


def count_of(report: ToolReport, name: str) -> float | None:
    """Return a single value."""
    return next(one.value for one in report.counts if one.name == name)


def values_of(report: ToolReport, name: str) -> dict[str, float] | None:
    """Return a distribution in milliseconds."""
    found = next(one.values for one in report.distributions if one.name == name)
    return None if found is None else dict(found)


def mean_of(report: ToolReport, name: str) -> float:
    """Return the mean of a distribution in milliseconds."""
    values = values_of(report, name)
    assert values is not None
    return values[report.columns[0]]


@pytest.mark.parametrize(
    ("name", "metric", "expected_ms"),
    [
        ("vllm", "TTFT", 504),  # from the call, 4 ms before the first byte
        ("vllm", "E2EL", 904),  # to the last chunk
        ("vllm", "TPOT", (904 - 504) / 4),
        ("vllm", "ITL", 400 / 3),
        ("guidellm", "TTFT", 500),  # from writing the head
        ("guidellm", "Request latency", 920),  # to the end of the stream
        ("guidellm", "Scheduled latency", 930),
        ("guidellm", "TPOT", 900 / 5),  # includes the time to the first token
        ("guidellm", "ITL", 400 / 4),
        ("aiperf", "Time to First Token", 504),
        ("aiperf", "Request Latency", 904),
        ("aiperf", "Effective Latency", 930),
        ("aiperf", "Inter Token Latency", 400 / 4),
        ("aiperf", "Inter Chunk Latency", 400 / 3),
    ],
)
def test_each_metric_follows_its_tools_formula(name: str, metric: str, expected_ms: float) -> None:
    """Each tool's metric of a known response follows that tool's formula."""
    assert mean_of(report_of(name, PLAIN), metric) == pytest.approx(expected_ms)


def test_only_vllm_counts_an_empty_first_chunk() -> None:
    """An empty chunk shortens the TTFT of vLLM, but not of other tools."""
    hollow = replace(PLAIN, empty_s=(0.02,))
    assert mean_of(report_of("vllm", hollow), "TTFT") == pytest.approx(14)
    assert mean_of(report_of("vllm", hollow), "TPOT") == pytest.approx((904 - 14) / 4)
    assert values_of(report_of("vllm", hollow), "ITL")["p99"] > 480
    for name, metric in (("guidellm", "TTFT"), ("aiperf", "Time to First Token")):
        assert mean_of(report_of(name, hollow), metric) == mean_of(report_of(name, PLAIN), metric)


def test_guidellm_weighs_requests_by_their_tokens() -> None:
    """guidellm's TPOT is total time over total tokens, not a mean of means."""
    tpot_ms = (900 + 300) / (5 + 1)
    assert mean_of(report_of("guidellm", PLAIN, ONE_TOKEN), "TPOT") == pytest.approx(tpot_ms)
    assert mean_of(report_of("guidellm", PLAIN, ONE_TOKEN), "ITL") == pytest.approx(100)


@pytest.mark.parametrize(
    ("share", "expected"), [(0.01, 1.0), (0.25, 1.0), (0.26, 2.0), (0.5, 2.0), (0.99, 4.0)]
)
def test_guidellms_percentiles_are_observed_values(share: float, expected: float) -> None:
    """The percentile is the first value at which the share of the weight is reached."""
    assert weighted_percentile([(1.0, 1.0), (2.0, 1.0), (4.0, 2.0)], share) == expected


@pytest.mark.parametrize(
    ("name", "good", "bad"),
    [
        ("vllm", "Successful requests", "Failed requests"),
        ("guidellm", "Requests successful", "Requests errored"),
        ("aiperf", "Request Count", "Error Request Count"),
    ],
)
def test_tools_define_success_differently(name: str, good: str, bad: str) -> None:
    """All tools count a truncated stream as a success, and all but guidellm an error event."""

    def counts(verdict: Verdict) -> tuple[float | None, float | None]:
        report = report_of(name, failed(0, verdict))
        return count_of(report, good), count_of(report, bad)

    assert counts(Verdict.NO_FINISH_REASON) == (1, 0)
    assert counts(Verdict.DUPLICATED) == (1, 0)
    assert counts(Verdict.ERROR_EVENT) == ((0, 1) if name == "guidellm" else (1, 0))
    assert counts(Verdict.CUT) == (0, 1)
    aborted = failed(0, Verdict.ERROR_EVENT, finish_reasons=("abort",))
    assert count_of(report_of(name, aborted), good) == 1
    silent = record(0, verdict=Verdict.NO_FINISH_REASON, chunks=())
    assert count_of(report_of(name, silent), good) == 0


def test_without_a_usage_tools_count_differently() -> None:
    """vLLM counts chunks without a usage, guidellm the requested tokens, and aiperf no tokens."""
    cut = replace(PLAIN, usage=None, verdict=Verdict.NO_FINISH_REASON)
    assert count_of(report_of("vllm", cut), "Total generated tokens") == 4
    assert mean_of(report_of("vllm", cut), "TPOT") == pytest.approx(400 / 3)
    assert count_of(report_of("guidellm", cut), "Output tokens") == 64
    assert mean_of(report_of("guidellm", cut), "ITL") == pytest.approx(400 / 63)
    assert count_of(report_of("aiperf", cut), "Total Output Tokens") == 0
    assert values_of(report_of("aiperf", cut), "Inter Token Latency") is None
    slow = Slo(tpot_s=1.0)
    promised = replace(cut.planned, request=replace(cut.planned.request, slo=slow))
    assert count_of(report_of("aiperf", replace(cut, planned=promised)), "Goodput (/s)") == 0


def test_one_token_meets_vllms_limit_and_no_other() -> None:
    """A response of one token meets the TPOT limit only by vLLM's definition."""
    strict = Slo(ttft_s=1.0, tpot_s=1e-9)
    question = replace(ONE_TOKEN.planned.request, slo=strict)
    one = replace(ONE_TOKEN, planned=replace(ONE_TOKEN.planned, request=question))
    seconds = {"duration_s": 2.0}
    assert count_of(report_of("vllm", one, **seconds), "Request goodput (req/s)") == 0.5
    assert count_of(report_of("guidellm", one, **seconds), "SLO attainment") is None
    assert count_of(report_of("aiperf", one, **seconds), "Goodput (/s)") == 0


def test_errors_lower_guidellms_attainment() -> None:
    """guidellm counts an errored request as missed, but excludes an incomplete request."""
    report = report_of("guidellm", PLAIN, failed(1), failed(2, Verdict.INTERRUPTED))
    assert count_of(report, "SLO attainment") == pytest.approx(1 / 2)
    assert count_of(report, "Requests incomplete") == 1


def test_tools_divide_rates_by_different_durations() -> None:
    """vLLM divides by the run, guidellm by its window, and aiperf by the time to the last text."""
    records, seconds = (PLAIN, ONE_TOKEN), {"duration_s": 4.0}
    expected = {"vllm": 2 / 4.0, "guidellm": 2 / (1.33 - 0.01), "aiperf": 2 / (1.31 - 0.006)}
    names = {
        "vllm": "Request throughput (req/s)",
        "guidellm": "Requests per second",
        "aiperf": "Request Throughput (/s)",
    }
    for name, value in expected.items():
        assert count_of(report_of(name, *records, **seconds), names[name]) == pytest.approx(value)


@pytest.mark.parametrize("name", TOOLS)
def test_a_run_without_responses_has_a_report(name: str) -> None:
    """A run with only failures, or without requests, gives a report without values."""
    for run in (a_run([failed(0)]), LoadRun({})):
        report = TOOLS[name](run)
        assert all(one.values is None for one in report.distributions)
        known = [one.value for one in report.counts if one.value is not None]
        assert all(math.isfinite(value) for value in known)
