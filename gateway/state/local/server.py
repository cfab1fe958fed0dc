"""The server of shared memory stores."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncIterator, Coroutine, Mapping
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, ClassVar, Final, cast

import msgspec

from draftgate.backends.framing import Frames
from draftgate.gateway.logs import log
from draftgate.gateway.state.flow_store import MemoryFlows
from draftgate.gateway.state.local.messages import (
    METHODS,
    MOST_BYTES,
    NOTICE,
    Call,
    Method,
    encoded,
)
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.quota_store import MemoryQuotas
from draftgate.gateway.state.response_store import MemoryResponseStore

_call_decoder: Final = msgspec.msgpack.Decoder(Call)


class SharedResponses(MemoryResponseStore):
    """A store of responses that tells each client what its calls displaced."""

    async def put_counted(self, tenant: str, response_id: str, value: bytes) -> tuple[bool, int]:
        """Store a value, and return whether it has a place and how many others it displaced."""
        before = self.evicted
        return await self.put(tenant, response_id, value), self.evicted - before


@dataclass(slots=True)
class SharedStores:
    """The stores that processes share. Their calls never suspend.

    Attributes:
        methods: the methods that clients may call. A subclass adds those of its attributes.
    """

    methods: ClassVar[Mapping[str, Method]] = METHODS

    leases: MemoryStore
    responses: SharedResponses
    _gateways: set[_Connection] = field(default_factory=set)

    @property
    def quotas(self) -> MemoryQuotas:
        """The quotas of tenants."""
        return self.leases.quotas

    @property
    def flows(self) -> MemoryFlows:
        """The flows of tenants."""
        return self.leases.flows

    @property
    def gateways(self) -> int:
        """Number of gateways that share the stores, but at least 1."""
        return max(1, len(self._gateways))

    def reply(self, call: Call, caller: _Connection) -> bytes:
        """Return the framed reply to a call, or nothing for a notice."""
        if call.method == "leases.renew":  # only gateways renew leases
            self._gateways.add(caller)
        try:
            store, _, name = call.method.partition(".")
            arguments = self.methods[call.method].arguments.decode(call.arguments)
            result = _finished(getattr(getattr(self, store), name)(*arguments))
            # The store has the leases of all gateways, so it does not divide capacity among them.
            if call.method == "leases.snapshot":
                result = replace(result, gateways=self.gateways, nodes=self.gateways)
            elif call.method == "quotas.renew":
                result = self.gateways
        except Exception as error:  # noqa: BLE001 - the client gets every error of its call
            if call.number == NOTICE:
                log(logging.ERROR, "a notice to the shared stores failed", error=error)
                return b""
            return encoded(call.number, None, f"{type(error).__name__}: {error}")
        return b"" if call.number == NOTICE else encoded(call.number, result)

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
            calls = [_call_decoder.decode(message) for message in self._frames.add(data)]
        except msgspec.DecodeError as error:  # the stream has lost its frames
            log(logging.ERROR, "a client of the shared stores sent no call", error=error)
            self.transport.close()
            return
        replies = b"".join(self._stores.reply(call, self) for call in calls)
        if replies:
            self.transport.write(replies)


def _finished(call: Coroutine[Any, Any, Any]) -> Any:
    """Return the result of a call that never suspends."""
    try:
        call.send(None)
    except StopIteration as end:
        return end.value
    call.close()
    raise RuntimeError("the store suspended a call")


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
