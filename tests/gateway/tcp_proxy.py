"""A TCP proxy that can cut, freeze, delay and corrupt connections."""

from __future__ import annotations

import asyncio
import socket
import struct
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from urllib.parse import urlsplit

BLOCK_BYTES = 1 << 16
SMALL_BYTES = 2048


class TcpProxy:
    """A proxy that listens on a free local port and forwards to a server.

    Attributes:
        url: the URL of the proxy, which replaces the URL of the server.
        delay_s: the delay of each block in either direction, in seconds.
        bytes_s: the rate to clients in bytes per second, or 0 without a limit. Small buffers then
            hold little output, so that the server notices the rate.
        passed_bytes: the number of bytes that the proxy forwarded from the server to clients.
        most_bytes: the limit of `passed_bytes` that closes the connection, or None.
        flip_at: the number of the byte from the server in which one bit is flipped, or None.
    """

    def __init__(self, url: str) -> None:
        self.url = ""
        self.delay_s = 0.0
        self.bytes_s = 0.0
        self.passed_bytes = 0
        self.most_bytes: int | None = None
        self.flip_at: int | None = None
        self._spoilt: bytes | None = None
        self._flows = asyncio.Event()
        self._flows.set()
        self._refuses = False
        self._writers: set[asyncio.StreamWriter] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self.forward_to(url)

    @property
    def connections(self) -> int:
        """Number of open client connections."""
        return len(self._writers) // 2

    def forward_to(self, url: str) -> None:
        """Forward new connections to another server, and reset the others."""
        parts = urlsplit(url)
        self._to = str(parts.hostname), int(parts.port or 80)
        self.cut()

    def cut(self, *, refuse: bool = False) -> None:
        """Reset every connection, as a restarted machine does.

        Args:
            refuse: whether to reset new connections too, until `accept`.
        """
        self._refuses = refuse
        for writer in tuple(self._writers):
            _reset(writer)

    def accept(self) -> None:
        """Accept connections again."""
        self._refuses = False

    def freeze(self) -> None:
        """Stop forwarding and keep all connections open, as a broken network does."""
        self._flows.clear()

    def thaw(self) -> None:
        """Resume forwarding with the held blocks."""
        self._flows.set()

    def spoil(self, garbage: bytes) -> None:
        """Replace the next block from the server with garbage."""
        self._spoilt = garbage

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Forward between a client and the server until either side closes its connection."""
        if self._refuses:
            _reset(writer)
            return
        try:
            server_reader, server_writer = await self._connect()
        except OSError:
            _reset(writer)
            return
        both = {writer, server_writer}
        self._writers |= both
        directions = {
            asyncio.create_task(self._pass(reader, server_writer, from_server=False)),
            asyncio.create_task(self._pass(server_reader, writer, from_server=True)),
        }
        self._tasks |= directions
        try:
            await asyncio.wait(directions, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for direction in directions:
                direction.cancel()
            for end in both:
                end.close()
            self._writers -= both
            self._tasks -= directions

    async def _connect(self) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
        connection = socket.socket()
        if self.bytes_s:
            connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, SMALL_BYTES)
        connection.setblocking(False)
        try:
            await asyncio.get_running_loop().sock_connect(connection, self._to)
        except BaseException:
            connection.close()
            raise
        limit = SMALL_BYTES if self.bytes_s else BLOCK_BYTES
        return await asyncio.open_connection(sock=connection, limit=limit)

    async def stop(self) -> None:
        """Cancel the forwarding of every connection."""
        for task in tuple(self._tasks):
            task.cancel()
        await asyncio.sleep(0)

    async def _pass(
        self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter, *, from_server: bool
    ) -> None:
        with suppress(ConnectionError):
            while block := await reader.read(SMALL_BYTES if self.bytes_s else BLOCK_BYTES):
                if self.delay_s:
                    await asyncio.sleep(self.delay_s)
                if self.bytes_s and from_server:
                    await asyncio.sleep(len(block) / self.bytes_s)
                await self._flows.wait()
                writer.write(self._allowed(block) if from_server else block)
                await writer.drain()
                if from_server and self.passed_bytes == self.most_bytes:
                    return
        await self._flows.wait()  # a frozen proxy also holds back the end of a stream

    def _allowed(self, block: bytes) -> bytes:
        if self._spoilt is not None:
            block, self._spoilt = self._spoilt, None
        if self.most_bytes is not None:
            block = block[: self.most_bytes - self.passed_bytes]
        place = -1 if self.flip_at is None else self.flip_at - self.passed_bytes
        if 0 <= place < len(block):
            block = block[:place] + bytes([block[place] ^ 0x10]) + block[place + 1 :]
        self.passed_bytes += len(block)
        return block


@asynccontextmanager
async def proxied(url: str) -> AsyncIterator[TcpProxy]:
    """Run a proxy for the server at this URL."""
    proxy = TcpProxy(url)
    server = await asyncio.start_server(proxy.serve, "127.0.0.1", 0)
    proxy.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
    try:
        yield proxy
    finally:
        server.close()
        proxy.thaw()
        proxy.cut()
        await proxy.stop()


def _reset(writer: asyncio.StreamWriter) -> None:
    connection = writer.get_extra_info("socket")
    if connection is not None and connection.fileno() >= 0:
        connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    writer.transport.abort()
