"""Peers that disconnect, hang, send invalid messages, change or return."""

from __future__ import annotations

import asyncio
import os
import re
import signal
import socket
import subprocess
from collections.abc import AsyncGenerator, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from functools import partial

import pytest

from draftgate.backends.delta_reader import generate
from draftgate.backends.errors import BackendFailed, CheckpointError, RequestRejected, WorkerLeft
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.channel import MOST_REPORT_BYTES
from draftgate.backends.peer.link import Link
from draftgate.backends.peer.upgrade import PeerRefused
from draftgate.backends.testing import collect, make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, FinishReason, ResumedChoice, SpeculationOutcome
from draftgate.gateway.app import drain, start_workers
from draftgate.lab.sim.virtual_time import run_virtual
from tests.gateway.harness import is_idle, running, until
from tests.gateway.tcp_proxy import TcpProxy, proxied
from tests.gateway.test_cli import COMMAND
from tests.peer.harness import (
    SILENCE_S,
    SLOW,
    a_card,
    an_update,
    behind_proxy,
    impostor,
    linked_to,
    ready_message,
)

LONG = 8000
"""Tokens of a stream that still runs when the peer fails."""


async def error_after(backend: PeerBackend, cause_failure: Callable[[], None]) -> str:
    """Return the error with which three streams end after an event, including a stream without a
    reader."""
    streams = [generate(backend, make_request(backend, max_tokens=LONG)) for _ in range(3)]
    for stream in streams[:2]:
        await anext(stream)
    cause_failure()
    (reason,) = {await error_of(stream) for stream in streams}
    return reason


async def error_of(stream: AsyncGenerator[Delta, None]) -> str:
    """Return the error of a stream, which must fail soon."""
    try:
        async with asyncio.timeout(60):
            async for _ in stream:
                pass
    except BackendFailed as error:
        return str(error)
    raise AssertionError("the stream came to its end")


def in_the_middle_of_a_message(proxy: TcpProxy) -> None:
    """Let five more bytes through, which are less than any message."""
    proxy.most_bytes = proxy.passed_bytes + 5


def in_invalid_messages(proxy: TcpProxy) -> None:
    """Send a frame of six bytes that are not valid msgpack."""
    proxy.spoil(b"\x00\x00\x00\x06\xc1\xc1\xc1\xc1\xc1\xc1")


def with_an_oversized_frame(proxy: TcpProxy) -> None:
    """Send the head of a frame that is too large."""
    proxy.spoil((MOST_REPORT_BYTES + 1).to_bytes(4, "big"))


@pytest.mark.parametrize(
    ("cause_failure", "reason"),
    [
        (TcpProxy.cut, "the connection broke"),
        (in_the_middle_of_a_message, "the connection broke|it closed the connection"),
        (in_invalid_messages, "a message was invalid"),
        (with_an_oversized_frame, "a message was too large"),
        (TcpProxy.freeze, f"it sent nothing for {SILENCE_S:g} s"),
    ],
)
async def test_broken_connection_ends_every_stream_and_is_reopened(
    cause_failure: Callable[[TcpProxy], None], reason: str
) -> None:
    """When a connection breaks, all streams end with the reason, and the backend connects again."""
    async with behind_proxy(profile=SLOW) as (backend, proxy, where):
        before = await collect(backend, make_request(backend))
        assert re.search(reason, await error_after(backend, partial(cause_failure, proxy)))
        assert backend.failure is None or "the peer is lost" in backend.failure
        proxy.most_bytes = None
        proxy.thaw()
        await until(lambda: is_idle(where.node))
        await until(lambda: backend.failure is None)
        assert await collect(backend, make_request(backend)) == before


async def test_unreachable_peer_is_contacted_again() -> None:
    """An unreachable peer reports a failure and gets no requests until the gateway reaches it
    again."""
    async with behind_proxy() as (backend, proxy, _):
        proxy.cut(refuse=True)
        await until(lambda: backend.failure is not None)
        with pytest.raises(BackendFailed, match="the peer is lost"):
            generate(backend, make_request(backend))
        assert backend.recovers
        proxy.accept()
        await until(lambda: backend.failure is None)
        await collect(backend, make_request(backend))


