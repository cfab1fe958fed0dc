"""Tests of `/workers`: the streams of each worker, their moves, and what tenants see."""

from __future__ import annotations

import asyncio

import pytest

from draftgate.backends.sim.backend import SimBackend
from draftgate.gateway.dispatch.decisions import KEPT_MOVES, MoveRecord, RecentMove
from draftgate.gateway.telemetry.worker_list import (
    ProcessStreams,
    RunningStream,
    process_streams,
    worker_list,
)
from draftgate.policies.moves import MoveEnd
from tests.gateway.harness import ScriptedBackend, client, running, until
from tests.gateway.test_kv_fetch import BLOCK_BYTES, CONFIG, make_job
from tests.gateway.troubles import dispatching, run_scenario

IDLE = {"model": "scripted", "running": 0, "waiting": 0, "kv_usage": 0.0, "role": "any"}


def stream(request_id: str, tenant: str = "", worker_id: str = "w-0") -> RunningStream:
    return RunningStream(request_id, 0, tenant, worker_id, 100, 1, moving=False)


def move(request_id: str, ended_s: float, tenant: str = "") -> RecentMove:
    record = MoveRecord("w-0", "w-1", "drain", MoveEnd.MOVED, ended_s=ended_s)
    return RecentMove(request_id, 0, tenant, record)


def test_tenants_see_only_their_own_streams_and_moves() -> None:
    """A tenant sees its own streams and moves of all processes, an operator sees all of them."""
    processes = [
        ProcessStreams([stream("a", "one"), stream("b", "two")], [move("c", 1.0, "two")]),
        ProcessStreams([stream("d", "one")], [move("e", 2.0, "one"), move("f", 3.0, "two")]),
    ]
    mine, all_ = (worker_list(5.0, [], processes, tenant) for tenant in ("one", None))
    assert [one.request_id for one in mine.streams] == ["a", "d"]
    assert [one.request_id for one in mine.moves] == ["e"]
    assert [one.request_id for one in all_.streams] == ["a", "b", "d"]
    assert [one.request_id for one in all_.moves] == ["f", "e", "c"]  # newest first


def test_number_of_listed_moves_is_bounded() -> None:
    """The list has the latest `KEPT_MOVES` moves of all processes."""
    times = [float(number) for number in range(KEPT_MOVES)]
    processes = [
        ProcessStreams([], [move("r", 2 * at_s + odd) for at_s in times]) for odd in (0, 1)
    ]
    found = [one.move.ended_s for one in worker_list(0.0, [], processes, None).moves]
    assert found == [float(at_s) for at_s in reversed(range(KEPT_MOVES, 2 * KEPT_MOVES))]


def test_stream_is_listed_on_its_worker_while_it_moves() -> None:
    """A drained stream is listed on its source, as moving, and then on its destination. Its
    decision and the list of moves have the same record."""

    async def scenario() -> None:
        async with dispatching(SimBackend, 2, config=CONFIG) as dispatched:
            moves, decisions, seen = dispatched.dispatcher.moves, dispatched.decisions, []
            async with dispatched.dispatcher.run(make_job(800, output_tokens=400)) as run:
                count = 0
                async for delta in run.deltas:
                    running = process_streams([moves], decisions).running
                    # The prompt leaves its worker in the call that delivers the last delta.
                    assert len(running) == (delta.finish_reason is None)
                    seen += [(one.worker_id, one.moving) for one in running]
                    count += 1
                    if count == 20:
                        source = run.holds[0].worker
                        source.drained = True
            assert process_streams([moves], decisions).running == []
            states = list(dict.fromkeys(seen))
            sink = next(one for one in dispatched.fleet.workers if one is not source)
            moving = (source.worker_id, True)
            assert states[:2] == [(source.worker_id, False), moving]
            assert states[-1] == (sink.worker_id, False)
            (recent,) = process_streams([moves], decisions).moves
            (first, _second) = reversed(decisions.latest(9))
            assert first.moves == (recent.move,)
            record = recent.move
            assert (record.source, record.sink) == (source.worker_id, sink.worker_id)
            assert (record.reason, record.end, record.policy) == ("drain", MoveEnd.MOVED, "")
            assert record.stages >= 1
            assert record.blocks >= 49
            assert record.num_bytes == record.blocks * BLOCK_BYTES
            assert record.gap_s > 0.0
            assert record.ended_s > first.decided_s

    run_scenario(scenario())


async def test_workers_are_listed_with_their_load(monkeypatch: pytest.MonkeyPatch) -> None:
    """The path `/workers` lists each worker with its load, and at most `MOST_STREAMS` streams."""
    monkeypatch.setattr("draftgate.gateway.telemetry.worker_list.MOST_STREAMS", 2)
    backends, count = [ScriptedBackend(), ScriptedBackend()], 3
    async with running(backends=backends) as gateway, client(gateway) as http:
        first, second = gateway.node.fleet.workers
        second.drained = True
        body = {"prompt": [[9]] * count, "max_tokens": 5}
        request = asyncio.create_task(http.post("/v1/completions", json=body))
        for _ in range(count):
            await backends[0].submitted.get()
        found = (await http.get("/workers")).json()
        assert found["workers"] == [
            {"worker_id": first.worker_id, "status": "ok", **IDLE, "running": count},
            {"worker_id": second.worker_id, "status": "leaving", **IDLE},
        ]
        assert [one["prompt"] for one in found["streams"]] == [0, 1]
        assert {one["worker_id"] for one in found["streams"]} == {first.worker_id}
        backends[0].crash("gone")
        request.cancel()
        await until(lambda: not gateway.node.streams().running)
        found = (await http.get("/workers")).json()
        failed = {"worker_id": first.worker_id, "status": "failed", **IDLE, "kv_usage": None}
        assert found["workers"][0] == failed
