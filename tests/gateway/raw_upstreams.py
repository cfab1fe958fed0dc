"""Upstreams on plain sockets, which close connections at any point of an exchange."""

from __future__ import annotations

import asyncio
import re
import socket
import struct
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from dataclasses import dataclass, field
from enum import StrEnum

from tests.gateway.upstreams import WHOLE

MODELS = b'{"object": "list", "data": [{"id": "theirs", "max_model_len": 99}]}'


class Fault(StrEnum):
    """The reaction of a server to a request."""

    NONE = "answers"
    CLOSE = "closes without a response"
    RESET_AT_ONCE = "resets after the first bytes of the request"
    RESET = "resets after the whole request"
    CLOSE_AFTER = "answers and closes without saying so"
    TIMEOUT_STATUS = "answers with 408 and closes"
    HALF_A_HEAD = "closes after a part of the head"


STALE = (Fault.CLOSE, Fault.RESET_AT_ONCE, Fault.RESET, Fault.TIMEOUT_STATUS)
"""The reactions of a server that had closed the connection before the request."""


@dataclass
class RawUpstream:
    """A server whose reaction to each request a test chooses.

    Attributes:
        fault: the reaction to the n-th request (from 1) of the connection with a number (from 1).
            Probes are answered.
        bodies: the bodies of all requests that arrived completely.
        begun: the number of requests of which any byte arrived.
        connections: the number of connections.
    """

    fault: Callable[[int, int], Fault]
    url: str = ""
    bodies: list[bytes] = field(default_factory=list)
    begun: int = 0
    connections: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        self.writers.add(writer)
        connection, number = self.connections, 0
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while start := await reader.read(16):
                probe = start.startswith(b"GET")
                number += not probe
                self.begun += not probe
                fault = Fault.NONE if probe else self.fault(connection, number)
                if fault is Fault.RESET_AT_ONCE:
                    break
                head = start + await reader.readuntil(b"\r\n\r\n")
                length = [line for line in head.lower().split(b"\r\n") if b"content-length" in line]
                body = await reader.readexactly(int(length[0].split(b":")[1]) if length else 0)
                if not probe:
                    self.bodies.append(body)
                if not await self._answer(
                    writer, fault, probe=probe, listing=b"/v1/models" in head
                ):
                    break
        if number and fault in {Fault.RESET, Fault.RESET_AT_ONCE}:
            linger = struct.pack("ii", 1, 0)
            plain = writer.get_extra_info("socket")
            plain.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, linger)
            writer.transport.abort()
        writer.close()

    async def _answer(
        self, writer: asyncio.StreamWriter, fault: Fault, *, probe: bool, listing: bool
    ) -> bool:
        """Send the response, and return whether the connection stays open."""
        if fault in {Fault.CLOSE, Fault.RESET}:
            return False
        status = b"408 Request Timeout" if fault is Fault.TIMEOUT_STATUS else b"200 OK"
        body = MODELS if listing else WHOLE
        if probe and not listing:
            body = b""
        head = b"HTTP/1.1 %s\r\nContent-Type: application/json\r\n" % status
        if fault is not Fault.HALF_A_HEAD:
            head += b"Content-Length: %d\r\n\r\n%s" % (len(body), body)
        writer.write(head)
        await writer.drain()
        return fault is Fault.NONE


@asynccontextmanager
async def raw_upstream(fault: Callable[[int, int], Fault]) -> AsyncIterator[RawUpstream]:
    """Run a server whose reaction to the n-th request of a connection is `fault(connection, n)`."""
    upstream = RawUpstream(fault)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield upstream
    finally:
        server.close()
        for writer in upstream.writers:
            writer.close()


@dataclass
class ByteUpstream:
    """A server that responds to each `POST` with the bytes of a test, and to probes as usual.

    Attributes:
        response: the bytes of each response.
        closes: whether the connection ends after them.
        reads_body: whether the server reads a request before it responds.
        mute: whether it responds to nothing, not even to probes.
        begun: the number of `POST` requests that arrived.
        answered: the connection of each response.
    """

    response: bytes
    closes: bool = True
    reads_body: bool = True
    mute: bool = False
    url: str = ""
    begun: int = 0
    writers: set[asyncio.StreamWriter] = field(default_factory=set)
    answered: list[asyncio.StreamWriter] = field(default_factory=list)

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.writers.add(writer)
        with suppress(ConnectionError, asyncio.IncompleteReadError):
            while head := await reader.readuntil(b"\r\n\r\n"):
                if not head.startswith(b"POST"):
                    if not self.mute:
                        writer.write(_probed(head))
                    continue
                self.begun += 1
                if self.reads_body:
                    length = re.search(rb"(?i)content-length: (\d+)", head)
                    await reader.readexactly(int(length[1]) if length else 0)
                self.answered.append(writer)
                writer.write(self.response)
                await writer.drain()
                if self.closes:
                    break
            writer.close()


def _probed(head: bytes) -> bytes:
    """Return the response to a probe."""
    body = MODELS if b" /v1/models " in head else b""
    status = b"404 Not Found" if b" /metrics " in head else b"200 OK"
    return b"HTTP/1.1 %b\r\nContent-Length: %d\r\n\r\n%b" % (status, len(body), body)


@asynccontextmanager
async def byte_upstream(response: bytes, **fields: bool) -> AsyncIterator[ByteUpstream]:
    """Run a server that responds with these bytes."""
    upstream = ByteUpstream(response, **fields)
    server = await asyncio.start_server(upstream.serve, "127.0.0.1", 0, limit=32 << 20)
    upstream.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield upstream
    finally:
        server.close()
        for writer in upstream.writers:
            writer.close()
