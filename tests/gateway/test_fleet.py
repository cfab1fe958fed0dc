"""Tests of nodes with several workers: balance, unchanged texts and contained failures."""

from __future__ import annotations

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest

from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.gateway.app import Listening, StartError, drain, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.state.commands import ListWorkers, PublishReport
from draftgate.policies.capacity import CapacityNeed
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    events,
    is_idle,
    load_of,
    needs_engine,
    post_raw,
    running,
    scripted_fleet,
    until,
)

BODY = {"prompt": "x", "max_tokens": 100}


@pytest.fixture
async def pair() -> tuple[ScriptedBackend, ScriptedBackend]:
    """Two workers whose steps the test decides."""
    return ScriptedBackend(), ScriptedBackend()


@pytest.fixture
async def node(pair: tuple[ScriptedBackend, ScriptedBackend]) -> AsyncIterator[Listening]:
    """A node with both workers."""
    async with running(backends=pair) as gateway:
        yield gateway


@pytest.fixture
async def sims() -> AsyncIterator[Listening]:
    """A node with two simulated workers."""
    async with running(devices=(0, 1)) as gateway:
        yield gateway


def send_request(http: httpx.AsyncClient, **fields: object) -> asyncio.Task[httpx.Response]:
    """Send a request in the background."""
    return asyncio.create_task(http.post("/v1/completions", json={**BODY, **fields}))


async def submitted(backend: ScriptedBackend) -> GenerationRequest:
    """Return the next request that the worker receives."""
    async with asyncio.timeout(60):
        return await backend.submitted.get()


def has_no_reserved_tokens(gateway: Listening) -> bool:
    """Return whether no worker has reserved tokens."""
    return all(worker.reserved_tokens == 0 for worker in gateway.node.fleet.workers)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_burst_spreads_evenly(
    node: Listening,
    http: httpx.AsyncClient,
    pair: tuple[ScriptedBackend, ScriptedBackend],
    stream: bool,
) -> None:
    """The node balances requests that arrive together, because each decision counts earlier
    requests."""
    responses = [send_request(http, stream=stream) for _ in range(6)]
    for backend in pair:
        for _ in range(3):
            backend.emit(await submitted(backend), "done", last=True)
    assert [response.status_code for response in await asyncio.gather(*responses)] == [200] * 6
    await until(lambda: has_no_reserved_tokens(node))


async def test_long_requests_weigh_more(
    http: httpx.AsyncClient, pair: tuple[ScriptedBackend, ScriptedBackend]
) -> None:
    """The node balances load by tokens, so several short requests weigh as much as a long
    request."""
    long = send_request(http, max_tokens=400)
    first = await submitted(pair[0])
    short = [send_request(http, max_tokens=100) for _ in range(3)]
    for _ in short:
        pair[1].emit(await submitted(pair[1]), "short", last=True)
    assert pair[0].submitted.empty()
    pair[0].emit(first, "long", last=True)
    assert {response.status_code for response in await asyncio.gather(long, *short)} == {200}


async def test_choices_stay_together_and_prompts_spread(
    node: Listening, http: httpx.AsyncClient, pair: tuple[ScriptedBackend, ScriptedBackend]
) -> None:
    """The node places all choices of a prompt on one worker and prompts on different workers."""
    response = send_request(http, prompt=["x", "y"], n=2)
    for index, backend in enumerate(pair):
        request = await submitted(backend)
        assert (request.request_id[-2:], request.n) == (f"-{index}", 2)
        for choice in range(2):
            backend.emit(request, f"{index}{choice}", last=True, choice=choice)
    body = (await response).json()
    assert [choice["text"] for choice in body["choices"]] == ["00", "01", "10", "11"]
    ids = [worker.worker_id for worker in node.node.fleet.workers]
    assert len(set(ids)) == 2
    assert [prompt["worker_id"] for prompt in body["metrics"]["prompts"]] == ids
    assert body["metrics"]["worker_id"] == ids[0]


