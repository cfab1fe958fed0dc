"""Tests of `draftgate bench edge`: the client's counts, and the metrics and goals of rows."""

from __future__ import annotations

import asyncio
import gc
import json
import math
import subprocess
import sys

import httpx
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer

from bench.edge import wire
from bench.edge.client import Connection, Load, Measured, send
from bench.edge.command import goals, summary
from bench.edge.hold import Hold, split_hold, watch_loop
from bench.edge.mock import application
from bench.edge.rounds import WORKER, Row, questions, row_of
from bench.edge.targets import INSTANT, Kind, Target
from bench.edge.worker import BareWorker, Work
from bench.harness.processes import cpu_s
from tests.gateway.harness import client, events, running

SOON_S = 0.02


def load_for(server: TestServer, *, tokens: int = 3, stream: bool = True, **more) -> Load:
    return Load("127.0.0.1", server.port, tokens, stream, 2, SOON_S, SOON_S, **more)


async def proxied(upstream: TestServer) -> TestServer:
    server = TestServer(application(str(upstream.make_url("/"))))
    await server.start_server()
    return server


@pytest.mark.parametrize("through", ["mock", "bare proxy"])
@pytest.mark.parametrize("pace_ms", [0.0, 1.0])
async def test_the_client_counts_events_and_requests(through: str, pace_ms: float) -> None:
    """The client counts every chunk, and each first event arrives before the last byte."""
    async with TestServer(application(None)) as mock:
        server = await proxied(mock) if through == "bare proxy" else mock
        try:
            measured = await send(load_for(server, tokens=5, pace_ms=pace_ms))
        finally:
            await server.close()
    assert measured.failed == 0
    assert measured.chunks == 5 * len(measured.latency_s) > 0
    pairs = zip(measured.ttft_s, measured.latency_s, strict=True)
    assert all(0 < ttft_s <= latency_s for ttft_s, latency_s in pairs)


async def test_responses_without_streaming_have_no_chunks() -> None:
    """The client counts a response without streaming as a request without chunks."""
    async with TestServer(application(None)) as mock:
        measured = await send(load_for(mock, stream=False))
    assert (measured.chunks, measured.failed) == (0, 0)
    assert measured.latency_s


