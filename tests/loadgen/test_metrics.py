"""Tests of every metric against values calculated by hand."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from draftgate.loadgen.checking.lossless import LosslessCheck
from draftgate.loadgen.measuring.confidence import wilson
from draftgate.loadgen.measuring.metrics import (
    METRICS,
    chunk_gaps_s,
    distribution,
    errors,
    fluidity,
    itls_s,
    latency_s,
    latency_sent_s,
    normalized_latency_s,
    percentile,
    tokens_per_chunk,
    tpot_s,
    ttft_s,
    ttft_sent_s,
    values_of,
)
from draftgate.loadgen.measuring.speculation import total_speculation
from draftgate.loadgen.measuring.summary import accepted_tokens_per_s, summarize
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.types import ClientHealth, Slo
from tests.loadgen.known_records import HEALTHY, a_run, failed, record, speculation


def test_metrics_of_one_request() -> None:
    """Every metric of a request with nine tokens equals the value calculated by hand."""
    one = record()
    assert ttft_s(one) == pytest.approx(0.5)
    assert ttft_sent_s(one) == pytest.approx(0.49)
    assert tpot_s(one) == pytest.approx(0.4 / 8)
    assert latency_s(one) == pytest.approx(0.92)
    assert latency_sent_s(one) == pytest.approx(0.91)
    assert normalized_latency_s(one) == pytest.approx(0.92 / 9)
    assert chunk_gaps_s(one) == pytest.approx([0.1, 0.1, 0.2])
    assert tokens_per_chunk(one) == pytest.approx([2.25] * 4)
    assert itls_s(one) == pytest.approx([0.1 / 2.25] * 4 + [0.2 / 2.25] * 2)


def test_reported_tokens_per_chunk_are_used() -> None:
    """The latencies divide each gap by the reported tokens of the chunk, once per token."""
    one = record(chunk_tokens=[1, 2, 1, 5])
    assert tokens_per_chunk(one) == [1, 2, 1, 5]
    assert itls_s(one) == pytest.approx([0.05] * 2 + [0.1] + [0.04] * 5)
    assert tokens_per_chunk(record(chunk_tokens=[1, None, 1, 5])) == pytest.approx([2.25] * 4)
    assert itls_s(record(chunk_tokens=[1, 0, 1, 5])) == pytest.approx([0.1] + [0.04] * 5)


def test_choices_share_the_tokens() -> None:
    """The number of tokens is the mean over three choices."""
    one = record(tokens=27, n=3)
    assert tpot_s(one) == pytest.approx(0.4 / 8)
    assert normalized_latency_s(one) == pytest.approx(0.92 / 9)
    assert tokens_per_chunk(one) == pytest.approx([6.75] * 4)


def test_unknown_metrics_are_none() -> None:
    """A metric without text, usage or a second token is None and not zero."""
    silent, uncounted, single = record(chunks=()), record(tokens=None), record(tokens=1)
    assert [ttft_s(silent), ttft_sent_s(silent), tpot_s(silent)] == [None] * 3
    assert chunk_gaps_s(silent) == tokens_per_chunk(silent) == itls_s(silent) == []
    assert [tpot_s(uncounted), normalized_latency_s(uncounted)] == [None] * 2
    assert tokens_per_chunk(uncounted) == itls_s(uncounted) == []
    assert tpot_s(single) is None
    assert fluidity(record()) is None


@pytest.mark.parametrize(
    ("limits", "gaps_s", "chunk_tokens", "expected"),
    [
        # The tokens are due at 0.6, 0.7, 0.8, 0.9 and arrive at 0.5, 0.6, 0.7, 0.9.
        ((0.6, 0.1), (0.1, 0.1, 0.2), [1, 1, 1, 1], 1.0),
        # The second is due at 0.6 and arrives at 0.7, so the next are due at 0.8 and 0.9.
        ((0.5, 0.1), (0.2, 0.1, 0.1), [1, 1, 1, 1], 0.75),
        # The first sets the start at 0.5. Four arrive at 0.75, due at 0.6, 0.7, 0.8, 0.9.
        ((None, 0.1), (0.25,), [1, 4], 3 / 5),
        # The next token is due at 0.75 + (4 - 2 + 1) 0.1 = 1.05.
        ((None, 0.1), (0.25, 0.29), [1, 4, 1], 4 / 6),
        ((None, 0.1), (0.25, 0.31), [1, 4, 1], 3 / 6),
        # The first text and every chunk are late.
        ((0.1, 0.001), (0.1, 0.1), [1, 1, 1], 0.0),
    ],
)
def test_fluidity_follows_deadlines(limits, gaps_s, chunk_tokens, expected: float) -> None:
    """The tokens keep saved time, and only overdue tokens of a late chunk are late."""
    one = record(
        at_s=0.0,
        gaps_s=gaps_s,
        tokens=sum(chunk_tokens),
        chunk_tokens=chunk_tokens,
        slo=Slo(*limits),
    )
    assert fluidity(one) == pytest.approx(expected)


@pytest.mark.parametrize(("share", "value"), [(0.0, 1.0), (0.5, 2.0), (0.75, 2.5), (1.0, 3.0)])
def test_percentiles_interpolate(share: float, value: float) -> None:
    """A percentile interpolates between its neighbours."""
    assert percentile([1.0, 2.0, 3.0], share) == pytest.approx(value)


def test_percentiles_match_numpy() -> None:
    """Percentiles equal numpy's default, and an empty list has no distribution."""
    values = np.random.default_rng(0).exponential(size=237)
    found = distribution(values)
    assert found.percentiles == pytest.approx(np.percentile(values, [50, 90, 99]))
    assert (found.count, found.mean) == (237, pytest.approx(values.mean()))
    assert distribution([]) is None


