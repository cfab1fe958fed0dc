"""The client of the stores of another process on this machine."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any, Final, TypeAlias, cast

import msgspec

from draftgate.backends.framing import Calls, FrameChannel
from draftgate.gateway.state.commands import (
    FreeSlots,
    ReleaseLeases,
    ReserveLease,
    ReserveQuota,
    SettleQuotas,
    StoreCommand,
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

_NOTICES: Final = frozenset({ReleaseLeases, FreeSlots, SettleQuotas})

LocalReply: TypeAlias = tuple[int, msgspec.Raw, str]
"""The number of a call, the encoded result, and an error message or an empty string."""


def socket_path(address: str) -> Path:
    """Return the path of the socket in the address of shared stores."""
    return Path(address.removeprefix(SCHEME))


class LocalStore:
    """A `Store` in the parent of this process (`gateway.state.local.server`).

    It connects with its first call, and again after the connection was lost. Calls fail only if the
    parent has ended. This process then ends too (`processes.child`), and meanwhile runs requests
    without leases and limits (`StoreCommand.fallback`).

    Calls and replies are frames of MessagePack.
    """

    outage = None
    memory = None

    def __init__(self, path: Path) -> None:
        self._path = path
        self._channel: FrameChannel[LocalReply] | None = None
        self._connecting = asyncio.Lock()
        self._calls = Calls[LocalReply]()
        self._waiting: list[tuple[int, StoreCommand[Any]]] = []  # calls to send together
        self._sends_soon = False

    async def warm_up(self) -> None:
        """Do nothing, because a connection on this machine takes no time."""

    async def call(self, command: StoreCommand[T]) -> T:
        """Return the result of a command, as `Store.call` describes.

        Raises:
            StoreError: the server did not respond to a command without a fallback, or failed.
        """
        if type(command) in _NOTICES:
            self.post(command)
            return cast(T, None)
        try:
            _, result, error = await self._reply(command)
            if error:
                raise StoreError(error)
        except StoreError as error:
            return fallback(command, error)
        except asyncio.CancelledError:
            self._release_quota(command)
            raise
        found: T = result_decoder(type(command)).decode(result)
        return found

    def post(self, command: StoreCommand[Any]) -> None:
        """Send a command without a result before every later call, and do not wait for it.

        It is sent with the next call, or after `NOTICE_S`. Without a connection, it waits for the
        next call. It is lost only if the server has ended.
        """
        if not self._waiting and self._is_open:
            asyncio.get_running_loop().call_later(NOTICE_S, self._send_waiting)
        self._waiting.append((NOTICE, command))

    async def close(self) -> None:
        """Send the notices and close the connection, which fails its open calls."""
        if self._channel is not None:
            self._send_waiting()
            self._channel.close()

    @property
    def _is_open(self) -> bool:
        return self._channel is not None and self._channel.is_open

    async def _reply(self, command: StoreCommand[Any]) -> LocalReply:
        """Send a command, and return its reply.

        All calls of one iteration of the event loop are one write, so that they wake the server
        only once.

        Raises:
            StoreError: the server did not respond.
        """
        if not self._is_open:
            await self._connect()
        number, reply = self._calls.open()
        self._waiting.append((number, command))
        if not self._sends_soon:
            self._sends_soon = True
            asyncio.get_running_loop().call_soon(self._send_waiting)
        return await reply

    def _send_waiting(self) -> None:
        if self._waiting and self._channel is not None:
            self._channel.send(*self._waiting)
            self._waiting.clear()
        self._sends_soon = False

    def _receive(self, reply: LocalReply) -> None:
        self._calls.settle(reply[0], reply)

    def _lost(self) -> None:
        self._calls.fail(StoreError("the connection to the shared store was lost"))

    def _release_quota(self, command: StoreCommand[Any]) -> None:
        """Release what a call reserves whose caller has left."""
        quota = None
        if isinstance(command, ReserveQuota):
            quota = command.reservation
        elif isinstance(command, ReserveLease):
            quota = command.quota
        if quota is not None:
            self.post(SettleQuotas((release_of(quota.request_id),)))

    async def _connect(self) -> None:
        """Connect, unless another call has just connected.

        Raises:
            StoreError: the server cannot be reached.
        """
        async with self._connecting:
            if self._is_open:
                return
            channel = FrameChannel[LocalReply](LocalReply, MOST_BYTES, self._receive, self._lost)
            loop = asyncio.get_running_loop()
            try:
                await loop.create_unix_connection(lambda: channel, str(self._path))
            except OSError as error:
                raise StoreError(f"the shared store cannot be reached: {error}") from error
            self._channel = channel
