"""Small runs of the benchmark of moves."""

from __future__ import annotations

import asyncio

import pytest

from bench.gateway.move_effects import longest_turn
from bench.gateway.moved_streams import Observed
from bench.gateway.moves import PART_S, bounded, measure, parse


@pytest.mark.long
def test_moves_between_engines_are_measured() -> None:
    """Each part has its figures, and streams move with few computed tokens."""
    flags = ["--contexts", "256", "--effect-tokens", "2000", "--tokens", "500"]
    parts = ["--parts", "gaps", "effects", "drain"]
    *_, found = measure(parse([*parts, *flags, "--rounds", "1", "--streams", "2"]))
    assert found["gaps"]["256"]["moved"] == 1
    for effects in (found["effects"]["drain"], found["effects"]["balance"]):
        assert min(effects["deltas"].values()) > 0
        assert 0 < effects["longest_turn_cpu_s"] <= effects["longest_turn_s"]
    (drain,) = found["drain"]
    assert (drain["moved"], drain["left"], drain["failed"]) == (2, 0, [])
    assert 0 < drain["most_computed_tokens"] <= 64


@pytest.mark.parametrize("error", [None, RuntimeError("the streams have ended too early")])
def test_part_of_the_benchmark_that_hangs_or_fails_has_an_error(
    error: Exception | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A part ends at its time limit or with an error, which is its result."""
    monkeypatch.setitem(PART_S, "drain", 0.0)

    async def part() -> None:
        if error is not None:
            raise error
        await asyncio.Event().wait()

    found = asyncio.run(bounded("drain", part()))
    assert found["error"] == ("TimeoutError: " if error is None else f"RuntimeError: {error}")


def test_longest_turn_is_that_of_the_longest_callback() -> None:
    """A callback that takes long is found, and is no longer measured after the context."""

    async def main() -> float:
        with longest_turn() as turn:
            asyncio.get_running_loop().call_soon(sum, range(10**6))
            await asyncio.sleep(0)
            await asyncio.sleep(0)
        found = turn.cpu_s
        asyncio.get_running_loop().call_soon(sum, range(10**7))
        await asyncio.sleep(0)
        await asyncio.sleep(0)
        assert turn.cpu_s == found
        return found

    assert asyncio.run(main()) > 1e-3


def test_pauses_of_a_stream_are_those_inside_an_interval() -> None:
    """Only pauses whose both ends are in the interval count."""
    observed = Observed(times_s=[1.0, 2.0, 4.0, 7.0])
    assert observed.gaps_s() == [1.0, 2.0, 3.0]
    assert observed.gaps_s(1.5, 6.0) == [2.0]


def test_pause_of_a_switch_is_found_beside_it() -> None:
    """The pause of a switch counts even if a delta from before it arrived late."""
    times_s = [0.0, 1.0, 2.0, 3.0, 4.0, 9.0, 9.1, 10.0, 11.0, 12.0]
    for deltas_before in (4, 5, 6):
        assert Observed(times_s=times_s, _switched=deltas_before).extra_gap_s() == 4.0
