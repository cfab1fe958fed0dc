"""Tests of `draftgate bench reindexing`: what the report says of known counts."""

from __future__ import annotations

import pytest

from bench.gateway.reindexing import ARMS, REINDEXED, Counts, body, report


def test_report_covers_all_rounds() -> None:
    """Latencies are over the queries of all rounds, and rates over their time."""
    rounds = [
        Counts([0.01] * 99, documents=16, tokens=64, seconds=2.0),
        Counts([0.03], documents=16, failed=1, seconds=2.0),
    ]
    found = report(rounds)
    assert (found["queries"], found["failed"]) == (100, 1)
    assert (found["documents_per_s"], found["tokens_per_s"]) == (8.0, 16.0)
    assert found["reindexing_s"] == REINDEXED / 8.0
    assert found["query_s"]["p50"] == 0.01
    assert 0.01 <= found["query_s"]["p99"] <= 0.03
    assert found["query_s"]["mean"] == pytest.approx(0.0102)


def test_an_arm_without_queries_has_no_latency() -> None:
    """The page shows arms without queries and arms without documents."""
    idle = {arm: report([Counts(seconds=1.0)]) for arm in ARMS}
    assert "query_s" not in idle["documents"]
    results = {"command": "c", "commit": "x", "date": "d", "bounded_step_s": 0.01, "arms": idle}
    page = "".join(body(results))
    assert all(arm in page for arm in ARMS)
