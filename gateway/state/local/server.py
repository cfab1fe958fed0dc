"""The server of stores in memory, which the processes of a node share."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import reduce
from operator import or_
from pathlib import Path
from typing import Any, TypeAlias

from draftgate.backends.framing import CLOSED, INVALID, FrameChannel
from draftgate.gateway.logs import log
from draftgate.gateway.state.commands import ListWorkers, RenewLeases, RenewQuotas, StoreCommand
from draftgate.gateway.state.local.store import MOST_BYTES, NOTICE
from draftgate.gateway.state.store import Handlers, InMemory
from draftgate.policies.values import replace

StoreCall: TypeAlias = tuple[int, StoreCommand[Any]]
"""A number, or `NOTICE`, and a command."""


class SharedStores:
    """Stores in memory that other processes share.

    Attributes:
        call_type: the type of a call, which is a number and a command.
    """

    def __init__(self, *stores: InMemory) -> None:
        handlers: Handlers = reduce(or_, [store.handlers for store in stores])
        # The store has the leases of all gateways, so it does not divide capacity among them.
        self._handlers: Handlers = {
            **handlers,
            ListWorkers: lambda command: replace(
                handlers[ListWorkers](command), gateways=self.gateways, nodes=self.gateways
            ),
            RenewQuotas: lambda command: handlers[RenewQuotas](command) and self.gateways,
        }
        self._gateways: set[FrameChannel[StoreCall]] = set()
        kinds: Any = reduce(or_, self._handlers)
        self.call_type = tuple[int, kinds]

    @property
    def gateways(self) -> int:
        """Number of gateways that share the stores, but at least 1."""
        return max(1, len(self._gateways))

    def answer(self, call: StoreCall, caller: FrameChannel[StoreCall]) -> None:
        """Execute the command of a call, and send the reply unless the call is a notice."""
        number, command = call
        if isinstance(command, RenewLeases):  # only gateways renew leases
            self._gateways.add(caller)
        try:
            reply = number, self._handlers[type(command)](command), ""
        except Exception as error:  # noqa: BLE001 - the client gets every error of its call
            if number == NOTICE:
                log(logging.ERROR, "a notice to the shared stores failed", error=error)
            reply = number, None, f"{type(error).__name__}: {error}"
        if number != NOTICE:
            caller.send(reply)

    def left(self, caller: FrameChannel[StoreCall]) -> None:
        """Stop counting a gateway. Its leases expire, unless it returns and renews them."""
        self._gateways.discard(caller)
        if caller.reason == INVALID:  # the stream has lost its frames
            log(logging.ERROR, "a client of the shared stores sent no call")


@asynccontextmanager
async def serving_stores(stores: SharedStores, path: Path) -> AsyncIterator[None]:
    """Serve stores on a Unix socket until the block ends.

    Args:
        path: path of the socket, in a folder that only this user can open.

    Raises:
        OSError: the socket cannot be created.
    """
    clients: set[FrameChannel[StoreCall]] = set()

    def connect() -> FrameChannel[StoreCall]:
        def lost() -> None:
            clients.discard(client)
            stores.left(client)

        client = FrameChannel[StoreCall](
            stores.call_type, MOST_BYTES, lambda call: stores.answer(call, client), lost
        )
        clients.add(client)
        return client

    server = await asyncio.get_running_loop().create_unix_server(connect, path)
    try:
        yield
    finally:
        server.close()
        for client in tuple(clients):
            client.fail(CLOSED)
        await server.wait_closed()
