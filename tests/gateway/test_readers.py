"""Tests of back-pressure: a slow reader uses bounded memory and receives every token."""

from __future__ import annotations

import asyncio
import json
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from itertools import count
from types import SimpleNamespace
from typing import cast

import pytest
import uvloop

from draftgate.backends.types import GenerationRequest, Pace
from draftgate.gateway.app import Listening
from draftgate.gateway.http import readers
from draftgate.gateway.http.direct import Request
from draftgate.gateway.http.requests.headers import CLIENT_RATE_HEADER
from tests.gateway.harness import (
    PATIENCE_S,
    ScriptedBackend,
    events,
    is_idle,
    port_of,
    running,
    until,
)

BODY = {"prompt": "x", "max_tokens": 400, "stream": True}
WORDS = "word " * 40
MOST_HELD_BYTES = readers.BUFFER_BYTES + 4 * readers.SEND_QUEUE_BYTES
"""Limit of the server's buffers for one stream, in bytes.

The limit covers the connection's buffer and the kernel's send queue. The kernel doubles the
requested size and also stores its own data in the queue.
"""


class StoppedReader:
    """A client with a small receive window that reads only on command."""

    def __init__(self) -> None:
        self._socket = socket.socket()
        self._socket.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        self.received = b""

    async def send(self, gateway: Listening, body: dict[str, object]) -> None:
        """Connect and send a request."""
        self._socket.setblocking(False)
        loop = asyncio.get_running_loop()
        await loop.sock_connect(self._socket, ("127.0.0.1", port_of(gateway)))
        data = json.dumps(body).encode()
        head = "POST /v1/completions HTTP/1.1\r\nHost: localhost\r\nConnection: close\r\n"
        head += f"Content-Length: {len(data)}\r\n\r\n"
        await loop.sock_sendall(self._socket, head.encode() + data)

    async def read(self) -> str:
        """Read to the end and return the events of the response."""
        loop = asyncio.get_running_loop()
        while chunk := await loop.sock_recv(self._socket, 65536):
            self.received += chunk
        return self.received.decode()

    def close(self) -> None:
        """Close the connection."""
        self._socket.close()


