"""Models of a pool: found, requested, drained, forgotten and replaced without a failed request."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import httpx
import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL, SHIPPED_MODEL_ID
from draftgate.gateway.app import Listening, drain_and_close
from draftgate.gateway.cluster.members import SETTLE_S
from draftgate.gateway.node import Node
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.values import STALE_S, Snapshot
from draftgate.policies.values import replace
from tests.gateway.harness import JOIN, PATIENCE_S, client, running, until

PATH = "/v1/completions"
BODY = {"prompt": "def f(x):", "max_tokens": 24, "seed": 3, "ignore_eos": True}
SECOND = {"models": (f"second={SHIPPED_MODEL}",)}


@pytest.fixture
def store() -> MemoryStore:
    """The store that all nodes of a test share."""
    return MemoryStore()


@asynccontextmanager
async def member(store: MemoryStore, **settings: Any) -> AsyncIterator[Listening]:
    """Yield a node of the pool whose heartbeats run."""
    async with running(store=store, join=JOIN, **settings) as where, where.node.beating():
        yield where


async def until_served(node: Node, *names: str) -> None:
    """Wait until clients of a node can use exactly these models."""
    async with asyncio.timeout(PATIENCE_S):
        while {model.name for model in node.models if model.is_known} != set(names):
            node.take_sample()
            await asyncio.sleep(0.01)


def worker_ids(where: Listening) -> dict[str, str]:
    """Return the own worker of each model of a node."""
    return {model.name: worker.worker_id for model, worker in where.node.own_workers()}


async def placed(http: httpx.AsyncClient, model: str) -> str:
    """Return the worker that ran a request for a model."""
    reply = await http.post(PATH, json={**BODY, "model": model})
    assert reply.status_code == 200, reply.text
    worker_id: str = reply.json()["metrics"]["worker_id"]
    return worker_id


async def test_nodes_serve_the_models_of_other_nodes(store: MemoryStore) -> None:
    """Every node lists every model of the pool, and asks only workers that have the model."""
    settings = {"model": str(SHIPPED_MODEL)}  # named after its directory
    async with (
        member(store) as one,
        member(store, **settings) as two,
        member(store, no_worker=True) as gateway,
        AsyncExitStack() as stack,
    ):
        expected = {**worker_ids(one), **worker_ids(two)}
        assert set(expected) == {SHIPPED_MODEL_ID, SHIPPED_MODEL.name}
        for where in (one, two, gateway):
            await until_served(where.node, *expected)
            http = await stack.enter_async_context(client(where))
            listed = (await http.get("/v1/models")).json()["data"]
            assert {entry["id"] for entry in listed} == set(expected)
            for model, worker_id in expected.items():
                for _ in range(3):
                    assert await placed(http, model) == worker_id


async def test_a_node_with_two_models_offers_both_to_its_pool(store: MemoryStore) -> None:
    """The workers of a node have numbers over all its models, by which other nodes link."""
    async with (
        member(store, **SECOND) as two,
        member(store, no_worker=True) as gateway,
        client(gateway) as http,
    ):
        await until_served(gateway.node, SHIPPED_MODEL_ID, "second")
        for model, worker_id in worker_ids(two).items():
            assert await placed(http, model) == worker_id


async def test_a_model_without_workers_is_forgotten(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """After the last worker has left, requests wait for another one. Later the name is unknown."""
    monkeypatch.setattr("draftgate.gateway.node.FORGET_S", 0.2)
    monkeypatch.setattr("draftgate.gateway.cluster.members.SETTLE_S", 0.0)
    async with (
        member(store) as one,
        member(store, no_worker=True) as gateway,
        client(gateway) as http,
    ):
        async with member(store, model=str(SHIPPED_MODEL)) as two:
            await until_served(gateway.node, SHIPPED_MODEL_ID, SHIPPED_MODEL.name)
            await drain_and_close(two)
            await two.node.leave()
        await until_served(gateway.node, SHIPPED_MODEL_ID)
        reply = await http.post(PATH, json={**BODY, "model": SHIPPED_MODEL.name})
        assert reply.status_code == 404
        assert await placed(http, SHIPPED_MODEL_ID) == worker_ids(one)[SHIPPED_MODEL_ID]


async def test_a_node_that_has_just_started_may_miss_models(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A worker may report only after a gateway has started, as after an outage of Redis. Requests
    for its model first get status 503, with which clients try again, and later 404."""
    body = {**BODY, "model": SHIPPED_MODEL.name}
    async with (
        member(store),
        member(store, no_worker=True) as gateway,
        client(gateway) as http,
    ):
        members = gateway.node.models[0].members
        monkeypatch.setattr(members, "_settled_s", members._settled_s + PATIENCE_S)
        reply = await http.post(PATH, json=body)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_loading")
        assert (await http.post(PATH, json=BODY)).status_code == 200
        monkeypatch.setattr(members, "_settled_s", 0.0)
        assert (await http.post(PATH, json=body)).status_code == 404
        async with member(store, model=str(SHIPPED_MODEL)):
            await until_served(gateway.node, SHIPPED_MODEL_ID, SHIPPED_MODEL.name)
            await placed(http, SHIPPED_MODEL.name)