async def test_reserved_tokens_are_released_with_the_request(node: Listening) -> None:
    """The node reserves tokens exactly while a request is on its worker."""
    job = Job("r", ((1, 2), (3,)), SamplingParams(1, 0), 10, n=2)
    async with node.node.dispatcher.run(job) as run:
        assert has_no_reserved_tokens(node)
        reading = asyncio.ensure_future(anext(run.deltas))
        await until(lambda: len(run.holds) == 2)
        assert [w.reserved_tokens for w in node.node.fleet.workers] == [24, 22]
        reading.cancel()
        await asyncio.wait({reading})
    assert has_no_reserved_tokens(node)


async def test_streams_continue_on_the_second_worker_after_a_failure(
    node: Listening,
    http: httpx.AsyncClient,
    pair: tuple[ScriptedBackend, ScriptedBackend],
) -> None:
    """The streams of a failed worker continue on the second worker, and `/health` names the
    failure."""
    for index in range(2):
        assert f'worker="{index}"' in (await http.get("/metrics")).text
    first, second = send_request(http, stream=True), send_request(http, stream=True)
    pair[0].emit(await submitted(pair[0]), "half")
    other = await submitted(pair[1])
    pair[0].crash("device lost")
    pair[1].emit(await submitted(pair[1]), "whole", last=True)
    pair[1].emit(other, "whole", last=True)
    for response in (first, second):
        assert events((await response).text)[-1] == "[DONE]"
    assert 'worker="0"' not in (await http.get("/metrics")).text
    later = [send_request(http) for _ in range(2)]
    for _ in later:
        pair[1].emit(await submitted(pair[1]), "later", last=True)
    assert {response.status_code for response in await asyncio.gather(*later)} == {200}
    health = await http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ready")
    broken, well = health.json()["workers"]
    assert (broken["status"], broken["reason"], well["status"]) == ("failed", "device lost", "ok")
    assert (await http.get("/ready")).status_code == 200
    pair[1].crash("power lost")
    health = await http.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, "device lost; power lost")
    assert node.node.state is NodeState.FAILED
    assert (await send_request(http)).status_code == 503


