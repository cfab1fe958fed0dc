"""A guarded store in front of a real Redis that is paused, stopped, killed and emptied.

Waits end on events; none depends on the speed of the machine.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager

import pytest
import uvloop

from draftgate.gateway.app import Listening
from draftgate.gateway.state.calls import DEADLINE_S
from draftgate.gateway.state.guarded import GuardedStore
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.state.store import Lease, Reservation
from draftgate.policies.resilience.breaker import Patience
from tests.gateway.harness import PATIENCE_S, client, eventually, running
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import leased_tokens, offer, report, reserve
from tests.gateway.tcp_proxy import proxied

QUICK = Patience(failures=3, timeouts_span_s=0.1, first_pause_s=0.02, longest_pause_s=0.1)


def guard(redis: RedisServer, name: str, deadline_s: float) -> GuardedStore:
    remote = RedisStore.at(redis.url, "p", name)
    return GuardedStore(remote, patience=QUICK, deadline_s=deadline_s)


class Gateway:
    """What a node does with its store: heartbeats and requests with short leases."""

    def __init__(self, redis: RedisServer, name: str, deadline_s: float) -> None:
        self.store = guard(redis, name, deadline_s)
        self.name = name
        self.seq = 0
        self.held: dict[str, Lease] = {}

    async def beat(self) -> None:
        self.seq += 1
        told = report(self.name, seq=self.seq, capacity_tokens=10**6)
        await self.store.publish(told)
        await self.store.renew(tuple(self.held.values()), 30.0)

    async def ask(self, name: str, tokens: int = 10) -> Reservation:
        """Reserve for a request at this gateway's own worker; it never fails."""
        found = await reserve(self.store, f"{self.name}-{name}", tokens, offer(self.name))
        assert found.lease is not None, found
        self.held[found.lease.request_id] = found.lease
        return found

    async def end(self, found: Reservation) -> None:
        assert found.lease is not None
        del self.held[found.lease.request_id]
        await self.store.release((found.lease.request_id,))

    async def serve_until(self, over: Callable[[Reservation], bool]) -> None:
        """Beat and serve requests until one of them fulfils a condition."""
        async with asyncio.timeout(PATIENCE_S):
            for index in range(10**9):
                await self.beat()
                found = await self.ask(f"short{index}")
                await self.end(found)
                if over(found):
                    return
                await asyncio.sleep(0.005)

    async def agreed(self) -> None:
        """Wait until the server has exactly this gateway's leases."""
        tokens = sum(lease.tokens for lease in self.held.values())

        async def same() -> bool:
            await self.beat()
            found = await self.store.snapshot()
            leased = {view.worker_id: view.leased_tokens for view in found.workers}
            return not found.degraded and leased.get(self.name) == tokens

        await eventually(same)


@asynccontextmanager
async def holding(redis: RedisServer, deadline_s: float) -> AsyncIterator[Gateway]:
    """A gateway with two leases, and a working server in the end."""
    made = Gateway(redis, "w", deadline_s)
    await made.serve_until(well)
    for name in ("long1", "long2"):
        await made.ask(name, 500)
    await made.agreed()
    yield made
    redis.start_again()
    await made.store.close()


@pytest.fixture
async def gateway(own_redis: RedisServer) -> AsyncIterator[Gateway]:
    """A gateway with the production deadline."""
    async with holding(own_redis, DEADLINE_S) as made:
        yield made


@pytest.fixture
async def patient(own_redis: RedisServer) -> AsyncIterator[Gateway]:
    """A gateway that waits as long as this machine may need."""
    async with holding(own_redis, PATIENCE_S) as made:
        yield made


def well(found: Reservation) -> bool:
    return not found.degraded


def degraded(found: Reservation) -> bool:
    return found.degraded


async def test_a_paused_server(gateway: Gateway, own_redis: RedisServer) -> None:
    """While the server answers no client, every request is served, and no ended lease stays."""
    own_redis.command("CLIENT", "PAUSE", 700, "ALL")
    await gateway.serve_until(lambda found: gateway.store.outage is not None)
    await gateway.serve_until(well)
    await gateway.agreed()


