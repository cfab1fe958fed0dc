"""A small run of the benchmark of KV transfers."""

from __future__ import annotations

import asyncio

import pytest

from bench.engine.kv import measure


@pytest.mark.parametrize("place", ["one_process", pytest.param("nodes", marks=pytest.mark.long)])
def test_both_ways_of_resuming_are_measured(place: str) -> None:
    """A round has the times of computing and of pulling, and the bandwidth of the pull."""
    found = asyncio.run(measure((300,), 1, place))["300"]
    assert len(found["compute_s"]) == len(found["pull_s"]) == len(found["transfer_s"]) == 1
    assert 0 < found["transfer_s"][0] < found["pull_s"][0]
    assert found["gb_per_s"] > 0
    assert found["compute_over_pull"] > 0
