"""The client of the stores of another process on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from draftgate.backends.framing import Frames, framed
from draftgate.gateway.state.commands import (
    Command,
    EndMove,
    ReleaseLeases,
    ReserveLease,
    ReserveQuota,
    SettleQuotas,
    T,
    result_decoder,
)
from draftgate.gateway.state.store import StoreError, fallback
from draftgate.policies.quotas import release_of

SCHEME: Final = "local://"
"""The scheme of the address of shared stores, which the path of their socket follows."""

MOST_BYTES: Final = 1 << 30
"""Maximum size of a message. Both ends belong to one node, so this limit only detects errors."""

NOTICE: Final = 0
"""The number of all notices, which are commands without a reply."""

NOTICE_S: Final = 0.002
"""Maximum seconds for which a notice waits for the next call, which carries it for free.

The server then wakes once for both. A lease that ends 2 ms later delays only requests of other
processes on a full worker, which ask again after 50 ms. (Chosen, not tuned, 2026-11-23.)"""

_NOTICES: Final = frozenset({ReleaseLeases, EndMove, SettleQuotas})

_encode: Final = msgspec.msgpack.Encoder().encode
_replies: Final = msgspec.msgpack.Decoder(tuple[int, msgspec.Raw, str])


def socket_path(address: str) -> Path:
    """Return the path of the socket in the address of shared stores."""
    return Path(address.removeprefix(SCHEME))


class LocalStore:
    """A `Store` in the parent of this process (`gateway.state.local.server`).

    It connects with its first call, and again after the connection was lost. Calls fail only if the
    parent has ended. This process then ends too (`processes.child`), and meanwhile runs requests
    without leases and limits (`Command.fallback`).

    A call has a number and a command, and its reply the number, the result and an error message.
    All are frames of MessagePack.
    """

    outage = None
    memory = None

    def __init__(self, path: Path) -> None:
        """Use the stores at a socket, without connecting yet."""
        self._path = path
        self._connection = _Connection()
        self._connecting = asyncio.Lock()
        self._numbers = NOTICE
        self._notices: list[bytes] = []  # those without a connection

    async def warm_up(self) -> None:
        """Do nothing, because a connection on this machine takes no time."""

    async def call(self, command: Command[T]) -> T:
        """Return the result of a command, as `Store.call` describes.

        Raises:
            StoreError: the server did not respond to a command without a fallback, or failed.
        """
        if type(command) in _NOTICES:
            self.post(command)
            return cast(T, None)
        self._numbers += 1
        number = self._numbers
        try:
            connection = self._connection if self._connection.is_open else await self._connected()
            result, error = await connection.send(number, framed(_encode((number, command))))
            if error:
                raise StoreError(error)
        except StoreError as error:
            return fallback(command, error)
        except asyncio.CancelledError:
            self._release_quota(command)
            raise
        found: T = result_decoder(type(command)).decode(result)
        return found

    def post(self, command: Command[Any]) -> None:
        """Send a command without a result before every later call, and do not wait for it.

        The command is lost only if the server has ended.
        """
        notice = framed(_encode((NOTICE, command)))
        if self._connection.is_open:
            self._connection.add_notice(notice)
        else:
            self._notices.append(notice)

    async def close(self) -> None:
        """Send the notices and close the connection."""
        self._connection.close()

    def _release_quota(self, command: Command[Any]) -> None:
        """Release what a call reserves whose caller has left."""
        quota = None
        if isinstance(command, ReserveQuota):
            quota = command.reservation
        elif isinstance(command, ReserveLease):
            quota = command.quota
        if quota is not None:
            self.post(SettleQuotas((release_of(quota.request_id),)))

    async def _connected(self) -> _Connection:
        """Connect, unless another call has just connected."""
        async with self._connecting:
            if not self._connection.is_open:
                loop, path = asyncio.get_running_loop(), str(self._path)
                try:
                    _, self._connection = await loop.create_unix_connection(_Connection, path)
                except OSError as error:
                    raise StoreError(f"the shared store cannot be reached: {error}") from error
                for notice in self._notices:
                    self._connection.add_notice(notice)
                self._notices.clear()
        return self._connection


class _Connection(asyncio.Protocol):
    """A connection to the server, with its open calls."""

    def __init__(self) -> None:
        self._frames = Frames(MOST_BYTES)
        self._open: dict[int, asyncio.Future[tuple[msgspec.Raw, str]]] = {}
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
            number, result, error = _replies.decode(message)
            call = self._open.pop(number, None)
            if call is not None and not call.done():  # its caller may have left
                call.set_result((result, error))

    async def send(self, number: int, call: bytes) -> tuple[msgspec.Raw, str]:
        """Send a framed call, and return its encoded result and its error message.

        All calls of one iteration of the event loop are one write, so that they wake the server
        only once.
        """
        loop = asyncio.get_running_loop()
        found: asyncio.Future[tuple[msgspec.Raw, str]] = loop.create_future()
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
