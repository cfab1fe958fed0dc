"""Tests of the end of a listener: every request that a client has sent gets a response."""

from __future__ import annotations

import asyncio
import json
import shutil
import socket
import sys
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from typing import Any

import pytest
import uvloop

from draftgate.gateway import app
from draftgate.gateway.app import Listening, drain
from draftgate.gateway.http import last_requests
from tests.gateway.certificates import make_certificate
from tests.gateway.harness import PATIENCE_S, client, port_of, running, until

BODY = json.dumps({"prompt": "x", "max_tokens": 2, "ignore_eos": True}).encode()
HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nContent-Length: %d\r\n\r\n" % len(BODY)
REQUEST = HEAD + BODY

Run = Callable[[Any], Any]
Connect = Callable[[Listening], socket.socket]


@pytest.fixture(params=[asyncio.new_event_loop, uvloop.new_event_loop], ids=["asyncio", "uvloop"])
def run(request: pytest.FixtureRequest) -> Run:
    """Run a coroutine on one of the event loops."""

    def run_on_loop(coroutine: Any) -> Any:
        with asyncio.Runner(loop_factory=request.param) as runner:
            return runner.run(coroutine)

    return run_on_loop


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """Bound no response by time."""
    monkeypatch.setattr(last_requests, "LAST_RESPONSES_S", PATIENCE_S)


@asynccontextmanager
async def drained(**settings: Any) -> AsyncIterator[Listening]:
    """Run a node that has drained, and whose listener is still open."""
    async with running(**settings) as gateway:
        assert await drain(gateway.node, PATIENCE_S)
        yield gateway


@pytest.fixture
def connect() -> Iterator[Connect]:
    """Connect without the event loop, so that the connection stays in the backlog."""
    with ExitStack() as connections:

        def connect_to(gateway: Listening) -> socket.socket:
            found = socket.create_connection(("127.0.0.1", port_of(gateway)))
            found.setblocking(False)
            return connections.enter_context(found)

        yield connect_to


async def response(connection: socket.socket) -> bytes:
    """Read the response to one request of a plain connection."""
    loop, data = asyncio.get_running_loop(), b""
    async with asyncio.timeout(PATIENCE_S):
        while chunk := await loop.sock_recv(connection, 1 << 16):
            data += chunk
            head, found, body = data.partition(b"\r\n\r\n")
            if found and len(body) >= int(head.lower().split(b"content-length:")[1].split()[0]):
                break
    return data


def is_refusal(data: bytes) -> bool:
    """Return whether a response is that of a draining node, which closes the connection."""
    return data.startswith(b"HTTP/1.1 503 ") and announces_close(data)


def announces_close(data: bytes) -> bool:
    """Return whether a response says that its connection closes, so no request may follow."""
    return b"connection: close\r\n" in data.lower()


def act_at_first_check(monkeypatch: pytest.MonkeyPatch, act: Callable[[], None]) -> None:
    """Act directly before the first check whether connections are idle."""
    check, done = last_requests._needing_response, []

    def acting(handlers: Any) -> bool:
        if not done:
            done.append(True)
            act()
        return check(handlers)

    monkeypatch.setattr(last_requests, "_needing_response", acting)


def test_requests_in_the_backlog_get_responses(
    monkeypatch: pytest.MonkeyPatch, run: Run, connect: Connect
) -> None:
    """Clients that the node has not accepted when it begins to close its listener get responses."""
    monkeypatch.setattr(last_requests, "ROUND_TRIP_S", 0)

    async def scenario() -> None:
        async with drained() as gateway:
            waiting = [connect(gateway) for _ in range(40)]
            for connection in waiting:
                connection.send(REQUEST)
            await gateway.stop_accepting()
            assert [is_refusal(await response(one)) for one in waiting] == [True] * 40
            with pytest.raises(ConnectionRefusedError):
                connect(gateway)

    run(scenario())


def test_bytes_in_a_socket_buffer_keep_a_connection(
    monkeypatch: pytest.MonkeyPatch, run: Run, connect: Connect
) -> None:
    """A request that arrives just before the node closes idle connections gets a response. The
    connections that are idle are closed."""
    monkeypatch.setattr(last_requests, "ROUND_TRIP_S", 0)

    async def scenario() -> None:
        async with running() as gateway:
            used, idle = connect(gateway), connect(gateway)
            for connection in (used, idle):
                connection.send(REQUEST)
                assert (await response(connection)).startswith(b"HTTP/1.1 200 ")
            assert await drain(gateway.node, PATIENCE_S)
            act_at_first_check(monkeypatch, lambda: assert_sent(used))
            await gateway.stop_accepting()
            assert is_refusal(await response(used))
            assert await response(idle) == b""

    def assert_sent(connection: socket.socket) -> None:
        assert connection.send(REQUEST) == len(REQUEST)

    run(scenario())


def test_an_idle_connection_ends_at_the_check(
    monkeypatch: pytest.MonkeyPatch, run: Run, connect: Connect
) -> None:
    """A client sees the end of its idle connection as soon as the node has found the connection
    idle, before the event loop closes it."""
    monkeypatch.setattr(last_requests, "ROUND_TRIP_S", 0)
    check, seen = last_requests._needing_response, []

    async def scenario() -> None:
        async with running() as gateway:
            idle = connect(gateway)
            idle.send(REQUEST)
            await response(idle)
            assert await drain(gateway.node, PATIENCE_S)

            def checked(handlers: Any) -> bool:
                needing = check(handlers)
                seen.append(idle.recv(1))
                return needing

            monkeypatch.setattr(last_requests, "_needing_response", checked)
            await gateway.stop_accepting()

    run(scenario())
    assert seen == [b""]


