"""A small run of the benchmark of open streams."""

from __future__ import annotations

import pytest

from bench.engine.streams import measure


@pytest.mark.long
def test_every_round_measures_engine_and_servers() -> None:
    """A round has step times of the bare engine and of both servers."""
    found = measure(streams=3, tokens=6, threads=1, rounds=1)
    assert set(found["step_ms"]) == {"bare", "one_process", "own_process"}
    # All tokens of a stream may arrive in one read on a busy machine, and then take no time.
    assert all(len(taken) == 1 and taken[0] >= 0 for taken in found["step_ms"].values())
    assert found["over_bare"]["bare"] == 1.0