async def test_the_heartbeat_publishes_every_worker_and_logs_a_loss_once(
    node: Listening,
    pair: tuple[ScriptedBackend, ScriptedBackend],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The heartbeat publishes each worker, withdraws a failed worker and logs the failure once."""
    monkeypatch.setattr("draftgate.gateway.cluster.heartbeat.HEARTBEAT_S", 0.001)
    store, ids = node.node.store, [worker.worker_id for worker in node.node.fleet.workers]
    beats = Counter[str]()

    def counted(command: PublishReport) -> bool:
        beats[command.report.worker_id] += 1
        return store.publish(command)

    monkeypatch.setitem(store.handlers, PublishReport, counted)
    with caplog.at_level(logging.ERROR, logger="draftgate"):
        beating = asyncio.create_task(node.node.heartbeat.run())
        await until(lambda: len(beats) == 2)
        assert [view.worker_id for view in (await store.call(ListWorkers())).workers] == ids
        pair[0].crash("device lost")
        seen = beats[ids[1]]
        await until(lambda: beats[ids[1]] > seen + 3)
        beating.cancel()
        await asyncio.wait({beating})
    assert [view.worker_id for view in (await store.call(ListWorkers())).workers] == ids[1:]
    (line,) = [record for record in caplog.records if record.message == "worker failed"]
    assert line.draftgate_fields == {"worker": ids[0], "reason": "device lost"}


async def test_a_worker_that_cannot_start_fails_the_node(
    pair: tuple[ScriptedBackend, ScriptedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node fails to start if one of its configured workers cannot start."""

    async def refuse() -> None:
        raise ValueError("found no device 1")

    monkeypatch.setattr(pair[1], "start", refuse)
    pair[0].gate.clear()
    async with running(backends=pair, start=False) as gateway:
        with pytest.raises(StartError, match="no device 1"):
            await start_workers(gateway.node)
        assert gateway.node.state is NodeState.FAILED
        pair[0].gate.set()


async def test_progress_is_the_mean_of_the_workers(
    pair: tuple[ScriptedBackend, ScriptedBackend],
) -> None:
    """The path `/ready` reports the mean loading progress of all workers."""
    for backend, share in zip(pair, (0.25, 0.75), strict=True):
        backend.gate.clear()
        backend.progress = share
    async with running(backends=pair, start=False) as gateway, client(gateway) as http:
        assert (await http.get("/ready")).json() == {"status": "starting", "progress": 0.0}
        loading = asyncio.create_task(start_workers(gateway.node))
        await until(lambda: bool(gateway.node.fleet.workers))
        response = await http.get("/ready")
        assert (response.status_code, response.json()["progress"]) == (503, 0.5)
        health = (await http.get("/health")).json()
        assert [worker["status"] for worker in health["workers"]] == ["loading"] * 2
        for backend in pair:
            backend.gate.set()
        await loading
        assert (await http.get("/ready")).json() == {"status": "ready"}


async def test_a_fleet_can_stop_before_its_start() -> None:
    """A fleet can stop before its start, because a signal may arrive early."""
    fleet = scripted_fleet(ServeConfig(), [])
    await fleet.stop()
    assert (fleet.progress, fleet.failure) == (0.0, None)


async def test_a_disconnect_frees_memory_on_every_worker(sims: Listening) -> None:
    """A disconnect frees the KV memory of the request on every worker."""
    long = {"prompt": ["def f(x):", "class A:"], "max_tokens": 8000, "n": 2}
    writers = []
    for stream in (True, False):
        _, writer = await post_raw(sims, "/v1/completions", {**long, "stream": stream})
        writers.append(writer)

    def run_everywhere() -> bool:
        running = [load_of(sims.node, number).running for number in range(2)]
        return all(running) and sum(running) == 8

    await until(run_everywhere)
    for writer in writers:
        writer.close()
    await until(lambda: is_idle(sims.node))


async def test_draining_waits_for_every_worker(
    node: Listening, http: httpx.AsyncClient, pair: tuple[ScriptedBackend, ScriptedBackend]
) -> None:
    """A draining node waits for the last request of every worker."""
    responses = [send_request(http), send_request(http)]
    requests = [await submitted(backend) for backend in pair]
    draining = asyncio.create_task(drain(node.node, 60))
    for backend, request in zip(pair, requests, strict=True):
        await until(lambda: node.node.state is NodeState.DRAINING)
        assert not draining.done()
        backend.emit(request, "done", last=True)
        await responses.pop(0)
    assert await draining


PROMPTS = ("import os\n", "def f(x):\n", "class A:\n", "x = [", "for i in", "# ", "try:\n", "if x")


async def texts_and_worker(http: httpx.AsyncClient, index: int) -> tuple[list[str], str]:
    """Return the texts of a prompt's choices and the worker that generated the texts."""
    fields = {"prompt": PROMPTS[index], "seed": 7 + index, "n": 1 + index % 2, "max_tokens": 12}
    body = (await http.post("/v1/completions", json=fields)).json()
    return [choice["text"] for choice in body["choices"]], body["metrics"]["worker_id"]


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "sim"},
        pytest.param(
            {"backend": "engine", "threads": 1, "kv_bytes": 8 << 20, "max_model_len": 512},
            marks=needs_engine,
        ),
    ],
    ids=["sim", "engine"],
)
async def test_text_does_not_depend_on_the_worker(settings: dict[str, object]) -> None:
    """The text of a request depends neither on its worker nor on concurrent requests."""
    indices = range(len(PROMPTS))
    async with running(**settings, devices=(0, 1)) as gateway, client(gateway) as http:
        alone = [await texts_and_worker(http, index) for index in indices]
        together = await asyncio.gather(*(texts_and_worker(http, index) for index in indices))
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert len({worker for _, worker in alone}) == 2  # idle workers take turns
    assert len({worker for _, worker in together}) == 2


def test_repeated_reservations_and_releases_count_once() -> None:
    """A worker counts a repeated reservation or release of a request once."""
    worker = FleetWorker("w", None)
    worker.reserve("a", CapacityNeed(1, 4, 10))
    worker.reserve("a", CapacityNeed(1, 4, 12))
    worker.reserve("b", CapacityNeed(1, 3, 5))
    assert worker.reserved_tokens == 17
    worker.release("a")
    worker.release("a")
    worker.release("unknown")
    assert worker.reserved_tokens == 5
    worker.release("b")
    assert worker.reserved_tokens == 0
