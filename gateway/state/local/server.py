"""The server of stores in memory, which the processes of a node share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, Final, cast

import msgspec

from draftgate.backends.framing import Frames, framed
from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import Command, ListWorkers, RenewLeases, RenewQuotas
from draftgate.gateway.state.local.store import MOST_BYTES, NOTICE
from draftgate.gateway.state.store import Handlers, InMemory
from draftgate.policies.values import replace

_encode: Final = msgspec.msgpack.Encoder().encode


class SharedStores:
    """Stores in memory that other processes share.

    Attributes:
        decoder: decodes a call, which is a number and a command.
    """

    def __init__(self, *stores: InMemory) -> None:
        """Share the commands of stores."""
        handlers: Handlers = reduce(or_, [store.handlers for store in stores])
        # The store has the leases of all gateways, so it does not divide capacity among them.
        self._handlers: Handlers = {
            **handlers,
            ListWorkers: lambda command: replace(
                handlers[ListWorkers](command), gateways=self.gateways, nodes=self.gateways
            ),
            RenewQuotas: lambda command: handlers[RenewQuotas](command) and self.gateways,
        }
        self._gateways: set[_Connection] = set()
        kinds: Any = reduce(or_, self._handlers)
        self.decoder = msgspec.msgpack.Decoder(tuple[int, kinds])

    @property
    def gateways(self) -> int:
        """Number of gateways that share the stores, but at least 1."""
        return max(1, len(self._gateways))

    def reply(self, number: int, command: Command[Any], caller: _Connection) -> bytes:
        """Return the framed reply to a call, or nothing for a notice."""
        if isinstance(command, RenewLeases):  # only gateways renew leases
            self._gateways.add(caller)
        try:
            answer = number, self._handlers[type(command)](command), ""
        except Exception as error:  # noqa: BLE001 - the client gets every error of its call
            if number == NOTICE:
                log(logging.ERROR, "a notice to the shared stores failed", error=error)
            answer = number, None, f"{type(error).__name__}: {error}"
        return b"" if number == NOTICE else framed(_encode(answer))

    def left(self, caller: _Connection) -> None:
        """Stop counting a gateway. Its leases expire, unless it returns and renews them."""
        self._gateways.discard(caller)


class _Connection(asyncio.Protocol):
    """The connection of a client, whose calls run in order."""

    def __init__(self, stores: SharedStores, connections: set[_Connection]) -> None:
        self._stores = stores
        self._connections = connections
        self._frames = Frames(MOST_BYTES)
        self.transport: asyncio.Transport

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        """Keep the connection until it is lost."""
        self.transport = cast(asyncio.Transport, transport)
        self._connections.add(self)

    def connection_lost(self, exc: Exception | None) -> None:
        """Forget the client."""
        self._connections.discard(self)
        self._stores.left(self)

    def data_received(self, data: bytes) -> None:
        """Reply to the calls that are complete."""
        try:
            calls = [self._stores.decoder.decode(message) for message in self._frames.add(data)]
        except msgspec.DecodeError as error:  # the stream has lost its frames
            log(logging.ERROR, "a client of the shared stores sent no call", error=error)
            self.transport.close()
            return
        replies = b"".join([self._stores.reply(number, command, self) for number, command in calls])
        if replies:
            self.transport.write(replies)


@asynccontextmanager
async def serving_stores(stores: SharedStores, path: Path) -> AsyncIterator[None]:
    """Serve stores on a Unix socket until the block ends.

    Args:
        path: path of the socket, in a folder that only this user can open.

    Raises:
        OSError: the socket cannot be created.
    """
    connections: set[_Connection] = set()
    loop = asyncio.get_running_loop()
    server = await loop.create_unix_server(lambda: _Connection(stores, connections), path)
    try:
        yield
    finally:
        server.close()
        for connection in tuple(connections):
            connection.transport.abort()
        await server.wait_closed()
