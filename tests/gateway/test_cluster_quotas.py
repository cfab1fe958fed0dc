"""Tests of the quotas of nodes that share a real Redis server, whose time the test sets."""

from __future__ import annotations

from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path

import pytest

from draftgate.backends.checkpoints import SHIPPED_MODEL_ID
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.state.commands import ReadTotals
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.redis.client import open_client
from draftgate.gateway.state.redis.store import WARM_CONNECTIONS, RedisStore
from tests.gateway.harness import PATIENCE_S, client, eventually, open_stream, running
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import CLOCK, POOL, TimedRedis

ACCOUNT = quota_account("batch", SHIPPED_MODEL_ID)

BODY = {"prompt": "x", "max_tokens": 2, "ignore_eos": True}
KEY = {"authorization": "Bearer sk-batch"}


def write_keys(path: Path, requests_per_minute: int) -> None:
    path.write_text(
        f"keys:\n  - {{name: batch, key: sk-batch, requests_per_minute: {requests_per_minute}}}\n"
    )


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file with one key at 60 requests a minute."""
    path = tmp_path / "keys.yaml"
    write_keys(path, 60)
    return path


@pytest.fixture
async def timed(redis_server: RedisServer) -> AsyncIterator[TimedRedis]:
    """The store that the nodes share, which controls its time."""
    opened = TimedRedis(redis_server.url)
    await opened.begin()
    yield opened
    await opened.close()


@asynccontextmanager
async def member(redis: RedisServer, name: str, keys: Path) -> AsyncIterator[Listening]:
    """Run a node with its own connection to the store."""
    remote = RedisStore(open_client(redis.url), POOL, name, CLOCK)
    store = GuardedStore(remote, deadline_s=PATIENCE_S)
    async with running(store=store, api_keys_file=str(keys)) as gateway:
        await gateway.node.heartbeat.beat()
        yield gateway
    await store.close()


async def served(gateway: Listening, count: int) -> int:
    """Send requests, and return the number of served requests. The others get status 429."""
    async with client(gateway) as http:
        statuses = [
            (await http.post("/v1/completions", json=BODY, headers=KEY)).status_code
            for _ in range(count)
        ]
    assert set(statuses) <= {200, 429}
    return statuses.count(200)


async def test_two_nodes_grant_exactly_one_quota(
    timed: TimedRedis, redis_server: RedisServer, keys: Path
) -> None:
    """Two nodes with one key serve exactly 60 requests at one time, one more a second later, and
    the difference after the quota was raised, although one of them restarts."""
    async with member(redis_server, "g1", keys) as first:
        async with member(redis_server, "g2", keys) as second:
            assert await served(first, 25) + await served(second, 45) == 60
            assert await served(first, 5) == 0
            await timed.pass_time(1.0)
            assert await served(first, 3) + await served(second, 3) == 1
        async with member(redis_server, "g2", keys) as second:
            assert await served(second, 3) == 0
            write_keys(keys, 70)
            for gateway in (first, second):
                await gateway.node.key_files.check(gateway.node.keys.use_file)
            assert await served(first, 4) + await served(second, 10) == 10

    async def settled() -> bool:
        totals = await timed.store.call(ReadTotals(ACCOUNT))
        assert totals.reserved == totals.settled + totals.released + totals.open
        return totals.open == 0

    await eventually(settled)


async def test_nodes_share_a_quota_before_they_are_ready(
    timed: TimedRedis, redis_server: RedisServer, keys: Path
) -> None:
    """A node that is ready has its connections, and counts among the nodes that share quotas."""
    for number, name in enumerate(("g1", "g2"), 1):
        store = GuardedStore(RedisStore(open_client(redis_server.url), POOL, name, CLOCK))
        before = int(redis_server.command("INFO", "stats")["total_connections_received"])
        async with running(store=store, api_keys_file=str(keys)) as gateway:
            assert gateway.node.state is NodeState.READY
            assert await timed.client.zcard(f"draftgate:{{{POOL}}}:quota-nodes") == number
            opened = int(redis_server.command("INFO", "stats")["total_connections_received"])
            assert opened - before >= WARM_CONNECTIONS
        await store.close()


async def test_a_disconnected_client_returns_its_tokens(
    timed: TimedRedis, redis_server: RedisServer, keys: Path
) -> None:
    """The store has no open reservation after clients disconnect, and charges no unused token."""
    async with member(redis_server, "g1", keys) as gateway, client(gateway) as http:
        body = {**BODY, "max_tokens": 400, "stream": True}
        for _ in range(3):
            async with open_stream(http, "/v1/completions", body, KEY) as response:
                assert response.status_code == 200

        async def settled() -> bool:
            return (await timed.store.call(ReadTotals(ACCOUNT))).open == 0

        await eventually(settled)
        totals = await timed.store.call(ReadTotals(ACCOUNT))
        assert totals.released > 0
        assert totals.reserved == totals.settled + totals.released
