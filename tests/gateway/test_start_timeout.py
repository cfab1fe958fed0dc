"""Tests of models of upstreams without a running server, for which requests wait."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import httpx
import pytest
from aiohttp import web

from draftgate.gateway.app import Listening
from draftgate.gateway.http import stream
from draftgate.policies.scaling import DOWN_S, DemandView, ServerAdvisor
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import client, is_idle, until
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    WHOLE,
    ScriptedUpstream,
    forwarding,
    stream_of,
    upstream,
)

TEXTS = "/v1/completions"
BUSY = WorkerLoad(8, 0, 0, 0, 0.0, 0.0, (), max_sequences=8)
IDLE = WorkerLoad(0, 0, 0, 0, 0.0, 0.0, (), max_sequences=8)


async def answer(request: web.Request) -> web.StreamResponse:
    """Respond at once."""
    return web.Response(body=WHOLE, content_type="application/json")


def body_of(model: str = "theirs", **fields: Any) -> dict[str, Any]:
    """Return the body of a request."""
    return {"model": model, "prompt": "x", "max_tokens": 5, **fields}


@asynccontextmanager
async def stopped(
    *models: str, handler: Any = answer, **settings: Any
) -> AsyncIterator[tuple[list[ScriptedUpstream], Listening, httpx.AsyncClient]]:
    """Run a node with an upstream for each model, none of which has started."""
    async with upstream(handler) as one, upstream(handler) as other:
        servers = [one, other][: len(models)]
        for server, model in zip(servers, models, strict=True):
            server.status, server.models = 503, (model,)
            server.settings = {"models": (model,)}
        async with (
            forwarding(*servers, max_sequences=1, **{"start_timeout_s": 60.0, **settings}) as node,
            client(node) as http,
        ):
            yield servers, node, http


async def start(gateway: Listening, server: ScriptedUpstream) -> None:
    """Let a server respond to its next probe."""
    server.status = 200
    for worker in gateway.node.fleet.workers:
        if worker.server == server.url:
            await worker.backend.probe()


async def advice(gateway: Listening, http: httpx.AsyncClient, model: str) -> tuple[float, float]:
    """Return the advised servers of a model, and the requests that wait for it."""
    gateway.node.take_sample()
    page = (await http.get("/metrics")).text
    found = {}
    for name in ("desired_servers", "waiting_requests"):
        begin = f'draftgate_upstream_{name}{{model="{model}"'
        (line,) = [line for line in page.splitlines() if line.startswith(begin)]
        found[name] = float(line.rpartition(" ")[2])
    return found["desired_servers"], found["waiting_requests"]


async def test_requests_wait_for_a_server_in_order() -> None:
    """Requests for a model without a server wait, and its server gets them by class and arrival as
    soon as it responds to a probe. The advice is 1 server meanwhile."""
    async with stopped("theirs", scale_to_zero_s=60.0) as ((server,), gateway, http):
        assert (await http.get("/ready")).status_code == 200
        assert await advice(gateway, http, "theirs") == (0, 0)
        queue, tasks = gateway.node.dispatcher.queue, []
        for user, priority in (("1", 1), ("2", 1), ("3", 0)):
            sent = http.post(TEXTS, json=body_of(user=user, priority=priority))
            tasks.append(asyncio.create_task(sent))
            await until(lambda: len(queue) == len(tasks))
        assert await advice(gateway, http, "theirs") == (1, 3)
        await start(gateway, server)
        replies = await asyncio.gather(*tasks)
        assert [reply.status_code for reply in replies] == [200, 200, 200]
        assert [json.loads(body)["user"] for body in server.bodies] == ["3", "1", "2"]
        assert await advice(gateway, http, "theirs") == (1, 0)
        assert is_idle(gateway.node)


async def test_request_fails_after_the_timeout() -> None:
    """If no server starts in time, the client gets status 503 with a time to retry, as it does at
    once without a timeout."""
    for timeout_s in (0.05, 0.0):
        async with stopped("theirs", start_timeout_s=timeout_s) as (_, gateway, http):
            reply = await http.post(TEXTS, json=body_of())
            assert reply.status_code == 503
            assert reply.json()["error"]["code"] == "upstream_unavailable"
            assert int(reply.headers["Retry-After"]) >= 1
            assert (await http.get("/ready")).status_code == (200 if timeout_s else 503)
            assert await advice(gateway, http, "theirs") == (1, 0)
            assert is_idle(gateway.node)


async def test_models_wait_independently() -> None:
    """Requests for a model without a server neither stop those of other models, nor do servers of
    other models count for the advice. A model in no settings gets status 404 at once."""
    async with stopped("one", "other", scale_to_zero_s=60.0) as (servers, gateway, http):
        await start(gateway, servers[0])
        queue = gateway.node.dispatcher.queue
        waiting = asyncio.create_task(http.post(TEXTS, json=body_of("other")))
        await until(lambda: len(queue) == 1)
        for _ in range(3):
            assert (await http.post(TEXTS, json=body_of("one"))).status_code == 200
        assert (await http.post(TEXTS, json=body_of("third"))).status_code == 404
        assert await advice(gateway, http, "one") == (1, 0)
        assert await advice(gateway, http, "other") == (1, 1)
        await start(gateway, servers[1])
        assert (await waiting).status_code == 200
        assert [json.loads(body)["model"] for body in servers[1].bodies] == ["other"]


async def test_waiting_stream_gets_comments(monkeypatch: pytest.MonkeyPatch) -> None:
    """The client of a stream gets comments while no server runs, and then the stream."""
    monkeypatch.setattr(stream, "KEEPALIVE_S", 0.01)
    async with stopped("theirs", handler=stream_of(TOKEN, LAST, DONE)) as (
        (server,),
        gateway,
        http,
    ):
        async with http.stream("POST", TEXTS, json=body_of(stream=True)) as reply:
            blocks = reply.aiter_bytes()
            begin = await anext(blocks)
            assert begin.startswith(b":")
            await start(gateway, server)
            rest = b"".join([block async for block in blocks])
        assert rest.endswith(TOKEN + LAST + DONE)


async def test_server_that_stops_keeps_its_queue() -> None:
    """Requests that wait for capacity also wait for the server if it stops meanwhile."""
    may_end = asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        await may_end.wait()
        return await answer(request)

    async with stopped("theirs", handler=handler) as ((server,), gateway, http):
        await start(gateway, server)
        first = asyncio.create_task(http.post(TEXTS, json=body_of()))
        await server.arrived.get()
        second = asyncio.create_task(http.post(TEXTS, json=body_of()))
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        server.status = 503
        (worker,) = gateway.node.fleet.workers
        for _ in range(3):
            await worker.backend.probe()
        assert worker.backend.failure is not None
        may_end.set()
        assert (await first).status_code == 200
        assert len(gateway.node.dispatcher.queue) == 1
        await start(gateway, server)
        gateway.node.dispatcher.queue.dispatch_waiting()  # as the heartbeat does
        assert (await second).status_code == 200


async def test_node_that_stops_fails_waiting_requests() -> None:
    """A node that shuts down does not wait for servers."""
    async with stopped("theirs") as (_, gateway, http):
        waiting = asyncio.create_task(http.post(TEXTS, json=body_of()))
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        await gateway.node.models[0].stop()
        assert (await waiting).status_code == 503


async def test_aliases_count_for_their_model() -> None:
    """The advice has the name of a model at its upstreams, also for requests with an alias."""
    async with upstream(answer) as server:
        server.status, server.models = 503, ("large",)
        server.settings = {"aliases": {"chat": "large"}}
        async with (
            forwarding(server, start_timeout_s=60.0) as gateway,
            client(gateway) as http,
        ):
            waiting = asyncio.create_task(http.post(TEXTS, json=body_of("chat")))
            await until(lambda: len(gateway.node.dispatcher.queue) == 1)
            assert await advice(gateway, http, "large") == (1, 1)
            await start(gateway, server)
            assert (await waiting).status_code == 200
            assert json.loads(server.bodies[0])["model"] == "large"


def test_advice_of_a_model_follows_its_use() -> None:
    """The advice is 0 before the first request and after the idle time, 1 while requests wait for a
    first server, and never 0 if at least one server must run."""
    advisor, always = ServerAdvisor(60.0), ServerAdvisor(0.0)
    none, waits = DemandView([]), DemandView([], queued=3, queue_s=5.0)
    runs, idle = DemandView([BUSY]), DemandView([IDLE])

    def both(view: DemandView, running: int, now_s: float) -> tuple[int, int]:
        return advisor.update(view, running, now_s), always.update(view, running, now_s)

    assert both(none, 0, 0.0) == (0, 1)
    assert both(waits, 0, 10.0) == (1, 1)
    assert both(none, 0, 20.0) == (1, 1), "the client has left, but the server is starting"
    assert both(runs, 8, 30.0) == (1, 1)
    assert both(idle, 0, 89.0) == (1, 1)
    assert both(idle, 0, 90.0) == (0, 1)
    assert both(none, 0, 100.0) == (0, 1)
    assert both(waits, 0, 110.0) == (1, 1)


def test_server_that_runs_at_the_start_is_kept_for_the_idle_time() -> None:
    """A gateway that restarts does not stop the servers of models at once."""
    advisor = ServerAdvisor(60.0)
    assert [advisor.update(DemandView([IDLE]), 0, at_s) for at_s in (0.0, 59.0, 60.0)] == [1, 1, 0]


def test_busy_servers_raise_the_advice() -> None:
    """The advice above 1 follows the load, as that for a pool."""
    advisor = ServerAdvisor(60.0)
    view = DemandView([BUSY, BUSY])
    found = [advisor.update(view, 16, float(at_s)) for at_s in range(round(DOWN_S))]
    assert found[0] == 2
    assert found[-1] == 3
