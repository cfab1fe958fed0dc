"""Traces over two nodes have correct parents, no duplicate spans, and times of one clock."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from types import SimpleNamespace

import pytest
from opentelemetry.proto.trace.v1.trace_pb2 import Span

from draftgate.backends.types import Phases
from draftgate.gateway.app import Listening
from draftgate.gateway.telemetry.trace_export import open_tracing
from draftgate.gateway.tracing import Tracing
from tests.gateway.collector import Collector, collecting
from tests.gateway.harness import ScriptedBackend, client, port_of, post_raw, running, until
from tests.upstream_settings import at

PATH = "/v1/completions"
SERVER = f"POST {PATH}"
HOPS = ("worker.queue", "prefill", "decode")
BODY = {"prompt": "tell nobody", "max_tokens": 20, "seed": 1, "stream": True}
AHEAD_S = 5000.0
"""The offset of the other machine's monotonic clock, in seconds."""
DECODE_SUM = "draftgate_decode_seconds_sum"


@asynccontextmanager
async def two_nodes(
    collector: Collector, *, peer_traces: bool, **settings: object
) -> AsyncIterator[tuple[Listening, Listening]]:
    """Yield a tracing node and its peer, which traces only with `peer_traces`."""
    tracings: list[Tracing] = [open_tracing(collector.url, {})]
    tracings.append(open_tracing(collector.url, {}) if peer_traces else Tracing())
    try:
        async with (
            running(tracing=tracings[1], **settings) as peer,
            running(backend="peer", upstream=at(peer.url), tracing=tracings[0]) as where,
        ):
            yield where, peer
    finally:
        for tracing in tracings:
            await asyncio.to_thread(tracing.shutdown)


async def test_worker_spans_are_below_the_peers_server_span() -> None:
    """The peer's server span is below `dispatch`, a CLIENT span with the peer's address, and the
    gateway adds no worker spans."""
    async with (
        collecting() as collector,
        two_nodes(collector, peer_traces=True) as (where, peer),
        client(where) as http,
    ):
        assert (await http.post(PATH, json=BODY)).status_code == 200
        worker_id = peer.node.fleet.workers[0].worker_id
    dispatch, peer_span = collector.named("dispatch"), collector.named("peer.generate")
    assert peer_span.parent == dispatch.id
    assert peer_span.span.kind == Span.SPAN_KIND_SERVER
    assert peer_span.attributes["draftgate.worker_id"] == worker_id
    for name in HOPS:
        assert collector.named(name).parent == peer_span.id
        assert collector.named(name).within(peer_span)
    assert dispatch.parent == collector.named(SERVER).id
    assert dispatch.span.kind == Span.SPAN_KIND_CLIENT
    assert dispatch.attributes["server.address"] == "127.0.0.1"
    assert dispatch.attributes["server.port"] == port_of(peer)
    assert len({span.trace for span in collector.spans}) == 1
    assert not any(span.failed for span in collector.spans)


async def test_gateway_records_worker_spans_of_a_peer_without_tracing() -> None:
    """The gateway derives the worker spans below `dispatch` from the deltas."""
    async with (
        collecting() as collector,
        two_nodes(collector, peer_traces=False) as (where, _),
        client(where) as http,
    ):
        assert (await http.post(PATH, json=BODY)).status_code == 200
    dispatch = collector.named("dispatch")
    for name in HOPS:
        assert collector.named(name).parent == dispatch.id
        assert collector.named(name).within(dispatch)
    assert "peer.generate" not in {span.name for span in collector.spans}


async def test_unsampled_request_is_not_traced_by_the_peer() -> None:
    """If the client's trace is not sampled, no node records spans."""
    headers = {"traceparent": f"00-{'ab' * 16}-{'cd' * 8}-00"}
    async with (
        collecting() as collector,
        two_nodes(collector, peer_traces=True) as (where, _),
        client(where) as http,
    ):
        assert (await http.post(PATH, json=BODY, headers=headers)).status_code == 200
    assert collector.spans == []


async def test_times_of_another_clock_lie_within_dispatch(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The worker spans are within `dispatch`, and the gateway's metrics have correct durations."""
    theirs = SimpleNamespace(monotonic=lambda: time.monotonic() + AHEAD_S)
    monkeypatch.setattr("draftgate.gateway.http.peers.session.time", theirs)
    backend = ScriptedBackend()
    async with (
        collecting() as collector,
        two_nodes(collector, peer_traces=False, backends=[backend]) as (where, _),
    ):
        reader, writer = await post_raw(where, PATH, BODY)
        request = await backend.submitted.get()
        begin_s = time.monotonic()
        await until(lambda: time.monotonic() > begin_s + 0.01)
        now_s = theirs.monotonic()
        phases = Phases(now_s - 4e-3, now_s - 3e-3, ((now_s - 1e-3, 8),), now_s - 1e-3)
        backend.emit(request, "one", phases=phases)
        await reader.readuntil(b"data: ")
        backend.emit(request, "two", last=True)
        await reader.readuntil(b"[DONE]")
        writer.close()
        await until(lambda: where.node.in_flight == 0)
        async with client(where) as http:
            page = (await http.get("/metrics")).text
    dispatch, durations = collector.named("dispatch"), {}
    for name in HOPS:
        span = collector.named(name)
        assert span.within(dispatch)
        durations[name] = span.span.end_time_unix_nano - span.span.start_time_unix_nano
    assert durations["worker.queue"] == pytest.approx(1e6, abs=1e3)
    assert durations["prefill"] == pytest.approx(2e6, abs=1e3)
    (decode,) = (line for line in page.splitlines() if line.startswith(DECODE_SUM))
    assert 0 < float(decode.split()[-1]) < 60


async def test_cancel_ends_the_spans_of_both_nodes() -> None:
    """When a client disconnects, the spans of both nodes end without an error."""
    async with collecting() as collector:
        async with two_nodes(collector, peer_traces=True) as (where, peer):
            body = {**BODY, "max_tokens": 8000, "ignore_eos": True}
            reader, writer = await post_raw(where, PATH, body)
            await reader.readuntil(b"data: ")
            writer.close()
            await until(lambda: peer.node.in_flight == 0)
        peer_span = collector.named("peer.generate")
        assert collector.named("decode").parent == peer_span.id
        assert not any(span.failed for span in collector.spans)


async def test_worker_error_is_on_the_spans_of_both_nodes(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Each node marks the worker error on its own spans."""
    # No worker returns.
    monkeypatch.setattr("draftgate.gateway.dispatch.recovery.RECOVERY_S", 0.0)
    backend = ScriptedBackend()
    async with (
        collecting() as collector,
        two_nodes(collector, peer_traces=True, backends=[backend, ScriptedBackend()]) as (where, _),
    ):
        reader, writer = await post_raw(where, PATH, BODY)
        request = await backend.submitted.get()
        backend.emit(request, "one")
        await reader.readuntil(b"data: ")
        backend.crash("device lost")
        await reader.readuntil(b"worker_failed")
        writer.close()
        await until(lambda: where.node.in_flight == 0)
    failed = {span.name for span in collector.spans if span.failed}
    assert failed == {SERVER, "dispatch", "peer.generate"}