def test_only_intact_responses_have_metrics() -> None:
    """A cut stream gives no TTFT and no tokens, but the error count includes its cause."""
    records = [record(0), failed(1), failed(2, "stalled"), failed(3)]
    assert values_of(METRICS["ttft_s"], records) == pytest.approx([0.5])
    assert len(values_of(METRICS["chunk_gap_s"], records)) == 3
    assert errors(records) == {"cut": 2, "stalled": 1}


def test_speculation_reports_are_counted() -> None:
    """The totals count choices, sum tokens, and add histograms by position."""
    longer = speculation(2, 4, 1, acceptance_histogram=[1, 0, 0, 0, 0, 3], price=0.4)
    totals = total_speculation([record(metrics=speculation()), record(metrics=longer), record()])
    assert len(totals.reports) == 2
    assert totals.count("max_draft_tokens") == {4: 1, 2: 1}
    assert totals.count("mode") == {"auto": 2}
    assert totals.count("proposer") == {"ngram": 2}
    assert totals.count("worker_id") == {"w0": 2}
    assert [totals.sum(name) for name in ("steps", "drafted", "accepted")] == [4, 12, 7]
    assert totals.histogram == (1, 0, 1, 0, 1, 3)
    assert totals.acceptance == pytest.approx(7 / 12)
    assert totals.accepted_per_step == pytest.approx(7 / 4)
    assert totals.mean_price == pytest.approx(0.25)


def test_each_prompt_has_its_own_report() -> None:
    """The totals include the report of each prompt once, and not also their sum."""
    several = speculation(4, 16, 12)
    several["prompts"] = [speculation(4), speculation(2) | {"worker_id": "w1"}]
    totals = total_speculation([record(metrics=several)])
    assert (len(totals.reports), totals.sum("drafted")) == (2, 16)
    assert totals.count("worker_id") == {"w0": 1, "w1": 1}


