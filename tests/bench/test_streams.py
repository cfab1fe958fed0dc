"""The benchmark of open streams, at a size that shows that it runs."""

from __future__ import annotations

from bench.engine.streams import measure


def test_every_way_to_serve_is_measured_in_every_round() -> None:
    """A round has a step time of the bare engine and of both servers, all streams whole."""
    found = measure(streams=3, tokens=6, threads=1, rounds=1)
    assert set(found["step_ms"]) == {"bare", "one_process", "own_process"}
    assert all(len(taken) == 1 and taken[0] > 0 for taken in found["step_ms"].values())
    assert found["over_bare"]["bare"] == 1.0
