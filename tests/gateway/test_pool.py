"""Nodes that share a store: their reports and leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draftgate.gateway.app import Listening, build_node
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.state.guarded import GuardedStore, open_store
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.store import Store, WorkerView
from tests.gateway.harness import PATIENCE_S, ScriptedBackend, leased, post_raw, running
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import POOL, TimedMemory, TimedRedis, views

BODY = {"prompt": [1] * 10, "max_tokens": 5, "stream": True}


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """Yield a store that several nodes of this process share."""
    if request.param == "memory":
        timed = TimedMemory()
    else:
        timed = TimedRedis(request.getfixturevalue("redis_server").url)
        await timed.begin()
    yield timed.store
    await timed.close()


@asynccontextmanager
async def member(store: Store, **settings: Any) -> AsyncIterator[Listening]:
    """Yield a node with that store, which has reported its worker."""
    async with running(store=store, **settings) as where:
        await where.node.heartbeat.beat()
        yield where


def worker_of(where: Listening) -> str:
    return where.node.fleet.workers[0].worker_id


async def view_of(where: Listening) -> WorkerView:
    return (await views(where.node.store))[worker_of(where)]


async def test_node_reports_its_worker(store: Store) -> None:
    """It reports the model and the capacity; only its own gateway can reach it."""
    async with member(store) as where:
        backend = where.node.fleet.workers[0].backend
        told = (await view_of(where)).report
        load = backend.load()
        assert told.capacity_tokens == load.kv_blocks_total * load.kv_block_tokens > 0
        card = backend.card
        assert (told.model_id, told.max_model_len) == (card.model_id, card.max_model_len)
        assert (told.address, told.watermark) == ("", 0)


async def test_nodes_of_a_pool_see_each_other(store: Store) -> None:
    """Each worker is in the other node's snapshot, with its own id and epoch."""
    async with member(store) as one, member(store) as other:
        assert set(await views(store)) == {worker_of(one), worker_of(other)}
        epochs = {view.report.epoch for view in (await views(store)).values()}
        assert len(epochs) == 2


async def test_report_includes_requests_that_were_sent(
    store: Store, scripted: ScriptedBackend
) -> None:
    """A lease is behind the watermark only until the next report."""
    async with member(store, backends=[scripted]) as where:
        _, writer = await post_raw(where, "/v1/completions", BODY)
        request = await scripted.submitted.get()
        view = await view_of(where)
        assert (view.leased_tokens, view.behind_tokens) == (15, 15)
        await where.node.heartbeat.beat()
        view = await view_of(where)
        assert (view.leased_tokens, view.behind_tokens, scripted.load().running) == (15, 0, 1)
        scripted.emit(request, "x", last=True)
        async with asyncio.timeout(PATIENCE_S):
            await where.node.dispatcher.drained()
        assert await leased(where.node) == 0
        writer.close()


async def test_draining_node_leaves_the_pool_and_keeps_its_leases(
    store: Store, scripted: ScriptedBackend
) -> None:
    """Its worker gets no new requests; running ones keep their capacity to the end."""
    async with member(store, backends=[scripted]) as where:
        _, writer = await post_raw(where, "/v1/completions", BODY)
        request = await scripted.submitted.get()
        await where.node.heartbeat.leave()
        await where.node.heartbeat.beat()
        assert await views(store) == {}
        where.node.heartbeat._left = False  # to read the leases once more
        await where.node.heartbeat.beat()
        assert await leased(where.node) == 15
        scripted.emit(request, "x", last=True)
        async with asyncio.timeout(PATIENCE_S):
            await where.node.dispatcher.drained()
        writer.close()


async def test_node_without_join_has_its_own_store() -> None:
    """There is no connection and no guard."""
    assert isinstance(open_store(None, POOL), MemoryStore)
    assert isinstance(build_node(ServeConfig(backend="sim")).store, MemoryStore)


async def test_node_joins_the_pool_of_its_settings(redis_server: RedisServer) -> None:
    """`--join` and `--pool` decide where its worker is listed."""
    config = ServeConfig(backend="sim", join=redis_server.url, pool="blue")
    node = build_node(config)
    assert isinstance(node.store, GuardedStore)
    await node.start()
    await node.heartbeat.beat()
    keys = redis_server.command("KEYS", "draftgate:{blue}:w:*")
    assert keys == [f"draftgate:{{blue}}:w:{node.fleet.workers[0].worker_id}"]
    await node.fleet.stop()
    await node.store.close()
