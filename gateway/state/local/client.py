"""The connection of a client to the shared memory stores."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from draftgate.backends.framing import Frames
from draftgate.gateway.state.local.messages import (
    METHODS,
    MOST_BYTES,
    NOTICE,
    Method,
    Reply,
    encoded,
)
from draftgate.gateway.state.store import StoreError

_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)

NOTICE_S: Final = 0.002
"""Maximum seconds for which a notice waits for the next call, which carries it for free.

The server then wakes once for both. A lease that ends 2 ms later delays only requests of other
processes on a full worker, which ask again after 50 ms. (Chosen, not tuned, 2026-11-23.)"""


class Client:
    """A client that connects with its first call, and again after the connection was lost."""

    def __init__(self, path: Path, methods: Mapping[str, Method] = METHODS) -> None:
        """Use the stores at a socket, without connecting yet.

        Args:
            methods: the methods of the stores (`SharedStores.methods`).
        """
        self._path = path
        self._methods = methods
        self._connection = _Connection()
        self._connecting = asyncio.Lock()
        self._numbers = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method.

        Args:
            method: the name of one of the methods.

        Raises:
            StoreError: the server did not respond, or the method raised an error.
        """
        self._numbers += 1
        number = self._numbers
        connection = self._connection if self._connection.is_open else await self._connected()
        reply = await connection.send(number, encoded(number, method, arguments))
        if reply.error:
            raise StoreError(reply.error)
        return self._methods[method].result.decode(reply.result)

    async def call_or(self, otherwise: Any, method: str, *arguments: Any) -> Any:
        """Return the result of a method, or `otherwise` if the server did not respond."""
        try:
            return await self.call(method, *arguments)
        except StoreError:
            return otherwise

    async def notify(self, method: str, *arguments: Any) -> None:
        """Call a method without a result, and do not wait for it.

        The method runs before every later call of this client. The notice is lost only if the
        server has ended.
        """
        with suppress(StoreError):
            connection = self._connection if self._connection.is_open else await self._connected()
            connection.add_notice(encoded(NOTICE, method, arguments))

    async def close(self) -> None:
        """Close the connection."""
        self._connection.close()

    async def _connected(self) -> _Connection:
        """Connect, unless another call has just connected."""
        async with self._connecting:
            if not self._connection.is_open:
                loop, path = asyncio.get_running_loop(), str(self._path)
                try:
                    _, self._connection = await loop.create_unix_connection(_Connection, path)
                except OSError as error:
                    raise StoreError(f"the shared store cannot be reached: {error}") from error
        return self._connection


class _Connection(asyncio.Protocol):
    """A connection to the server, with its open calls."""

    def __init__(self) -> None:
        self._frames = Frames(MOST_BYTES)
        self._open: dict[int, asyncio.Future[Reply]] = {}
        self._waiting: list[bytes] = []
        self._sends_soon = False
        self._transport: asyncio.Transport | None = None

    @property
    def is_open(self) -> bool:
        """Whether calls can be sent."""
        return self._transport is not None and not self._transport.is_closing()

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the transport."""
        self._transport = cast(asyncio.Transport, transport)

    def connection_lost(self, exc: Exception | None) -> None:
        """Fail the open calls."""
        self._transport = None
        calls, self._open = self._open, {}
        for call in calls.values():
            if not call.done():
                call.set_exception(StoreError("the connection to the shared store was lost"))

    def data_received(self, data: bytes) -> None:
        """Pass each reply to its call."""
        for message in self._frames.add(data):
            reply = _reply_decoder.decode(message)
            call = self._open.pop(reply.number, None)
            if call is not None and not call.done():  # its caller may have left
                call.set_result(reply)

    async def send(self, number: int, call: bytes) -> Reply:
        """Send a framed call and wait for its reply.

        All calls of one iteration of the event loop are one write, so that they wake the server
        only once.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[Reply] = loop.create_future()
        if not self._sends_soon:
            self._sends_soon = True
            loop.call_soon(self._send_waiting)
        self._open[number] = found
        self._waiting.append(call)
        return await found

    def add_notice(self, notice: bytes) -> None:
        """Send a framed notice with the next call, or after `NOTICE_S`."""
        if not self._waiting:
            asyncio.get_running_loop().call_later(NOTICE_S, self._send_waiting)
        self._waiting.append(notice)

    def close(self) -> None:
        """Send the notices and close the connection, which fails its open calls."""
        if self._transport is not None:
            self._send_waiting()
            self._transport.close()

    def _send_waiting(self) -> None:
        frames, self._waiting, self._sends_soon = self._waiting, [], False
        if frames and self._transport is not None:
            self._transport.write(b"".join(frames))
