"""A small run of the benchmark of KV transfers."""

from __future__ import annotations

import asyncio

import pytest

from bench.engine.kv import measure


@pytest.mark.parametrize("place", ["one_process", pytest.param("nodes", marks=pytest.mark.long)])
def test_both_ways_of_each_case_are_measured(place: str) -> None:
    """A round has the times of computing and of pulling, and the bandwidth of the pull, for resumed
    requests and for new requests with a shared prefix."""
    found = asyncio.run(measure((300,), (320,), 1, place))
    assert list(found) == ["resume", "prefix_fetch"]
    for by_length in found.values():
        (result,) = by_length.values()
        assert len(result["compute_s"]) == len(result["pull_s"]) == 1
        assert 0 < result["transfer_s"][0] < result["pull_s"][0]
        assert result["gb_per_s"] > 0
        assert result["compute_over_pull"] > 0