async def test_a_stopped_server(gateway: Gateway, own_redis: RedisServer) -> None:
    """A stopped process keeps connections open without answers; later everything works again."""
    own_redis.freeze()
    await gateway.serve_until(lambda found: gateway.store.outage is not None)
    await gateway.serve_until(degraded)
    own_redis.thaw()
    await gateway.serve_until(well)
    await gateway.agreed()


async def test_a_server_restarted_empty(gateway: Gateway, own_redis: RedisServer) -> None:
    """Leases from before and during the outage are restored exactly."""
    own_redis.kill()
    await gateway.serve_until(lambda found: gateway.store.outage is not None)
    assert (await gateway.ask("taken alone", 7)).degraded
    own_redis.start()
    await gateway.serve_until(well)
    await gateway.agreed()
    assert await leased_tokens(gateway.store) == 1007


async def test_a_flushed_server(patient: Gateway, own_redis: RedisServer) -> None:
    """No request is refused, and leases are restored without an outage."""
    for _ in range(5):
        own_redis.command("FLUSHALL")
        await patient.ask("in the moment")
        await patient.beat()
    await patient.agreed()
    assert patient.store.outage is None


async def test_connections_that_the_server_closes(patient: Gateway, own_redis: RedisServer) -> None:
    """After the server closes an idle connection, the next call uses another one."""
    for index in range(5):
        own_redis.command("CLIENT", "KILL", "TYPE", "normal")
        assert not (await patient.ask(f"r{index}")).degraded


def test_broken_connections_under_uvloop(own_redis: RedisServer) -> None:
    """Under uvloop, with its own errors, a call on a broken connection is repeated."""

    async def scenario() -> None:
        async with proxied(own_redis.url) as proxy:
            url = f"redis://{proxy.url.partition('://')[2]}"
            store = RedisStore.at(url, "p", "g")
            for turns in range(50):
                calls = (store.renew((), 30.0) for _ in range(3))
                await asyncio.gather(*calls)
                proxy.cut()
                for _ in range(turns % 4):
                    await asyncio.sleep(0)
            await store.close()

    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        runner.run(scenario())


async def test_gateways_meet_again(gateway: Gateway, own_redis: RedisServer) -> None:
    """Two separated gateways see each other's workers and leases again afterwards."""
    other = Gateway(own_redis, "v", DEADLINE_S)
    await other.serve_until(well)
    own_redis.kill()
    for one in (gateway, other):
        await one.serve_until(lambda found, one=one: one.store.outage is not None)
        await one.ask("alone", 11)
    own_redis.start()
    for one in (gateway, other):
        await one.serve_until(well)
        await one.agreed()

    async def both() -> bool:
        found = await other.store.snapshot()
        leased = {view.worker_id: view.leased_tokens for view in found.workers}
        return (leased, found.gateways, found.degraded) == ({"v": 11, "w": 1011}, 2, False)

    await eventually(both)
    await other.store.close()


@asynccontextmanager
async def joined(redis: RedisServer) -> AsyncIterator[tuple[GuardedStore, Listening]]:
    """A node with a store in that server, without its own heartbeat."""
    store = guard(redis, "g", PATIENCE_S)
    async with running(store=store) as where:
        yield store, where
    await store.close()


async def test_a_node_serves_without_its_redis(own_redis: RedisServer) -> None:
    """Without Redis no request fails, the node stays healthy, and `/metrics` shows the outage."""
    async with joined(own_redis) as (store, where), client(where) as http:

        async def served() -> None:
            answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 3})
            assert answer.status_code == 200

        async def told() -> str:
            assert (await http.get("/health")).status_code == 200
            assert (await http.get("/ready")).status_code == 200
            page = (await http.get("/metrics")).text.splitlines()
            (line,) = [one for one in page if one.startswith("draftgate_state_store_out{")]
            return line.rpartition(" ")[2]

        await where.node.heartbeat.beat()
        await served()
        assert await told() == "0.0"
        own_redis.kill()
        async with asyncio.timeout(PATIENCE_S):
            while store.outage is None:
                await served()
            assert await told() == "1.0"
            own_redis.start()
            while store.outage is not None:
                await served()

        async def nothing_leased() -> bool:
            await where.node.heartbeat.beat()
            (view,) = (await store.snapshot()).workers
            return view.leased_tokens == 0

        await eventually(nothing_leased)