@pytest.mark.parametrize("sent", [10, len(HEAD) + 3], ids=["headers", "body"])
def test_half_a_request_keeps_a_connection(
    monkeypatch: pytest.MonkeyPatch, run: Run, connect: Connect, sent: int
) -> None:
    """A connection stays open while the node waits for the rest of a request."""
    monkeypatch.setattr(last_requests, "ROUND_TRIP_S", 0)

    async def scenario() -> None:
        async with drained() as gateway:
            slow, idle = connect(gateway), connect(gateway)
            slow.send(REQUEST[:sent])
            stopping = asyncio.create_task(gateway.stop_accepting())
            assert await response(idle) == b""
            assert not stopping.done()
            slow.send(REQUEST[sent:])
            assert is_refusal(await response(slow))
            await stopping

    run(scenario())


@pytest.mark.skipif(sys.platform != "linux", reason="needs the packet filter of Linux")
def test_clients_that_come_too_late_are_refused(monkeypatch: pytest.MonkeyPatch, run: Run) -> None:
    """A client that begins to connect when the node no longer accepts is refused. The kernel never
    connects the client only to reset the connection."""
    monkeypatch.setattr(last_requests, "ROUND_TRIP_S", 0.05)

    async def scenario() -> None:
        async with drained() as gateway:
            stopping = asyncio.create_task(gateway.stop_accepting())
            await asyncio.sleep(0)
            address = ("127.0.0.1", port_of(gateway))
            with socket.socket() as late:
                late.setblocking(False)
                with pytest.raises(ConnectionRefusedError):
                    await asyncio.get_running_loop().sock_connect(late, address)
            await stopping

    run(scenario())


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs openssl")
def test_clients_in_the_backlog_get_responses_over_tls(
    monkeypatch: pytest.MonkeyPatch, run: Run, connect: Connect, tmp_path: Path
) -> None:
    """Clients that the node has not accepted when it begins to close get HTTPS responses."""
    monkeypatch.setattr(last_requests, "ROUND_TRIP_S", PATIENCE_S)
    certificate = make_certificate(tmp_path, "first")
    files = {"tls_certfile": str(certificate.cert), "tls_keyfile": str(certificate.key)}

    async def scenario() -> None:
        async with drained(**files) as gateway:
            waiting = [connect(gateway) for _ in range(3)]
            stopping = asyncio.create_task(gateway.stop_accepting())
            for one in waiting:
                reader, writer = await asyncio.open_connection(
                    sock=one, ssl=certificate.trusting_context(), server_hostname="localhost"
                )
                writer.write(REQUEST)
                assert is_refusal(await asyncio.wait_for(reader.read(), PATIENCE_S))
                writer.close()
            stopping.cancel()

    run(scenario())


def test_every_request_under_load_gets_a_response(run: Run) -> None:
    """While clients send requests over new and kept connections, a node drains and closes. Every
    request that a client sent over an open connection gets a response."""
    # A busy kernel delivers packets late, so this test keeps the default `ROUND_TRIP_S`.
    statuses: list[bytes] = []

    async def load(gateway: Listening, kept: bool) -> None:
        loop, address = asyncio.get_running_loop(), ("127.0.0.1", port_of(gateway))
        while True:
            with socket.socket() as connection:
                connection.setblocking(False)
                try:
                    await loop.sock_connect(connection, address)
                except ConnectionRefusedError:
                    return
                while is_open(connection):
                    connection.send(REQUEST)
                    received = await response(connection)
                    statuses.append(received[9:12])
                    if not kept or announces_close(received):
                        break
                    await asyncio.sleep(0)

    def is_open(connection: socket.socket) -> bool:
        try:
            return connection.recv(1, socket.MSG_PEEK) != b""
        except BlockingIOError:
            return True

    async def scenario() -> None:
        async with running(sim_service_ms=0.05) as gateway:
            clients = [asyncio.create_task(load(gateway, kept)) for kept in (True, False) * 8]
            await until(lambda: len(statuses) > 50)
            assert await drain(gateway.node, 60)
            await until(lambda: b"503" in statuses)
            await gateway.stop_accepting()
            await asyncio.gather(*clients)

    run(scenario())
    assert set(statuses) == {b"200", b"503"}


@pytest.mark.parametrize("iterations", range(4))
def test_clients_that_have_just_been_accepted_get_a_response(run: Run, iterations: int) -> None:
    """The listener may close in any iteration of the event loop after a client has connected."""

    async def scenario() -> bytes:
        async with running() as gateway:
            assert await drain(gateway.node, 60)
            with socket.create_connection(("127.0.0.1", port_of(gateway))) as connection:
                connection.setblocking(False)
                connection.send(REQUEST)
                for _ in range(iterations):
                    await asyncio.sleep(0)
                await gateway.stop_accepting()
                return await response(connection)

    assert is_refusal(run(scenario()))


async def test_samples_of_the_live_page_do_not_delay_the_end(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The endless streams of samples end before the node waits for its last requests."""
    monkeypatch.setattr(last_requests, "ROUND_TRIP_S", PATIENCE_S)
    async with (
        running() as gateway,
        client(gateway) as http,
        http.stream("GET", "/live") as samples,
    ):
        stopping = asyncio.create_task(app.drain_and_close(gateway))
        assert (await samples.aread()).startswith(b": live")
        assert not stopping.done()
        stopping.cancel()
