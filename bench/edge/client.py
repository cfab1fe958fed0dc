"""A load client with low CPU use, for closed loops over persistent connections.

    python -m bench.edge.client

The client reads a `Load` as a line of JSON, sends its requests, and writes a `Measured` as a line
of JSON. It parses only the time of the first event, the number of events, and the end of the
response.
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


class Load(msgspec.Struct):
    """A load to send.

    Attributes:
        host, port: address of the server.
        tokens: tokens per request, which equals chunks in a stream.
        connections: number of concurrent requests.
        warm_s, for_s: warm-up time and measured time after the warm-up, in seconds.
        server, upstream: process ids whose CPU time is measured, or 0 to measure none.
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
    """The result of a load.

    Attributes:
        latency_s: time from each request to its last byte, in seconds.
        ttft_s: time to the first event of a stream, or to the first byte, in seconds.
        chunks: number of events with data, without `[DONE]`.
        failed: number of requests that were cut off, timed out or had a status other than 200.
        wall_s: duration of the measurement, in seconds.
        server_cpu_s, upstream_cpu_s, client_cpu_s: CPU seconds during the measurement.
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
    """A connection that carries a single request at a time."""

    timeout_s = 30.0

    def __init__(self, request: bytes, *, stream: bool) -> None:
        self._request = request
        self._first = _EVENT if stream else b"HTTP/1.1"
        self._transport: asyncio.Transport | None = None
        self._done: asyncio.Future[None] | None = None
        self.received = bytearray()
        self.first_s = 0.0
        self._length: int | None = None

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Store the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """End the current request, which has failed if its response is incomplete."""
        self._transport = None
        self._finish()

    def data_received(self, data: bytes) -> None:
        """Receive bytes until the response is complete."""
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
        """Whether the connection can send another request."""
        return self._transport is not None and not self._transport.is_closing()

    def close(self) -> None:
        """Close the connection if it is open."""
        if self._transport is not None:
            self._transport.close()

    async def send_request(self) -> tuple[float, float]:
        """Send the request, and return the seconds to the end and to the first event.

        Raises:
            TimeoutError: the response did not end in time.
        """
        assert self._transport is not None
        self.received.clear()
        self.first_s, self._length = 0.0, None
        loop = asyncio.get_running_loop()
        self._done = loop.create_future()
        timer = loop.call_later(self.timeout_s, self._give_up)
        began_s = time.perf_counter()
        self._transport.write(self._request)
        await self._done
        ended_s = time.perf_counter()
        timer.cancel()
        return ended_s - began_s, (self.first_s or ended_s) - began_s

    def _give_up(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_exception(TimeoutError(f"no end in {self.timeout_s:g} s"))

    def _finish(self) -> None:
        if self._done is not None and not self._done.done():
            self._done.set_result(None)


def _content_length(head: bytes) -> int | None:
    _, found, rest = head.lower().partition(b"\r\ncontent-length:")
    return int(rest.partition(b"\r\n")[0]) if found else None


async def send(load: Load) -> Measured:
    """Send the warm-up and the measured part of a load."""
    body = wire.request_body(load.tokens, stream=load.stream, pace_ms=load.pace_ms)
    head = (
        f"POST {wire.PATH} HTTP/1.1\r\nHost: {load.host}:{load.port}\r\n"
        f"Authorization: {wire.AUTHORIZATION}\r\n"
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
    """Return the CPU seconds of the server, the upstream and this process."""
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
    """Send requests in a closed loop, and reconnect when the server closes the connection."""
    while time.perf_counter() < until_s:
        if not connection.open:
            connection = await _connect(load, request)
        try:
            latency_s, ttft_s = await connection.send_request()
        except TimeoutError:
            connection.close()
            result.failed += 1
            continue
        received = connection.received
        whole = received.startswith(b"HTTP/1.1 200") and (not load.stream or _ENDED in received)
        if not whole:
            result.failed += 1
            continue
        result.latency_s.append(latency_s)
        result.ttft_s.append(ttft_s)
        if load.stream:
            result.chunks += received.count(_EVENT) - 1
    connection.close()


def main() -> None:
    """Run the load in each line of standard input."""
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        answer_lines(Load, lambda load: runner.run(send(load)))


if __name__ == "__main__":
    main()