async def test_an_outage_of_the_store_after_the_start_hides_models(
    store: MemoryStore, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A gateway that loses the store just after its start may miss models until the store has
    responded for a while."""
    call = store.call
    lost = [False]

    async def interrupted(command: Any) -> Any:
        found = await call(command)
        return replace(found, degraded=lost[0]) if isinstance(found, Snapshot) else found

    monkeypatch.setattr(store, "call", interrupted)
    async with member(store), running(store=store, join=JOIN, no_worker=True) as gateway:
        members = gateway.node.models[0].members
        assert members is not None
        start_s = asyncio.get_running_loop().time() + 60.0
        after_s = 0
        monkeypatch.setattr(
            "draftgate.gateway.cluster.members._now_s", lambda: start_s + float(after_s)
        )
        members.settle()
        for after_s in range(1, 60):
            lost[0] = 4 <= after_s < 40
            await members.refresh()
            assert gateway.node.may_miss_models == (after_s < 39 + SETTLE_S)


async def test_a_model_is_known_while_its_worker_is_late(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that starts while the only worker of a model does not reach Redis knows the model,
    and its requests get status 503."""
    monkeypatch.setattr("draftgate.gateway.node.FIND_S", 0.01)
    monkeypatch.setattr("draftgate.gateway.cluster.members.SETTLE_S", 0.0)
    ahead_s = [0.0]
    store = MemoryStore(lambda: time.monotonic() + ahead_s[0])
    async with running(store=store, join=JOIN, model=str(SHIPPED_MODEL)) as late:
        await late.node.heartbeat.beat()
        ahead_s[0] = 2 * STALE_S
        async with (
            member(store),
            member(store, no_worker=True) as gateway,
            client(gateway) as http,
        ):
            reply = await http.post(PATH, json={**BODY, "model": SHIPPED_MODEL.name})
            assert (reply.status_code, reply.json()["error"]["code"]) == (503, "model_loading")
            await late.node.heartbeat.beat()
            await until_served(gateway.node, SHIPPED_MODEL_ID, SHIPPED_MODEL.name)
            await placed(http, SHIPPED_MODEL.name)


async def test_a_model_is_replaced_without_a_failed_request(store: MemoryStore) -> None:
    """Requests for two models succeed while the only worker of one of them is replaced twice."""
    failed = list[str]()
    workers = set[str]()

    async def requests(http: httpx.AsyncClient, stop: asyncio.Event) -> None:
        while not stop.is_set():
            for model in (SHIPPED_MODEL_ID, "second"):
                reply = await http.post(PATH, json={**BODY, "model": model})
                if reply.status_code != 200:
                    failed.append(reply.text)
                else:
                    workers.add(reply.json()["metrics"]["worker_id"])

    async with (
        member(store) as one,
        member(store, no_worker=True) as gateway,
        client(gateway) as http,
        AsyncExitStack() as stack,
    ):
        old = await stack.enter_async_context(member(store, **SECOND))
        await until_served(gateway.node, SHIPPED_MODEL_ID, "second")
        stop = asyncio.Event()
        sending = [asyncio.create_task(requests(http, stop)) for _ in range(4)]
        second = gateway.node.model_named("second")
        assert second is not None
        for _ in range(2):
            new = await stack.enter_async_context(member(store, **SECOND))
            await until(lambda: len(second.fleet.serving) == 2)
            await old.node.leave()
            await drain_and_close(old)
            await old.node.stop()
            old = new
        stop.set()
        await asyncio.gather(*sending)
        assert failed == []
        assert worker_ids(one)[SHIPPED_MODEL_ID] in workers
        assert worker_ids(old)["second"] in workers