@pytest.fixture
async def node(
    scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> AsyncIterator[Listening]:
    """A node with a scripted worker, whose clock advances by a second per check."""
    seconds = count()
    monkeypatch.setattr(readers, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(
        "draftgate.gateway.routes.time",
        SimpleNamespace(monotonic=lambda: float(next(seconds))),
    )
    async with running(backends=[scripted]) as gateway:
        yield gateway


async def emit_until(
    scripted: ScriptedBackend, request: GenerationRequest, enough: Callable[[], bool]
) -> int:
    """Emit steps until a condition holds and return the number of steps."""
    steps = 0
    async with asyncio.timeout(PATIENCE_S):
        while not enough():
            steps += 1
            scripted.emit(request, WORDS)
            await asyncio.sleep(0.001)
    return steps


def paces(scripted: ScriptedBackend) -> list[Pace]:
    """Return the paces that the node set for the worker, in order."""
    return [pace for _, pace in scripted.paces]


async def test_stopped_reader_is_slowed_then_paused_and_gets_every_token(
    node: Listening, scripted: ScriptedBackend
) -> None:
    """The node slows and pauses the sequence of a stopped reader and resumes when the client
    reads."""
    reader = StoppedReader()
    await reader.send(node, BODY)
    request = await scripted.submitted.get()
    steps = await emit_until(scripted, request, lambda: Pace.PAUSED in paces(scripted))
    for _ in range(50):  # steps that the worker finishes after the pause
        scripted.emit(request, WORDS)
    reading = asyncio.create_task(reader.read())
    await until(lambda: paces(scripted)[-1] is Pace.FULL)
    scripted.emit(request, "end", last=True)
    text = await reading
    assert paces(scripted) == [Pace.SPARING, Pace.PAUSED, Pace.SPARING, Pace.FULL]
    chunks = [event for event in events(text) if event != "[DONE]"]
    assert "".join(c["text"] for e in chunks for c in e["choices"]) == WORDS * (steps + 50) + "end"
    assert len(chunks) < steps + 5  # the server merged the waiting tokens into larger chunks
    assert text.count("data: [DONE]") == 1
    reader.close()


async def test_buffers_of_a_stopped_reader_are_bounded(
    node: Listening, scripted: ScriptedBackend
) -> None:
    """The buffers of a stopped reader are bounded, and further output waits as merged tokens."""
    reader = StoppedReader()
    await reader.send(node, {**BODY, "max_tokens": 400})
    request = await scripted.submitted.get()
    steps = await emit_until(scripted, request, lambda: scripted.unread_tokens(request) > 400)
    for _ in range(1000):
        scripted.emit(request, WORDS)
    unread = scripted.unread_tokens(request)
    sent_bytes = (steps + 1000) * len(WORDS) - unread * len("word ")
    assert sent_bytes < MOST_HELD_BYTES
    reader.close()
    await until(lambda: is_idle(node.node))
    assert scripted.abandoned.get_nowait() == request.request_id


async def test_disconnect_of_a_paused_reader_frees_everything(
    node: Listening, scripted: ScriptedBackend
) -> None:
    """The node frees everything when a paused reader disconnects."""
    reader = StoppedReader()
    await reader.send(node, BODY)
    request = await scripted.submitted.get()
    await emit_until(scripted, request, lambda: Pace.PAUSED in paces(scripted))
    reader.close()
    await until(lambda: is_idle(node.node))
    assert scripted.abandoned.get_nowait() == request.request_id


async def test_fast_reader_keeps_the_full_pace(node: Listening, scripted: ScriptedBackend) -> None:
    """A fast reader keeps the full pace, however long the response is."""
    reader = StoppedReader()
    await reader.send(node, BODY)
    reading = asyncio.create_task(reader.read())
    request = await scripted.submitted.get()
    for _ in range(300):
        scripted.emit(request, "word ")
        await asyncio.sleep(0)
    scripted.emit(request, "end", last=True)
    assert "end" in await reading
    assert paces(scripted) == []
    reader.close()


@pytest.mark.parametrize("loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_reader_of_a_closed_connection_is_checked_without_an_error(
    loop: Callable[[], asyncio.AbstractEventLoop],
) -> None:
    """All checks of a reader work until its stream has ended, also after the connection closed."""
    seconds = count()
    watched = readers.Readers(lambda: float(next(seconds)))

    async def check_closed(connection: asyncio.Transport) -> list[float]:
        request = SimpleNamespace(transport=connection, headers={CLIENT_RATE_HEADER: "20"})
        reader = readers.Reader(cast("Request", request), watched)
        reader.watch(None, sent_tokens=lambda: 1)
        open_s = reader.check(watched.now_s())
        connection.abort()
        intervals_s = [open_s]
        for _ in range(3):
            await asyncio.sleep(0)
            reader.limit_buffers()
            intervals_s.append(reader.check(watched.now_s()))
        reader.left()
        return intervals_s

    async def connect() -> list[float]:
        accepted: asyncio.Future[asyncio.Transport] = asyncio.get_running_loop().create_future()

        class Accepting(asyncio.Protocol):
            def connection_made(self, transport: asyncio.BaseTransport) -> None:
                accepted.set_result(cast("asyncio.Transport", transport))

        server = await asyncio.get_running_loop().create_server(Accepting, "127.0.0.1", 0)
        async with server:
            _, writer = await asyncio.open_connection(*server.sockets[0].getsockname())
            try:
                return await check_closed(await accepted)
            finally:
                writer.close()
                with suppress(ConnectionError):
                    await writer.wait_closed()

    with asyncio.Runner(loop_factory=loop) as runner:
        assert min(runner.run(connect())) > 0