async def test_slow_network_is_not_a_failure() -> None:
    """A peer stays connected when every block is delayed by more than a report interval."""
    async with behind_proxy() as (backend, proxy, _):
        before = await collect(backend, make_request(backend))
        proxy.delay_s = SILENCE_S / 4
        assert await collect(backend, make_request(backend)) == before
        assert backend.load_age_s < SILENCE_S


async def test_peer_frees_requests_of_a_vanished_gateway(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The peer cancels the requests of a gateway that has been silent for too long."""
    async with (
        running(profile=SLOW) as where,
        proxied(where.url) as proxy,
        linked_to(proxy.url, silence_s=60.0) as backend,
    ):
        stream = generate(backend, make_request(backend, max_tokens=LONG))
        await anext(stream)
        proxy.freeze()
        # A busy machine could be silent for this time before.
        monkeypatch.setattr("draftgate.gateway.http.peers.session.SILENT_S", SILENCE_S)
        await until(lambda: is_idle(where.node))
        assert backend.failure is None
        await stream.aclose()


async def test_gateway_that_only_reads_stays_connected(monkeypatch: pytest.MonkeyPatch) -> None:
    """A gateway that only reads stays connected because it reports that it is alive."""
    monkeypatch.setattr("draftgate.backends.peer.link.ALIVE_S", SILENCE_S / 6)
    async with running() as where, linked_to(where.url) as backend:
        monkeypatch.setattr("draftgate.gateway.http.peers.session.SILENT_S", SILENCE_S)
        async with aclosing(generate(backend, make_request(backend, max_tokens=100))) as stream:
            assert sum([len(delta.token_ids) async for delta in stream]) == 100


def test_silence_is_detected_after_its_limit() -> None:
    """The gateway measures the silence of a peer from its last report, in virtual time."""

    async def scenario() -> float:
        link = Link()
        listening = asyncio.create_task(link.watch_silence(3.0))
        for _ in range(10):
            await asyncio.sleep(2.37)
            link.channel.heard = True
        await listening
        return asyncio.get_running_loop().time() - 23.7

    assert 3.0 <= run_virtual(scenario()) <= 3.5


def test_stalled_event_loop_is_not_silence_of_the_peer() -> None:
    """The gateway reads the messages that arrived during a stall before it gives up the peer."""

    async def scenario() -> None:
        link, clock = Link(), asyncio.get_running_loop()._jumping
        listening = asyncio.create_task(link.watch_silence(3.0))
        await asyncio.sleep(0.1)
        for _ in range(10):
            clock.now_s += 100.0  # The loop stalled, so its timers are due and no message was read.
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            link.channel.heard = True
            await asyncio.sleep(0.6)
        assert not listening.done()
        listening.cancel()

    run_virtual(scenario())


@contextmanager
def process() -> Iterator[tuple[subprocess.Popen[str], str]]:
    """Yield a node process with the simulator and its address."""
    command = [*COMMAND, "serve", "--backend", "sim", "--port", "0"]
    node = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True)
    try:
        assert node.stdout is not None
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", node.stdout.readline())):
            assert node.poll() is None
        yield node, found[0]
    finally:
        node.kill()
        node.wait()
        if node.stdout is not None:
            node.stdout.close()


async def test_killed_process_ends_every_stream_at_once() -> None:
    """All streams end when the system of a killed process resets the connection."""
    with process() as (node, url):
        async with linked_to(url, silence_s=60.0) as backend:
            assert "it sent nothing" not in await error_after(backend, node.kill)
            with pytest.raises(BackendFailed, match="the peer is lost"):
                generate(backend, make_request(backend))


async def test_suspended_process_is_detected_by_silence_and_recovers() -> None:
    """The gateway detects a suspended process by its silence and recovers afterwards."""
    with process() as (node, url):
        async with linked_to(url, silence_s=SILENCE_S) as backend:
            before = await collect(backend, make_request(backend))
            reason = await error_after(backend, partial(os.kill, node.pid, signal.SIGSTOP))
            assert f"it sent nothing for {SILENCE_S:g} s" in reason
            os.kill(node.pid, signal.SIGCONT)
            await until(lambda: backend.failure is None)
            assert await collect(backend, make_request(backend)) == before
            await until(lambda: backend.load().running + backend.load().waiting == 0)


async def test_start_waits_for_a_node_that_starts_later() -> None:
    """The backend reports a failure until the node starts."""
    async with running(start=False) as where:
        backend = PeerBackend(where.url, None)
        starting = asyncio.create_task(backend.start())
        await until(lambda: "it responded with status 503" in str(backend.failure))
        assert (backend.progress, starting.done()) == (0.0, False)
        await start_workers(where.node)
        await starting
        assert (backend.progress, backend.failure) == (1.0, None)
        await backend.stop()


async def test_stop_ends_a_waiting_start() -> None:
    """A waiting `start` raises an error when the backend stops."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # no server uses this address
        backend = PeerBackend(f"http://127.0.0.1:{taken.getsockname()[1]}", None)
        starting = asyncio.create_task(backend.start())
        await until(lambda: "connection refused" in str(backend.failure))
        await backend.stop()
    with pytest.raises(BackendFailed, match="stopped"):
        await starting


async def test_draining_node_refuses_new_requests_and_completes_running_requests() -> None:
    """A draining node refuses new requests, which are not to blame, and completes running
    requests."""
    async with (
        running() as where,
        linked_to(where.url) as backend,
        aclosing(generate(backend, make_request(backend, max_tokens=60))) as stream,
    ):
        first = await anext(stream)
        draining = asyncio.create_task(drain(where.node, 30))
        await until(lambda: backend.failure is not None)
        with pytest.raises(WorkerLeft, match="the node is draining"):
            generate(backend, make_request(backend))
        rest = [delta async for delta in stream]
        assert sum(len(delta.token_ids) for delta in (first, *rest)) == 60
        assert await draining


async def test_request_sent_while_the_peer_begins_to_drain_is_refused() -> None:
    """The refusal ends only the stream of the new request."""
    async with (
        running() as where,
        linked_to(where.url) as backend,
        aclosing(generate(backend, make_request(backend, max_tokens=60))) as open_,
    ):
        await anext(open_)
        draining = asyncio.create_task(drain(where.node, 30))
        await asyncio.sleep(0)
        crossing = generate(backend, make_request(backend))
        with pytest.raises(BackendFailed, match="shutting down"):
            await anext(crossing)
        assert [delta async for delta in open_][-1].finish_reason is FinishReason.LENGTH
        assert await draining


async def test_broken_worker_ends_streams_with_its_own_reason() -> None:
    """Clients receive the reason of the broken worker, and the connection stays open."""
    async with running(devices=(0, 1)) as where, linked_to(where.url) as backend:
        worker = where.node.fleet.workers[0].backend
        stopping: list[asyncio.Task[None]] = []
        reason = await error_after(
            backend, lambda: stopping.append(asyncio.create_task(worker.stop()))
        )
        assert reason == "the worker was stopped"
        await stopping[0]
        await until(lambda: "the worker was stopped" in str(backend.failure))


async def test_backend_for_one_epoch_never_uses_another() -> None:
    """The backend rejects another epoch on the first and on later connections."""
    async with impostor(ready_message(epoch="first")) as peer:
        backend = PeerBackend(peer.url, None, epoch="another")
        with pytest.raises(PeerRefused, match="epoch first, not another"):
            await backend.start()
        await backend.stop()
        async with linked_to(peer.url, epoch="first") as backend:
            peer.ready = ready_message(epoch="second")
            peer.channel.close()
            await until(lambda: "epoch second, not first" in str(backend.failure))
            assert backend._linking is not None
            await until(backend._linking.done)  # The backend never connects again.


async def test_backend_without_an_epoch_uses_a_restarted_peer() -> None:
    """The backend applies the limits of the restarted peer."""
    async with impostor(ready_message(epoch="first")) as peer, linked_to(peer.url) as backend:
        generation = make_request(backend, max_tokens=100)
        backend.check(generation)
        peer.ready = ready_message(epoch="second", card=a_card(max_model_len=64))
        peer.channel.close()
        await until(lambda: backend.epoch == "second")
        assert backend.failure is None
        with pytest.raises(RequestRejected):
            backend.check(generation)


@pytest.mark.parametrize("change", [{"tokenizer": "0" * 64}, {"card": a_card(model_id="other")}])
async def test_restarted_peer_with_another_model_is_not_used(change: dict[str, object]) -> None:
    """The backend does not use a restarted peer until the peer has its former model and tokenizer
    again."""
    async with impostor(ready_message()) as peer, linked_to(peer.url) as backend:
        peer.ready = ready_message(**change)
        peer.channel.close()
        await until(lambda: "it serves another model now" in str(backend.failure))
        peer.ready = ready_message()
        await until(lambda: backend.failure is None)


async def test_late_delta_is_not_delivered_to_a_second_try() -> None:
    """Each attempt of a request has its own id, so a late delta cannot reach a second attempt."""
    async with impostor(ready_message()) as peer, linked_to(peer.url, silence_s=60.0) as backend:
        generation = make_request(backend)
        async with aclosing(generate(backend, generation)):
            pass
        async with aclosing(generate(backend, generation)) as again:
            await until(lambda: len(peer.commands) == 3)
            begin, cancel, second = peer.commands
            assert begin.id == cancel.id != second.id
            last = Delta(0, (7,), "new", (), FinishReason.STOP, SpeculationOutcome())
            late = Delta(0, (9,), "old")
            peer.say(an_update((begin.id, late)), an_update((second.id, last)))
            assert [delta async for delta in again] == [last]
        assert backend._ids.id_of(generation.request_id) is None


@pytest.mark.parametrize(
    ("files", "reason"),
    [
        ({"tokenizer.json": b"{}"}, "a different tokenizer than it announced"),
        ({"../tokenizer.json": b"{}"}, "a file that is not part of a tokenizer"),
        ({"/etc/passwd": b""}, "a file that is not part of a tokenizer"),
        (
            {"additional_chat_templates/../../x.jinja": b""},
            "a file that is not part of a tokenizer",
        ),
    ],
)
async def test_unexpected_tokenizer_files_are_refused(
    files: dict[str, bytes], reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The backend writes nothing outside its folder and loads no unannounced files."""
    monkeypatch.setattr("tests.peer.harness.FILES", files)
    async with impostor(ready_message(tokenizer="0" * 64)) as peer:
        backend = PeerBackend(peer.url, None)
        with pytest.raises(CheckpointError, match=reason):
            await backend.start()
        await backend.stop()


async def test_silent_server_times_out(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The backend rejects a server that accepts the connection and sends nothing."""
    monkeypatch.setattr("draftgate.backends.peer.link.CONNECT_S", 0.2)
    async with impostor(None) as peer:
        backend = PeerBackend(peer.url, None)
        starting = asyncio.create_task(backend.start())
        await until(lambda: "it did not respond in time" in str(backend.failure))
        await backend.stop()
        with pytest.raises(BackendFailed):
            await starting


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"prompt_ids": compact([1 << 40])}, "token ids must be between"),
        ({"prompt_ids": compact([])}, "no tokens"),
        ({"resumed": (ResumedChoice(0, (-1,)),)}, "token ids must be between"),
        ({"prompt_ids": compact([1]) * (1 << 15)}, "context length"),
    ],
)
async def test_invalid_request_is_refused_and_the_worker_survives(
    change: dict[str, object], reason: str
) -> None:
    """The peer checks requests from the network again and refuses an invalid request."""
    async with running() as where, linked_to(where.url) as backend:
        generation = replace(make_request(backend), **change)
        with pytest.raises(RequestRejected, match=reason):
            backend.check(generation)
        assert reason in await error_of(generate(backend, generation))
        assert is_idle(where.node)
        await collect(backend, make_request(backend))
