"""The connection of a client to the shared memory stores."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from draftgate.gateway.state.local.messages import METHODS, Call, Frames, Reply, encode, framed
from draftgate.gateway.state.store import StoreError

_reply_decoder: Final = msgspec.msgpack.Decoder(Reply)


class Client:
    """A client that connects with its first call, and again after the connection was lost."""

    def __init__(self, path: Path) -> None:
        """Use the stores at a socket, without connecting yet."""
        self._path = path
        self._connection = _Connection()
        self._connecting = asyncio.Lock()
        self._numbers = 0

    async def call(self, method: str, *arguments: Any) -> Any:
        """Return the result of a method.

        Args:
            method: a key of `METHODS`.

        Raises:
            StoreError: the server did not respond, or the method raised an error.
        """
        self._numbers += 1
        call = Call(self._numbers, method, msgspec.Raw(encode(arguments)))
        connection = self._connection if self._connection.is_open else await self._connected()
        reply = await connection.send(call)
        if reply.error:
            raise StoreError(reply.error)
        return METHODS[method].result.decode(reply.result)

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
        self._frames = Frames()
        self._open: dict[int, asyncio.Future[Reply]] = {}
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

    async def send(self, call: Call) -> Reply:
        """Send a call and wait for its reply."""
        assert self._transport is not None
        found: asyncio.Future[Reply] = asyncio.get_running_loop().create_future()
        self._open[call.number] = found
        self._transport.write(framed(call))
        return await found

    def close(self) -> None:
        """Close the connection, which fails its open calls."""
        if self._transport is not None:
            self._transport.abort()