def test_malformed_speculation_reports_are_ignored() -> None:
    """The totals ignore missing reports and values of a wrong type."""
    report = {"num_drafted_tokens": 8, "num_accepted_tokens": 3, "mode": 7, "num_spec_steps": "2"}
    report["price"] = "dear"
    totals = total_speculation([record(metrics={"speculative_decoding": report})])
    assert [totals.sum(name) for name in ("drafted", "accepted", "steps")] == [8, 3, 0]
    assert totals.count("mode") == {}
    assert (totals.accepted_per_step, totals.mean_price) == (None, None)
    for metrics in (None, {}, {"speculative_decoding": None}, {"prompts": ["?"]}):
        assert total_speculation([record(metrics=metrics)]) is None


def test_the_summary_has_its_documented_form() -> None:
    """`summary/1` has its documented keys, and otherwise only `details`."""
    summary = summarize(a_run())
    assert list(summary) == [
        "requests",
        "valid",
        "goodput_rps",
        "attainment",
        "errors",
        "accepted_tokens_per_s",
        "ttft_s",
        "tpot_s",
        "latency_s",
        "details",
    ]
    assert (summary["requests"], summary["valid"]) == (4, True)
    assert (summary["goodput_rps"], summary["attainment"]) == (1.0, 0.5)
    assert summary["errors"] == {"cut": 1}
    assert summary["accepted_tokens_per_s"] == pytest.approx(27 / 4.0)
    assert set(summary["ttft_s"]) == {"mean", "p50", "p90", "p99"}
    assert summary["ttft_s"]["mean"] == pytest.approx((0.5 + 0.7 + 0.5) / 3)
    details = summary["details"]
    assert details["attainment_interval"] == list(wilson(2, 4))
    assert details["classes"]["batch"]["errors"] == {"cut": 1}
    assert details["classes"]["interactive"]["goodput_rps"] == 0.5
    assert details["classes"]["interactive"]["met_ttft"] == 1
    assert details["decisions"]["max_draft_tokens"] == {"0": 1, "2": 1, "4": 1}
    assert {metric.key for metric in METRICS.values()} <= set(details["formulas"])


@pytest.mark.parametrize("scheduled_s", [None, 0.0])
def test_without_a_schedule_goodput_is_over_the_run(scheduled_s: float | None) -> None:
    """A closed loop, or a trace without length, uses the duration of the run."""
    run = a_run(scheduled_duration_s=scheduled_s)
    assert summarize(run)["goodput_rps"] == pytest.approx(2 / 4.0)


def test_a_run_of_no_length_has_no_throughput() -> None:
    """A run of zero seconds has no throughput."""
    assert accepted_tokens_per_s(a_run([], duration_s=0.0)) is None


def test_a_run_with_a_late_generator_is_invalid() -> None:
    """The summary lists the reasons, also for a file without the generator's health."""
    behind = ClientHealth(max_lag_s=0.5, p99_lag_s=0.2, cpu_share=0.2, loop_stall_s=0.4)
    summary = summarize(a_run(health=behind))
    assert summary["valid"] is False
    assert len(summary["details"]["invalid_reasons"]) == 3
    assert "ends early" in invalid_reasons(a_run(health=None))[0]
    assert invalid_reasons(a_run(health=HEALTHY)) == []


def test_the_lossless_check_is_in_the_summary() -> None:
    """The summary has the result, the number of comparisons, and the bound."""
    lossless = summarize(a_run(), LosslessCheck(59, 59, (), (), 0))["details"]["lossless"]
    assert lossless["passed"]
    assert lossless["rate_bound"] == pytest.approx(0.0495, abs=1e-4)
    empty = summarize(a_run(), LosslessCheck(0, 0, (), ((3, "cut: x"),), 0))["details"]["lossless"]
    assert not empty["passed"]


def test_metrics_do_not_depend_on_the_clock() -> None:
    """A shift of the whole run in time changes no metric."""
    one, later = record(at_s=0.0), record(at_s=1000.0)
    for metric in METRICS.values():
        assert list(metric.values(one)) == pytest.approx(list(metric.values(later)))
    assert replace(one, planned=later.planned) != later
