"""Slow readers on either side of a connection take bounded memory and lose no tokens."""

from __future__ import annotations

import asyncio
from contextlib import aclosing
from itertools import count
from types import SimpleNamespace

import pytest
from aiohttp import web

from draftgate.backends.delta_reader import generate
from draftgate.backends.testing import make_request
from draftgate.backends.types import Delta, Pace
from draftgate.gateway.http import readers
from draftgate.gateway.http.peers.session import MOST_DELTAS, DeltaOutbox, PeerSession
from tests.gateway.harness import ScriptedBackend, running, until
from tests.gateway.tcp_proxy import proxied
from tests.gateway.test_readers import StoppedReader, emit_until
from tests.peer.harness import linked_to
from tests.upstream_settings import at

WORDS = "word " * 200


async def test_slow_client_pauses_its_request_at_the_peer(
    scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a client reads slowly, the remote worker slows down, pauses and resumes its request
    without losing a token."""
    seconds = count()
    monkeypatch.setattr(readers, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(
        "draftgate.gateway.routes.time",
        SimpleNamespace(monotonic=lambda: float(next(seconds))),
    )
    async with (
        running(backends=[scripted]) as peer,
        running(backend="peer", upstream=at(peer.url)) as where,
    ):
        reader = StoppedReader()
        await reader.send(where, {"prompt": "x", "max_tokens": 400, "stream": True})
        request = await scripted.submitted.get()
        paused = (request.request_id, Pace.PAUSED)
        steps = await emit_until(scripted, request, lambda: paused in scripted.paces)
        reading = asyncio.create_task(reader.read())
        await until(lambda: scripted.paces[-1] == (request.request_id, Pace.FULL))
        scripted.emit(request, "end", last=True)
        text = await reading
        reader.close()
    assert text.count("word ") == steps * 40
    assert text.count("data: [DONE]") == 1


async def test_gateway_that_stops_reading_costs_bounded_memory(
    scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The outbox merges deltas by request when they exceed its bound."""
    sessions: list[PeerSession] = []
    run = PeerSession.run

    async def record_session(session: PeerSession, request: web.Request) -> None:
        sessions.append(session)
        await run(session, request)

    monkeypatch.setattr(PeerSession, "run", record_session)
    async with (
        running(backends=[scripted]) as peer,
        proxied(peer.url) as proxy,
        linked_to(proxy.url, silence_s=60.0) as backend,
        aclosing(generate(backend, make_request(backend, max_tokens=400))) as stream,
    ):
        request = await scripted.submitted.get()
        proxy.freeze()
        (outbox,) = [session._outbox for session in sessions]
        steps = 0
        async with asyncio.timeout(60):
            while scripted.unread_tokens(request) < 100 * 200:
                scripted.emit(request, WORDS)
                steps += 1
                await asyncio.sleep(0)
                assert len(outbox._deltas) <= MOST_DELTAS
        proxy.thaw()
        scripted.emit(request, "end", last=True)
        texts = [delta.text async for delta in stream]
        assert "".join(texts) == WORDS * steps + "end"
        assert len(texts) < steps


async def test_full_outbox_makes_all_streams_wait() -> None:
    """All streams wait for space in a full outbox, and each stream keeps its order."""
    news = asyncio.Event()
    outbox = DeltaOutbox(news.set)
    most = 3 * MOST_DELTAS

    async def fill(link_id: str) -> None:
        for token in range(most):
            await outbox.space()
            assert outbox.put(link_id, Delta(0, (token,), ""))

    filling = [asyncio.create_task(fill(link_id)) for link_id in "ab"]
    taken: dict[str, list[int]] = {"a": [], "b": []}
    while sum(map(len, taken.values())) < 2 * most:
        await news.wait()
        news.clear()
        deltas, failed, _ = outbox.take()
        assert len(deltas) <= MOST_DELTAS
        assert not failed
        for link_id, delta in deltas:
            taken[link_id] += delta.token_ids
        await asyncio.sleep(0)
    assert taken == {"a": list(range(most)), "b": list(range(most))}
    await asyncio.gather(*filling)


async def test_all_deltas_of_a_step_are_one_message(
    scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The peer encodes and sends each step once for any number of requests."""
    sizes: list[int] = []
    take = DeltaOutbox.take

    def count_take(outbox: DeltaOutbox) -> object:
        taken = take(outbox)
        sizes.append(len(taken[0]))
        return taken

    monkeypatch.setattr(DeltaOutbox, "take", count_take)
    async with running(backends=[scripted]) as peer, linked_to(peer.url) as backend:
        submitted = [make_request(backend, max_tokens=9) for _ in range(20)]
        streams = [generate(backend, request) for request in submitted]
        requests = [await scripted.submitted.get() for _ in submitted]
        for _ in range(5):
            batch = [(request.request_id, Delta(0, (1,), "a")) for request in requests]
            scripted.sinks.deliver(batch)
            for stream in streams:
                assert (await anext(stream)).text == "a"
        for stream in streams:
            await stream.aclose()
    assert [size for size in sizes if size] == [20] * 5
