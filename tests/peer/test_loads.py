"""A peer sends its load only as often as gateways need it."""

from __future__ import annotations

import math
from contextlib import aclosing

import pytest

from draftgate.backends.delta_reader import generate
from draftgate.backends.remote_worker import Update
from draftgate.backends.testing import make_request
from draftgate.backends.types import Delta
from draftgate.gateway.http.peers import session
from draftgate.gateway.http.peers.session import PeerSession
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import ScriptedBackend, running, until
from tests.peer.harness import impostor, linked_to, ready_message


@pytest.fixture
def updates(monkeypatch: pytest.MonkeyPatch) -> list[Update]:
    """The updates of all sessions."""
    sent: list[Update] = []
    make = PeerSession._update

    def record(of: PeerSession) -> Update:
        sent.append(make(of))
        return sent[-1]

    monkeypatch.setattr(PeerSession, "_update", record)
    return sent


async def run_request(backend: ScriptedBackend, texts: list[str]) -> list[str]:
    """Run a request of a gateway, and return its texts. Each text is a step of its own."""
    async with (
        running(backends=[backend]) as peer,
        linked_to(peer.url) as linked,
        aclosing(generate(linked, make_request(linked, max_tokens=400))) as stream,
    ):
        request = await backend.submitted.get()
        received = []
        for number, text in enumerate(texts, 1):
            backend.emit(request, text, last=number == len(texts))
            received.append((await anext(stream)).text)
        return received


async def test_only_the_end_of_a_request_adds_a_load_within_the_interval(
    scripted: ScriptedBackend, updates: list[Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates within `LOAD_S` of a load have no load, until a request ends and frees capacity."""
    monkeypatch.setattr(session, "LOAD_S", math.inf)
    assert await run_request(scripted, ["a", "b", "c"]) == ["a", "b", "c"]
    texts = [("".join(delta.text for _, delta in one.deltas), one.load) for one in updates]
    assert [text for text, load in texts if load is not None] == ["", "c"]
    assert [text for text, load in texts if load is None and text] == ["a", "b"]


async def test_updates_after_a_cancelled_request_have_a_load(
    scripted: ScriptedBackend, updates: list[Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The updates after a cancelled request have loads, because a later step frees its capacity."""
    monkeypatch.setattr(session, "LOAD_S", math.inf)
    async with running(backends=[scripted]) as peer, linked_to(peer.url) as linked:
        leaver = generate(linked, make_request(linked, max_tokens=400))
        async with aclosing(generate(linked, make_request(linked, max_tokens=400))) as keeper:
            leaving, kept = await scripted.submitted.get(), await scripted.submitted.get()
            scripted.emit(leaving, "a")
            await anext(leaver)
            await leaver.aclose()
            await scripted.abandoned.get()
            before = len(updates)
            for text in ("b", "c"):
                scripted.emit(kept, text)
                await anext(keeper)
    assert [one.load is not None for one in updates[before:] if one.deltas] == [True, True]


async def test_every_update_has_a_load_after_the_interval(
    scripted: ScriptedBackend, updates: list[Update], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Updates further apart than `LOAD_S` all have a load."""
    monkeypatch.setattr(session, "LOAD_S", 0.0)
    assert await run_request(scripted, ["a", "b", "c"]) == ["a", "b", "c"]
    assert all(update.load is not None for update in updates)


async def test_update_without_a_load_leaves_load_and_watermark() -> None:
    """The gateway keeps the last load, its age and its watermark until the next load."""
    load = WorkerLoad(3, 1, 8, 8, 0.0, 0.5, ())
    clock = iter(range(100))
    async with (
        impostor(ready_message()) as peer,
        linked_to(peer.url, clock=lambda: float(next(clock)), silence_s=60.0) as backend,
        aclosing(generate(backend, make_request(backend, max_tokens=8))) as stream,
    ):
        await until(lambda: bool(peer.commands))
        (submitted,) = peer.commands
        peer.say(Update([], load, watermark=7))
        await until(lambda: backend.load() == load)
        updated_s = backend._updated_s
        peer.say(Update([(submitted.id, Delta(0, (1,), "a"))]))
        assert (await anext(stream)).text == "a"
        assert (backend.load(), backend.watermark, backend._updated_s) == (load, 7, updated_s)
