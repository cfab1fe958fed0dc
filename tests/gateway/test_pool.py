"""Tests of nodes that share a store: reports and leases."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import pytest

from draftgate.gateway.app import Listening, build_node
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.state.guarded.store import GuardedStore, open_store
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import WorkerView
from tests.gateway.harness import (
    JOIN,
    PATIENCE_S,
    ScriptedBackend,
    eventually,
    leased,
    post_raw,
    running,
)
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import POOL, TimedMemory, TimedRedis, views

BODY = {"prompt": [1] * 10, "max_tokens": 5, "stream": True}


@pytest.fixture(params=["memory", "redis"])
async def store(request: pytest.FixtureRequest) -> AsyncIterator[Store]:
    """A store that several nodes of this process share."""
    if request.param == "memory":
        yield TimedMemory().store
        return
    timed = TimedRedis(request.getfixturevalue("redis_server").url)
    await timed.begin()
    store = GuardedStore(timed.store)
    yield store
    await store.close()


@asynccontextmanager
async def member(store: Store, **settings: Any) -> AsyncIterator[Listening]:
    """Run a node that uses the store and has reported its worker."""
    async with running(store=store, **{"join": JOIN, **settings}) as gateway:
        await gateway.node.heartbeat.beat()
        yield gateway


def worker_of(gateway: Listening) -> str:
    return gateway.node.fleet.workers[0].worker_id


async def view_of(gateway: Listening) -> WorkerView:
    return (await views(gateway.node.store))[worker_of(gateway)]


async def test_node_reports_its_worker(store: Store) -> None:
    """A node reports the model, the capacity and no address of its worker."""
    async with member(store, join=None) as gateway:
        backend = gateway.node.fleet.workers[0].backend
        report = (await view_of(gateway)).report
        load = backend.load()
        assert report.capacity_tokens == load.kv_blocks_total * load.kv_block_tokens > 0
        card = backend.card
        assert (report.model_id, report.max_model_len) == (card.model_id, card.max_model_len)
        assert (report.address, report.watermark) == ("", 0)


async def test_nodes_of_a_pool_see_each_other(store: Store) -> None:
    """The snapshot of each node contains both workers with different epochs."""
    async with member(store) as one, member(store) as other:
        assert set(await views(store)) == {worker_of(one), worker_of(other)}
        epochs = {view.report.epoch for view in (await views(store)).values()}
        assert len(epochs) == 2


async def test_report_includes_requests_that_were_sent(
    store: Store, scripted: ScriptedBackend
) -> None:
    """A lease is after the watermark only until the worker's next report."""
    async with member(store, backends=[scripted]) as gateway:
        _, writer = await post_raw(gateway, "/v1/completions", BODY)
        request = await scripted.submitted.get()
        view = await view_of(gateway)
        assert (view.leased_tokens, view.behind_tokens) == (15, 15)
        await gateway.node.heartbeat.beat()
        view = await view_of(gateway)
        assert (view.leased_tokens, view.behind_tokens, scripted.load().running) == (15, 0, 1)
        scripted.emit(request, "x", last=True)
        async with asyncio.timeout(PATIENCE_S):
            await gateway.node.lifecycle.in_flight.drained()

        async def is_released() -> bool:
            return await leased(gateway.node) == 0

        await eventually(is_released)
        writer.close()


async def test_draining_node_leaves_the_pool_and_keeps_its_leases(
    store: Store, scripted: ScriptedBackend
) -> None:
    """A draining node leaves the pool and keeps the leases of its running requests."""
    async with member(store, backends=[scripted]) as gateway:
        _, writer = await post_raw(gateway, "/v1/completions", BODY)
        request = await scripted.submitted.get()
        await gateway.node.heartbeat.leave()
        await gateway.node.heartbeat.beat()
        assert await views(store) == {}
        gateway.node.heartbeat._left = False  # makes the worker visible again to read its leases
        await gateway.node.heartbeat.beat()
        assert await leased(gateway.node) == 15
        scripted.emit(request, "x", last=True)
        async with asyncio.timeout(PATIENCE_S):
            await gateway.node.lifecycle.in_flight.drained()
        writer.close()


async def test_node_without_join_has_its_own_store() -> None:
    """A node without `--join` uses its own memory store."""
    assert isinstance(open_store(None, POOL), MemoryStore)
    assert isinstance(build_node(ServeConfig(backend="sim")).store, MemoryStore)


async def test_node_joins_the_pool_of_its_settings(redis_server: RedisServer) -> None:
    """The settings `--join` and `--pool` determine the pool of a node's worker."""
    config = ServeConfig(backend="sim", join=redis_server.url, pool="blue")
    node = build_node(config)
    assert isinstance(node.store, GuardedStore)
    await node.start()
    await node.heartbeat.beat()
    keys = redis_server.command("KEYS", "draftgate:{blue}:w:*")
    assert keys == [f"draftgate:{{blue}}:w:{node.fleet.workers[0].worker_id}"]
    await node.fleet.stop()
    await node.store.close()
