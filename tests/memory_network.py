"""An event loop with virtual time and a network in memory, for runs that do not depend on timing.

Connections between programs on the same loop pass bytes from protocol to protocol, so no kernel
decides when they arrive. The time jumps to the next timer when no callback is left.
"""

from __future__ import annotations

import asyncio
import itertools
import random
import secrets
import selectors
import socket
import time
from collections import deque
from collections.abc import Callable
from typing import Any

BEGIN_S = 1_900_000_000.0
"""The Unix time at which virtual time begins."""

KERNEL_BYTES = 64 << 10
"""Bytes that a connection takes before its writer has to keep them."""

MOST_READ_BYTES = 256 << 10


class Deadlock(Exception):
    """Every task waits for another task, and no timer is set."""


class Clock(selectors.SelectSelector):
    """A selector that advances the time instead of waiting."""

    def __init__(self) -> None:
        super().__init__()
        self.now_s = 0.0

    def select(self, timeout: float | None = None) -> list[tuple[selectors.SelectorKey, int]]:
        ready = super().select(0)
        if not ready:
            if timeout is None:
                raise Deadlock
            self.now_s += max(0.0, timeout)
        return ready

    def replace_time(self) -> None:
        """Make the functions of `time` return virtual time, before modules import them."""
        time.time = lambda: BEGIN_S + self.now_s
        time.time_ns = lambda: int((BEGIN_S + self.now_s) * 1e9)
        time.monotonic = time.perf_counter = lambda: self.now_s
        time.monotonic_ns = time.perf_counter_ns = lambda: int(self.now_s * 1e9)
        time.thread_time = time.process_time = lambda: 0.0


class Chance:
    """Random numbers that only depend on the last seed, in place of the system's."""

    def __init__(self) -> None:
        self.seed(0)

    def seed(self, number: int) -> None:
        """Begin again. The numbers of different functions do not depend on each other."""
        random.seed(number)
        self._of = {name: random.Random(f"{name}{number}") for name in ("bits", "bytes", "hex")}

    def replace(self) -> None:
        """Replace the functions of `os` and `secrets`, before modules import them."""
        import os

        os.urandom = self._of_bytes
        secrets.token_bytes = lambda nbytes=None: self._of_bytes(nbytes or 32)
        secrets.token_hex = lambda nbytes=None: self._of["hex"].randbytes(nbytes or 32).hex()
        secrets.randbits = self._bits

    def _bits(self, k: int) -> int:
        return self._of["bits"].getrandbits(k)

    def _of_bytes(self, size: int) -> bytes:
        return self._of["bytes"].randbytes(size)


class NoSocket:
    """The socket of a connection in memory, which has no options and no statistics."""

    family = socket.AF_UNIX
    type = socket.SOCK_STREAM
    proto = 0

    def __init__(self, port: int) -> None:
        self._name = ("127.0.0.1", port)

    def fileno(self) -> int:
        return -1

    def setsockopt(self, *_: object) -> None:
        """Ignore an option."""

    def getsockopt(self, *_: object) -> int:
        return 0

    def getsockname(self) -> tuple[str, int]:
        return self._name