@pytest.mark.parametrize("fault", ["status", "cut", "no end", "silence"])
async def test_broken_responses_count_as_failed(
    fault: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The client counts error statuses, cut connections, truncated streams and timeouts."""
    monkeypatch.setattr(Connection, "timeout_s", SOON_S)

    async def answer(request: web.Request) -> web.StreamResponse:
        if fault == "status":
            return web.Response(status=503)
        response = web.StreamResponse()
        await response.prepare(request)
        await response.write(b"data: {}\n\n")
        if fault == "cut":
            assert request.transport is not None
            request.transport.abort()
        if fault == "silence":
            await asyncio.Event().wait()
        return response

    app = web.Application()
    app.router.add_post(wire.PATH, answer)
    async with TestServer(app) as server:
        measured = await send(load_for(server))
    assert measured.failed > 0
    assert not measured.latency_s


async def test_mock_chunks_have_the_fields_of_draftgate() -> None:
    """The mock and Draftgate send chunks with the same fields."""

    def shape(value: object) -> object:
        return {k: shape(v) for k, v in value.items()} if isinstance(value, dict) else type(value)

    body = json.loads(wire.request_body(9, stream=True))
    found = []
    settings = {"profile": str(INSTANT), "speculation": "off", "served_model_name": (wire.MODEL,)}
    async with running(**settings) as where, client(where) as http:
        found.append(events((await http.post(wire.PATH, json=body)).text))
    async with (
        TestServer(application(None)) as mock,
        httpx.AsyncClient(base_url=str(mock.make_url("/"))) as http,
    ):
        found.append(events((await http.post(wire.PATH, json=body)).text))
    ours, theirs = found
    for mine, other in zip(ours[:2], theirs[:2], strict=True):  # The first chunk has the role.
        (my_choice,), (other_choice,) = mine.pop("choices"), other.pop("choices")
        assert shape(mine) == shape(other)
        assert shape(my_choice) == shape(other_choice)


def test_the_worker_alone_completes_its_requests() -> None:
    """The worker generates all tokens of every sequence without an edge."""
    done = BareWorker().run(Work(tokens=7, sequences=3, for_s=0.0))
    assert (done.requests, done.deltas) == (3, 21)


def test_cpu_time_includes_child_processes() -> None:
    """The CPU time of a process includes its running and ended children."""
    burn = "import time\nwhile time.process_time() < 0.2: pass\n"
    parent = (
        f"import subprocess, sys\nsubprocess.run([sys.executable, '-c', {burn!r}])\n"
        f"running = subprocess.Popen([sys.executable, '-c', {burn!r} + "
        "'print(); import sys; sys.stdin.read()'], stdin=subprocess.PIPE, stdout=subprocess.PIPE)\n"
        "running.stdout.readline()\nprint(flush=True)\ninput()\nrunning.kill()\n"
    )
    command = [sys.executable, "-c", parent]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE)
    with process:
        assert process.stdout is not None
        process.stdout.readline()
        assert cpu_s(process.pid) >= 0.35  # The work takes 0.4 s, in ticks of 0.01 s.
        process.kill()


def row(target: str, kind: Kind, question: str, **figures: float) -> Row:
    """A row of ten requests. The arguments are per request."""
    known = {name: figures.get(name, 0.001) for name in ("latency_p50_s", "ttft_p50_s")}
    cpu, chunks = figures.get("cpu_s", 1e-4), int(figures.get("chunks", 0))
    return Row(
        target, kind, question, 0, 10, 10 * chunks, 0, 1.0, known["latency_p50_s"], 0.002,
        known["ttft_p50_s"], 0.002, 10 * cpu, 0.1, 0.1, saturated=False,
    )  # fmt: skip


def rows_of(target: str, kind: Kind, request_s: float, chunk_s: float) -> list[Row]:
    """The rows of a target with these costs, for single responses and for streams of 1 and 201
    chunks."""
    found = []
    for question in questions(201):
        chunks = question.tokens * question.stream
        cost = request_s + chunk_s * max(0, chunks - 1)
        found.append(row(target, kind, question.name, cpu_s=cost, chunks=chunks))
    return found


def test_costs_are_computed_from_rows() -> None:
    """The summary derives the cost of a chunk from the slope over stream lengths."""
    found = summary(rows_of("x", Kind.PROXY, 200e-6, 7e-6) + rows_of("mock", Kind.DIRECT, 1e-4, 0))
    assert found["x"]["cpu_request_us"]["median"] == pytest.approx(200)
    assert found["x"]["cpu_chunk_us"]["median"] == pytest.approx(7)
    assert found["x"]["added_p50_ms_1"]["median"] == 0
    assert math.isnan(found["mock"]["added_p50_ms_1"]["median"])


def test_goals_are_met_or_missed_or_not_measured() -> None:
    """A goal with an unmeasured side is neither met nor missed."""
    rows = [
        *rows_of("draftgate sim", Kind.IN_PROCESS, 180e-6, 15e-6),
        *rows_of("draftgate sim, 2 processes", Kind.IN_PROCESS, 210e-6, 15e-6),
        *rows_of(WORKER, Kind.NO_EDGE, 50e-6, 6e-6),
        *rows_of("litellm", Kind.PROXY, 14e-3, 500e-6),
    ]
    met = {goal.text: goal.met for goal in goals(summary(rows))}
    assert met["CPU per request in process, us < 200"] is True
    assert met["CPU per chunk in process, us < 12"] is False
    assert met["cpu_chunk_us without the simulated worker's < 12"] is True
    assert met["litellm's CPU per request over draftgate sim's >= 20"] is True
    assert met["litellm's CPU per request over draftgate proxy's >= 20"] is None
    text = "CPU per request of draftgate sim, 2 processes over draftgate sim's < 1.1"
    assert met[text] is False


def test_a_target_without_a_complete_response_has_a_row() -> None:
    """A target that completes no response has unknown latencies, and does not end the benchmark."""
    nothing = Measured([], [], 0, 16, 2.0, 0.5, 0.0, 0.1)
    slow = Target("slow", Kind.PROXY, None)
    rows = [row_of(slow, question, 0, nothing) for question in questions(201)]
    found = summary([*rows, *rows_of("quick", Kind.PROXY, 1e-4, 1e-5)])
    assert math.isnan(found["slow"]["ttft_p50_ms_1"]["median"])
    assert found["slow"]["failed"] == 16 * len(rows)
    (reached,) = (goal for goal in goals(found) if "quickest proxy" in goal.text)
    assert reached.met is None  # `draftgate sim` has no row.


def test_a_hold_is_split_by_cause() -> None:
    """The parts for callbacks, collections, locks and other processes never exceed the hold."""
    own_thread = split_hold(10.0, cpu_s=4.0, descheduled_s=2.0, gc_s=1.0, gc_here_s=1.0)
    assert own_thread == Hold(10.0, own_s=3.0, collecting_s=1.0, lock_s=4.0, descheduled_s=2.0)
    other_thread = split_hold(10.0, cpu_s=1.0, descheduled_s=0.0, gc_s=6.0, gc_here_s=0.0)
    assert other_thread == Hold(10.0, own_s=1.0, collecting_s=6.0, lock_s=3.0)
    # CPU time before the loop was late is not part of the hold.
    assert split_hold(2.0, cpu_s=5.0, descheduled_s=0.0, gc_s=0.0, gc_here_s=0.0) == Hold(2.0, 2.0)
    assert split_hold(-1.0, cpu_s=1.0, descheduled_s=0.0, gc_s=0.0, gc_here_s=0.0) == Hold()


async def test_collections_in_any_thread_are_counted() -> None:
    """The loop's watch counts collections in every thread, because they stop all threads."""
    for collect in (gc.collect, lambda: asyncio.to_thread(gc.collect)):
        async with watch_loop() as watch:
            while watch.longest.collecting_s == 0.0:
                if asyncio.iscoroutine(ran := collect()):
                    await ran
                await asyncio.sleep(0)
