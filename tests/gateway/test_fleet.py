"""Several workers in one node: load is balanced, texts are unchanged, failures are contained."""

from __future__ import annotations

import asyncio
import importlib.util
import logging
from collections import Counter
from collections.abc import AsyncIterator

import httpx
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.gateway.app import Listening, StartError, drain, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.state.store import WorkerReport
from draftgate.policies.capacity import CapacityNeed
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    events,
    is_idle,
    load_of,
    post_raw,
    running,
    scripted_fleet,
    until,
)

BODY = {"prompt": "x", "max_tokens": 100}
ENGINE = pytest.mark.skipif(
    importlib.util.find_spec("torch") is None
    or not (SHIPPED_MODEL / "model.safetensors").is_file(),
    reason="needs torch and the shipped model",
)


@pytest.fixture
async def pair() -> tuple[ScriptedBackend, ScriptedBackend]:
    """Two workers whose steps the test decides."""
    return ScriptedBackend(), ScriptedBackend()


@pytest.fixture
async def node(pair: tuple[ScriptedBackend, ScriptedBackend]) -> AsyncIterator[Listening]:
    """A node of both."""
    async with running(backends=pair) as where:
        yield where


@pytest.fixture
async def http(node: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the node."""
    async with client(node) as opened:
        yield opened


@pytest.fixture
async def sims() -> AsyncIterator[Listening]:
    """A node of two simulated workers."""
    async with running(devices=(0, 1)) as where:
        yield where


def ask(http: httpx.AsyncClient, **fields: object) -> asyncio.Task[httpx.Response]:
    """Send a request in the background."""
    return asyncio.create_task(http.post("/v1/completions", json={**BODY, **fields}))


async def submitted(backend: ScriptedBackend) -> GenerationRequest:
    """The next request that a worker gets."""
    async with asyncio.timeout(10):
        return await backend.submitted.get()


def is_idle_of_tokens(where: Listening) -> bool:
    """Whether no worker has reserved tokens."""
    return all(worker.reserved_tokens == 0 for worker in where.node.fleet.workers)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_burst_spreads_evenly(
    node: Listening,
    http: httpx.AsyncClient,
    pair: tuple[ScriptedBackend, ScriptedBackend],
    stream: bool,
) -> None:
    """Requests that arrive together are balanced, because each decision sees the previous ones."""
    answers = [ask(http, stream=stream) for _ in range(6)]
    for backend in pair:
        for _ in range(3):
            backend.emit(await submitted(backend), "done", last=True)
    assert [answer.status_code for answer in await asyncio.gather(*answers)] == [200] * 6
    await until(lambda: is_idle_of_tokens(node))


async def test_long_requests_weigh_more(
    http: httpx.AsyncClient, pair: tuple[ScriptedBackend, ScriptedBackend]
) -> None:
    """Load is counted in tokens: several short requests fit beside one long one."""
    long = ask(http, max_tokens=400)
    first = await submitted(pair[0])
    short = [ask(http, max_tokens=100) for _ in range(3)]
    for _ in short:
        pair[1].emit(await submitted(pair[1]), "short", last=True)
    assert pair[0].submitted.empty()
    pair[0].emit(first, "long", last=True)
    assert {answer.status_code for answer in await asyncio.gather(long, *short)} == {200}


async def test_choices_stay_together_and_prompts_spread(
    node: Listening, http: httpx.AsyncClient, pair: tuple[ScriptedBackend, ScriptedBackend]
) -> None:
    """The choices of a prompt share a worker; prompts are placed separately."""
    answer = ask(http, prompt=["x", "y"], n=2)
    for index, backend in enumerate(pair):
        request = await submitted(backend)
        assert (request.request_id[-2:], request.n) == (f"-{index}", 2)
        for choice in range(2):
            backend.emit(request, f"{index}{choice}", last=True, choice=choice)
    body = (await answer).json()
    assert [choice["text"] for choice in body["choices"]] == ["00", "01", "10", "11"]
    ids = [worker.worker_id for worker in node.node.fleet.workers]
    assert len(set(ids)) == 2
    assert [prompt["worker_id"] for prompt in body["metrics"]["prompts"]] == ids
    assert body["metrics"]["worker_id"] == ids[0]


async def test_reserved_tokens_are_released_with_the_request(node: Listening) -> None:
    """Tokens are reserved exactly while a request is on its worker."""
    job = Job("r", ((1, 2), (3,)), SamplingParams(1, 0), 10, n=2)
    async with node.node.dispatcher.run(job) as run:
        assert is_idle_of_tokens(node)
        reading = asyncio.ensure_future(anext(run.deltas))
        await until(lambda: None not in run.placements)
        assert [w.reserved_tokens for w in node.node.fleet.workers] == [24, 22]
        reading.cancel()
        await asyncio.wait({reading})
    assert is_idle_of_tokens(node)


async def test_a_failed_worker_leaves_the_other_serving(
    node: Listening,
    http: httpx.AsyncClient,
    pair: tuple[ScriptedBackend, ScriptedBackend],
) -> None:
    """Its streams continue on the other worker, and /health names the loss."""
    for index in range(2):
        assert f'worker="{index}"' in (await http.get("/metrics")).text
    first, second = ask(http, stream=True), ask(http, stream=True)
    pair[0].emit(await submitted(pair[0]), "half")
    other = await submitted(pair[1])
    pair[0].crash("device lost")
    pair[1].emit(await submitted(pair[1]), "whole", last=True)
    pair[1].emit(other, "whole", last=True)
    for answer in (first, second):
        assert events((await answer).text)[-1] == "[DONE]"
    assert 'worker="0"' not in (await http.get("/metrics")).text
    later = [ask(http) for _ in range(2)]
    for _ in later:
        pair[1].emit(await submitted(pair[1]), "later", last=True)
    assert {answer.status_code for answer in await asyncio.gather(*later)} == {200}
    health = await http.get("/health")
    assert (health.status_code, health.json()["status"]) == (200, "ready")
    broken, well = health.json()["workers"]
    assert (broken["status"], broken["reason"], well["status"]) == ("failed", "device lost", "ok")
    assert (await http.get("/ready")).status_code == 200
    pair[1].crash("power lost")
    health = await http.get("/health")
    assert (health.status_code, health.json()["reason"]) == (503, "device lost; power lost")
    assert node.node.state is NodeState.FAILED
    assert (await ask(http)).status_code == 503


async def test_the_heartbeat_publishes_every_worker_and_logs_a_loss_once(
    node: Listening,
    pair: tuple[ScriptedBackend, ScriptedBackend],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Each worker is published under its id; a failed one is withdrawn and logged once."""
    monkeypatch.setattr("draftgate.gateway.cluster.heartbeat.HEARTBEAT_S", 0.001)
    store, ids = node.node.store, [worker.worker_id for worker in node.node.fleet.workers]
    beats = Counter[str]()
    publish = store.publish

    async def counted(report: WorkerReport) -> bool:
        beats[report.worker_id] += 1
        return await publish(report)

    monkeypatch.setattr(store, "publish", counted)
    with caplog.at_level(logging.ERROR, logger="draftgate"):
        beating = asyncio.create_task(node.node.heartbeat.run())
        await until(lambda: len(beats) == 2)
        assert [view.worker_id for view in (await store.snapshot()).workers] == ids
        pair[0].crash("device lost")
        seen = beats[ids[1]]
        await until(lambda: beats[ids[1]] > seen + 3)
        beating.cancel()
        await asyncio.wait({beating})
    assert [view.worker_id for view in (await store.snapshot()).workers] == ids[1:]
    (line,) = [record for record in caplog.records if record.message == "worker failed"]
    assert line.draftgate_fields == {"worker": ids[0], "reason": "device lost"}


async def test_a_worker_that_cannot_start_fails_the_node(
    pair: tuple[ScriptedBackend, ScriptedBackend], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A configured worker that cannot start is an error, not a smaller node."""

    async def refuse() -> None:
        raise ValueError("there is no device 1")

    monkeypatch.setattr(pair[1], "start", refuse)
    pair[0].gate.clear()
    async with running(backends=pair, start=False) as where:
        with pytest.raises(StartError, match="no device 1"):
            await start_workers(where.node)
        assert where.node.state is NodeState.FAILED
        pair[0].gate.set()


async def test_progress_is_the_mean_of_the_workers(
    pair: tuple[ScriptedBackend, ScriptedBackend],
) -> None:
    """/ready reports the mean progress of loading until it is done."""
    for backend, share in zip(pair, (0.25, 0.75), strict=True):
        backend.gate.clear()
        backend.progress = share
    async with running(backends=pair, start=False) as where, client(where) as http:
        assert (await http.get("/ready")).json() == {"status": "starting", "progress": 0.0}
        loading = asyncio.create_task(start_workers(where.node))
        await until(lambda: bool(where.node.fleet.workers))
        told = await http.get("/ready")
        assert (told.status_code, told.json()["progress"]) == (503, 0.5)
        health = (await http.get("/health")).json()
        assert [worker["status"] for worker in health["workers"]] == ["loading"] * 2
        for backend in pair:
            backend.gate.set()
        await loading
        assert (await http.get("/ready")).json() == {"status": "ready"}


async def test_a_fleet_can_stop_before_it_started() -> None:
    """`stop` works before `start`, because a signal may arrive early."""
    fleet = scripted_fleet(ServeConfig(), [])
    await fleet.stop()
    assert (fleet.progress, fleet.failure) == (0.0, None)


async def test_a_disconnect_frees_memory_on_every_worker(sims: Listening) -> None:
    """A client that disconnects frees the KV memory of its worker, streamed or not."""
    long = {"prompt": ["def f(x):", "class A:"], "max_tokens": 8000, "n": 2}
    writers = []
    for stream in (True, False):
        _, writer = await post_raw(sims, "/v1/completions", {**long, "stream": stream})
        writers.append(writer)
    await until(lambda: load_of(sims.node, 0).running == load_of(sims.node, 1).running == 4)
    for writer in writers:
        writer.close()
    await until(lambda: is_idle(sims.node))


async def test_draining_waits_for_every_worker(
    node: Listening, http: httpx.AsyncClient, pair: tuple[ScriptedBackend, ScriptedBackend]
) -> None:
    """A node has drained when the last request of all workers has ended."""
    answers = [ask(http), ask(http)]
    requests = [await submitted(backend) for backend in pair]
    draining = asyncio.create_task(drain(node.node, 60))
    for backend, request in zip(pair, requests, strict=True):
        await until(lambda: node.node.state is NodeState.DRAINING)
        assert not draining.done()
        backend.emit(request, "done", last=True)
        await answers.pop(0)
    assert await draining


PROMPTS = ("import os\n", "def f(x):\n", "class A:\n", "x = [", "for i in", "# ", "try:\n", "if x")


async def answer_of(http: httpx.AsyncClient, index: int) -> tuple[list[str], str]:
    """The texts of a prompt's choices, and the worker that generated them."""
    fields = {"prompt": PROMPTS[index], "seed": 7 + index, "n": 1 + index % 2, "max_tokens": 12}
    body = (await http.post("/v1/completions", json=fields)).json()
    return [choice["text"] for choice in body["choices"]], body["metrics"]["worker_id"]


@pytest.mark.parametrize(
    "settings",
    [
        {"backend": "sim"},
        pytest.param(
            {"backend": "engine", "threads": 1, "kv_bytes": 8 << 20, "max_model_len": 512},
            marks=ENGINE,
        ),
    ],
    ids=["sim", "engine"],
)
async def test_two_workers_give_the_same_texts_as_one(settings: dict[str, object]) -> None:
    """The text does not depend on the worker or on concurrent requests."""
    indices = range(len(PROMPTS))
    async with running(**settings, devices=(0, 1)) as where, client(where) as http:
        alone = [await answer_of(http, index) for index in indices]
        together = await asyncio.gather(*(answer_of(http, index) for index in indices))
    assert [text for text, _ in together] == [text for text, _ in alone]
    assert len({worker for _, worker in alone}) == 2  # idle ones take turns
    assert len({worker for _, worker in together}) == 2


def test_reserved_tokens_are_those_of_open_requests() -> None:
    """Reserving or releasing twice counts once, and nothing remains."""
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
