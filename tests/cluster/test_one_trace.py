"""A single trace over a gateway, Redis, two remote workers, and their failover."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager

from opentelemetry.proto.trace.v1.trace_pb2 import Span

from draftgate.gateway.app import Listening
from draftgate.gateway.state.guarded.store import GuardedStore
from draftgate.gateway.state.redis.store import RedisStore
from draftgate.gateway.telemetry.trace_export import open_tracing
from tests.gateway.collector import Collector, ReceivedSpan, collecting
from tests.gateway.harness import PATIENCE_S, post_raw, running, until
from tests.gateway.redis_server import RedisServer
from tests.peer.harness import SLOW

PATH = "/v1/completions"
SERVER = f"POST {PATH}"
BODY = {"prompt": "tell nobody", "max_tokens": 120, "seed": 1, "stream": True, "ignore_eos": True}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"
ATTEMPT = ("queue", "route", "reserve", "decide", "dispatch")
"""The gateway's spans of each attempt by start time."""
WORKER_HOPS = ("worker.queue", "prefill", "decode")


@asynccontextmanager
async def nodes(
    collector: Collector, redis: RedisServer
) -> AsyncIterator[tuple[Listening, list[Listening]]]:
    """Yield a gateway and two workers on tracing nodes, joined through a real Redis."""
    async with AsyncExitStack() as stack:

        async def node(name: str, **settings: object) -> Listening:
            tracing = open_tracing(collector.url, {})
            stack.push_async_callback(asyncio.to_thread, tracing.shutdown)
            remote = RedisStore.at(redis.url, "p", name)
            store = GuardedStore(remote, deadline_s=PATIENCE_S)
            stack.push_async_callback(store.close)
            join = {"store": store, "join": redis.url, "tracing": tracing}
            where = await stack.enter_async_context(running(**join, **settings))
            await stack.enter_async_context(where.node.heartbeat.beating())
            return where

        workers = [await node(f"worker{n}", profile=SLOW) for n in range(2)]
        gateway = await node("gateway", no_worker=True)
        await until(lambda: len(gateway.node.fleet.serving) == len(workers))
        yield gateway, workers


def spans_of(collector: Collector, name: str) -> list[ReceivedSpan]:
    """Return the spans of a name by start time."""
    found = [span for span in collector.spans if span.name == name]
    return sorted(found, key=lambda span: span.span.start_time_unix_nano)


async def test_a_request_that_loses_a_peer_is_one_trace(own_redis: RedisServer) -> None:
    """Each span of a resumed request is below its cause, from the client to both workers."""
    async with collecting() as collector:
        async with nodes(collector, own_redis) as (gateway, workers):
            headers = f"traceparent: 00-{TRACE}-{PARENT}-01\r\n"
            reader, writer = await post_raw(gateway, PATH, BODY, headers)
            await reader.readuntil(b"data: ")
            ids = [where.node.fleet.own[0].worker_id for where in workers]
            (lost,) = (w for w in workers if w.node.in_flight)
            await lost.node.fleet.own[0].backend.stop()
            await reader.readuntil(b"[DONE]")
            writer.close()
            await until(lambda: not any(w.node.in_flight for w in (gateway, *workers)))
            first = lost.node.fleet.own[0].worker_id
            path = [first, *(each for each in ids if each != first)]
        check(collector, path)


def check(collector: Collector, path: list[str]) -> None:
    """Check that every span of both attempts exists once, within its parent, in the same trace."""
    server = collector.named(SERVER)
    assert {span.trace for span in collector.spans} == {TRACE}
    assert server.parent == PARENT
    assert server.events == ["first_token", "resume"]
    resume = server.attributes_of("resume")
    assert [resume["draftgate.resume.from"], resume["draftgate.resume.to"]] == path
    assert collector.named("admit").parent == server.id
    for name in ATTEMPT:
        found = spans_of(collector, name)
        assert len(found) == 2, name
        assert all(span.parent == server.id and span.within(server) for span in found), name
    for reserve in spans_of(collector, "reserve"):
        assert reserve.attributes["draftgate.state"] == "fresh"
    reserved = [each.attributes["draftgate.worker_id"] for each in spans_of(collector, "reserve")]
    assert reserved == path
    dispatches, peers = spans_of(collector, "dispatch"), spans_of(collector, "peer.generate")
    assert [dispatch.span.kind for dispatch in dispatches] == [Span.SPAN_KIND_CLIENT] * 2
    assert [peer.parent for peer in peers] == [dispatch.id for dispatch in dispatches]
    assert [peer.span.kind for peer in peers] == [Span.SPAN_KIND_SERVER] * 2
    assert [peer.attributes["draftgate.worker_id"] for peer in peers] == path
    assert [span.failed for span in (*dispatches, *peers)] == [True, False] * 2
    for peer in peers:
        hops = [span for span in collector.spans if span.parent == peer.id]
        assert sorted(hop.name for hop in hops) == sorted(WORKER_HOPS)
        assert all(hop.within(peer) for hop in hops)
    assert not server.failed
    assert len(collector.spans) == 2 + 2 * len(ATTEMPT) + 2 * (1 + len(WORKER_HOPS))
    assert "tell nobody" not in str(collector.spans)