class MemoryTransport(asyncio.Transport):
    """One end of a connection in memory."""

    def __init__(
        self, loop: asyncio.AbstractEventLoop, protocol: asyncio.BaseProtocol, port: int, peer: int
    ) -> None:
        names = {"sockname": ("127.0.0.1", port), "peername": ("127.0.0.1", peer)}
        super().__init__({**names, "socket": NoSocket(port)})
        self.other: MemoryTransport
        self.is_closed = False
        self._loop = loop
        self._protocol = protocol
        self._inbox: deque[bytes] = deque()
        self._inbox_bytes = 0
        self._ended = self._end_seen = False  # whether the other end has sent its end
        self._paused = self._scheduled = self._closing = self._sent_end = False
        self._writing_paused = False
        self.set_write_buffer_limits()

    def set_protocol(self, protocol: asyncio.BaseProtocol) -> None:
        self._protocol = protocol
        self._schedule()

    def get_protocol(self) -> asyncio.BaseProtocol:
        return self._protocol

    def is_closing(self) -> bool:
        return self._closing

    def is_reading(self) -> bool:
        return not (self._paused or self._closing)

    def pause_reading(self) -> None:
        self._paused = True

    def resume_reading(self) -> None:
        self._paused = False
        self._schedule()

    def set_write_buffer_limits(self, high: int | None = None, low: int | None = None) -> None:
        self._high = 64 << 10 if high is None else high
        self._low = self._high // 4 if low is None else low

    def get_write_buffer_limits(self) -> tuple[int, int]:
        return self._low, self._high

    def get_write_buffer_size(self) -> int:
        return max(0, self.other._inbox_bytes - KERNEL_BYTES)

    def write(self, data: Any) -> None:
        assert isinstance(data, bytes | bytearray | memoryview)
        assert not self._sent_end, "wrote after the end"
        if self._closing or not data:
            return
        if self.other.is_closed:
            self._lose(ConnectionResetError())
            return
        self.other._take(bytes(data))
        if self.get_write_buffer_size() > self._high and not self._writing_paused:
            self._writing_paused = True
            self._protocol.pause_writing()

    def writelines(self, list_of_data: Any) -> None:
        self.write(b"".join(list_of_data))

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        if not self._sent_end and not self._closing:
            self._sent_end = True
            self.other._end()

    def close(self) -> None:
        if not self._closing:
            self._closing = True
            self.other._end()
            self._loop.call_soon(self._closed, None)

    def abort(self) -> None:
        if not self.is_closed and not self.other.is_closed:
            self.other._lose(ConnectionResetError())
        self._lose(None)

    def _take(self, data: bytes) -> None:
        self._inbox.append(data)
        self._inbox_bytes += len(data)
        self._schedule()

    def _end(self) -> None:
        self._ended = True
        self._schedule()

    def _lose(self, error: Exception | None) -> None:
        """Close without delivering what has arrived."""
        if not self.is_closed and not (self._closing and error is None):
            self._closing = True
            self._loop.call_soon(self._closed, error)

    def _closed(self, error: Exception | None) -> None:
        if not self.is_closed:
            self.is_closed = True
            self._inbox.clear()
            self._inbox_bytes = 0
            self.other._end()
            self._protocol.connection_lost(error)

    def _schedule(self) -> None:
        if not self._scheduled:
            self._scheduled = True
            self._loop.call_soon(self._deliver)

    def _deliver(self) -> None:
        self._scheduled = False
        if self._closing or self._paused:
            return
        if self._inbox:
            data = bytearray()
            while self._inbox and len(data) < MOST_READ_BYTES:
                data += self._inbox.popleft()
            self._inbox_bytes -= len(data)
            self._schedule()
            self.other._delivered()
            receive(self._protocol, bytes(data))
        elif self._ended and not self._end_seen:
            self._end_seen = True
            if not self._protocol.eof_received():
                self.close()

    def _delivered(self) -> None:
        if self._writing_paused and self.get_write_buffer_size() <= self._low:
            self._writing_paused = False
            self._protocol.resume_writing()


def receive(protocol: Any, data: bytes) -> None:
    """Deliver bytes to either kind of protocol."""
    if not isinstance(protocol, asyncio.BufferedProtocol):
        protocol.data_received(data)
        return
    while data:
        buffer = protocol.get_buffer(len(data))
        part, data = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(part)] = part
        protocol.buffer_updated(len(part))


class MemoryServer:
    """A listener in memory."""

    def __init__(self, loop: MemoryLoop, factory: Callable[[], Any], port: int) -> None:
        self.factory = factory
        self.sockets = (NoSocket(port),)
        self._loop = loop
        self._port = port

    async def start_serving(self) -> None:
        """Do nothing, because a listener in memory always accepts connections."""

    def is_serving(self) -> bool:
        return self._port in self._loop.servers

    def close(self) -> None:
        self._loop.servers.pop(self._port, None)

    async def wait_closed(self) -> None:
        """Return at once."""


class MemoryLoop(asyncio.SelectorEventLoop):
    """An event loop that never waits, and whose connections are in memory."""

    def __init__(self) -> None:
        self.clock = Clock()
        self.servers: dict[int, MemoryServer] = {}
        self._dialled: dict[socket.socket, int] = {}
        self._server_ports = itertools.count(20_000)
        self._client_ports = itertools.count(40_000)
        super().__init__(self.clock)

    def time(self) -> float:
        return self.clock.now_s

    def run_in_executor(self, executor: Any, func: Any, *args: Any) -> asyncio.Future[Any]:
        """Run the function immediately and return a completed future."""
        future = self.create_future()
        try:
            future.set_result(func(*args))
        except Exception as error:  # noqa: BLE001 - raised where the future is awaited
            future.set_exception(error)
        return future

    async def create_server(
        self, protocol_factory: Any, host: Any = None, port: Any = None, **options: Any
    ) -> Any:
        number = port or next(self._server_ports)
        self.servers[number] = server = MemoryServer(self, protocol_factory, number)
        return server

    async def create_connection(
        self,
        protocol_factory: Any,
        host: Any = None,
        port: Any = None,
        *,
        sock: socket.socket | None = None,
        **options: Any,
    ) -> Any:
        if sock is not None:
            port = self._dialled.pop(sock)
            sock.close()
        server = self.servers.get(port)
        if server is None:
            raise ConnectionRefusedError(f"nothing listens on port {port}")
        protocol, own = protocol_factory(), next(self._client_ports)
        near = MemoryTransport(self, protocol, own, port)
        far = MemoryTransport(self, server.factory(), port, own)
        near.other, far.other = far, near
        far.get_protocol().connection_made(far)
        protocol.connection_made(near)
        return near, protocol

    async def sock_connect(self, sock: socket.socket, address: Any) -> None:
        """Note the address of a socket, which does not connect, for `create_connection`."""
        if address[1] not in self.servers:
            raise ConnectionRefusedError(f"nothing listens on port {address[1]}")
        self._dialled[sock] = address[1]
