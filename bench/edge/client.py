"""A client that costs little: closed loops of one request each over kept connections.

    python -m bench.edge.client

reads a `Load` as a line of JSON, sends it, and answers with a line (`Measured`). It looks at the
bytes only as far as it must: when the first event came, how many there were, whether all is there.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import Sequence
from typing import Final, cast

import msgspec
import uvloop

from bench.edge import wire
from bench.harness.processes import answer_lines, cpu_s

_HEAD_END: Final = b"\r\n\r\n"
_BODY_END: Final = b"\r\n0\r\n\r\n"
_EVENT: Final = b"data: "
_ENDED: Final = b"[DONE]"
PATIENCE_S: Final = 30.0


class Load(msgspec.Struct):
    """What to send.

    Attributes:
        host, port: of the server.
        tokens: asked for by each request; chunks, if streamed.
        connections: requests at a time.
        warm_s, for_s: seconds unmeasured, and measured after that.
        server, upstream: process ids whose CPU time is measured, 0 for none.
    """

    host: str
    port: int
    tokens: int
    stream: bool
    connections: int
    warm_s: float
    for_s: float
    pace_ms: float = 0.0
    server: int = 0
    upstream: int = 0


class Measured(msgspec.Struct):
    """What came of it.

    Attributes:
        latency_s: of each request, to its last byte.
        ttft_s: of each request, to its first event or, unstreamed, its first byte.
        chunks: events with data, `[DONE]` not counted.
        failed: requests with another status than 200, or cut.
        wall_s: of the measured part.
        server_cpu_s, upstream_cpu_s, client_cpu_s: CPU seconds in it.
    """

    latency_s: list[float]
    ttft_s: list[float]
    chunks: int
    failed: int
    wall_s: float
    server_cpu_s: float
    upstream_cpu_s: float
    client_cpu_s: float


class Connection(asyncio.Protocol):
    """One connection, one request at a time."""

    def __init__(self, request: bytes, *, stream: bool, patience_s: float = PATIENCE_S) -> None:
        """Send nothing yet."""
        self._request = request
        self._patience_s = patience_s
        self._first = _EVENT if stream else b"HTTP/1.1"
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self.received = bytearray()
        self.first_s = 0.0
        self._length: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep what to write to."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Let the request in flight end; it is judged by what it got."""
        self._transport = None
        self._finish()

    def data_received(self, data: bytes) -> None:
        """Take bytes until the answer is whole."""
        received = self.received
        received += data
        if not self.first_s and self._first in received:
            self.first_s = time.perf_counter()
        if self._length is None:
            head_end = received.find(_HEAD_END)
            if head_end < 0:
                return
            length = _content_length(bytes(received[:head_end]))
            self._length = -1 if length is None else head_end + len(_HEAD_END) + length
        whole = len(received) >= self._length if self._length >= 0 else received.endswith(_BODY_END)
        if whole:
            self._finish()

    @property
    def open(self) -> bool:
        """Whether another request can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    async def ask(self) -> tuple[float, float]:
        """Send the request and wait for its end; return the seconds to it and to the first event.

        Raises:
            TimeoutError: there is none in time.
        """
        assert self._transport is not None
        self.received.clear()
        self.first_s, self._length = 0.0, None
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        patience = loop.call_later(self._patience_s, self._give_up)
        began_s = time.perf_counter()
        self._transport.write(self._request)
        await self._done
        ended_s = time.perf_counter()
        patience.cancel()
        return ended_s - began_s, (self.first_s or ended_s) - began_s

    def _give_up(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(TimeoutError(f"no end in {self._patience_s:g} s"))

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _content_length(head: bytes) -> int | None:
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else None


async def send(load: Load) -> Measured:
    """Send a load: first for warmth, then to be measured."""
    body = wire.body(load.tokens, stream=load.stream, pace_ms=load.pace_ms)
    head = (
        f"POST {wire.PATH} HTTP/1.1\r\nHost: {load.host}:{load.port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(body)}\r\n\r\n"
    )
    request = head.encode() + body
    await _measured(load, request, load.warm_s)
    return await _measured(load, request, load.for_s)


async def _measured(load: Load, request: bytes, for_s: float) -> Measured:
    result = Measured([], [], 0, 0, 0.0, 0.0, 0.0, 0.0)
    connections = await asyncio.gather(*(_connect(load, request) for _ in range(load.connections)))
    before = _cpu(load)
    began_s = time.perf_counter()
    until_s = began_s + for_s
    loops = [_loop(load, request, connection, until_s, result) for connection in connections]
    await asyncio.gather(*loops)
    result.wall_s = time.perf_counter() - began_s
    spent = [after - was for after, was in zip(_cpu(load), before, strict=True)]
    result.server_cpu_s, result.upstream_cpu_s, result.client_cpu_s = spent
    return result


def _cpu(load: Load) -> Sequence[float]:
    """Return the CPU seconds so far of server, upstream and this process."""
    server, upstream = (cpu_s(pid) if pid else 0.0 for pid in (load.server, load.upstream))
    return server, upstream, time.process_time()


async def _connect(load: Load, request: bytes) -> Connection:
    loop = asyncio.get_running_loop()
    _, connection = await loop.create_connection(
        lambda: Connection(request, stream=load.stream), load.host, load.port
    )
    return connection


async def _loop(
    load: Load, request: bytes, connection: Connection, until_s: float, result: Measured
) -> None:
    """Ask again and again; a connection that the server closed is opened anew."""
    while time.perf_counter() < until_s:
        if not connection.open:
            connection = await _connect(load, request)
        latency_s, ttft_s = await connection.ask()
        received = connection.received
        whole = received.startswith(b"HTTP/1.1 200") and (not load.stream or _ENDED in received)
        if not whole:
            result.failed += 1
            continue
        result.latency_s.append(latency_s)
        result.ttft_s.append(ttft_s)
        if load.stream:
            result.chunks += received.count(_EVENT) - 1
    if connection.open and connection._transport is not None:  # noqa: SLF001
        connection._transport.close()  # noqa: SLF001


def main() -> None:
    """Send each load that a line of standard input asks for."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer_lines(Load, lambda load: runner.run(send(load)))


if __name__ == "__main__":
    main()
