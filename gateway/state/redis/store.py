"""A store in Redis, with one script and one round trip for each command."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Final

from redis.exceptions import RedisError

from draftgate.gateway.state.commands import ReadTotals, RenewLeases, StoreCommand, T
from draftgate.gateway.state.redis.client import BROKEN, Connected, open_client
from draftgate.gateway.state.redis.scripts import RESPONSE_SCRIPTS, SCRIPTS, Caller, ResponseBounds
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.state.values import FORGET_S, Reservation

WARM_CONNECTIONS: Final = 16
"""Connections of a node that starts.

Each connection serves a call at a time, so they serve 16 calls per round trip. (Chosen, not tuned,
2026-11-28.)"""

_LUA: Final = Path(__file__).with_name("lua")


class RedisStore:
    """A `RemoteStore` in Redis, of the state of a pool or of its responses."""

    outage = None

    def __init__(
        self,
        connected: Connected,
        pool: str,
        node_id: str,
        clock: str = "",
        responses: ResponseBounds | None = None,
    ) -> None:
        """Use a client, which is closed with this store.

        Args:
            pool: name of the pool, which is part of the prefix of all keys.
            node_id: the id of this node among the nodes that renew leases or quotas.
            clock: Lua source that replaces `lua/clock.lua`.
            responses: the bounds of a store of responses, or None for a store of the state.
        """
        self._client, self._closing = connected.client, connected.closing
        self._pool = f"draftgate:{{{pool}}}:"
        self._node_id = node_id
        self._bounds = responses or ResponseBounds()
        self._granted = self._reported = 0  # leases, in total and before the last renewal
        head = f"{clock or _read_lua('clock')}\nlocal FORGET_MS = {round(FORGET_S * 1000)}\n"
        self._scripts = {
            kind: (
                script,
                self._client.register_script(
                    head + "\n".join(map(_read_lua, (*script.helpers, script.name)))
                ),
            )
            for kind, script in (RESPONSE_SCRIPTS if responses else SCRIPTS).items()
        }

    @classmethod
    def at(cls, address: str, pool: str, node_id: str) -> RedisStore:
        """Return the store of the state of a pool at an address (`gateway.state.redis.url`).

        Raises:
            ValueError: the address is invalid.
        """
        return cls(open_client(address), pool, node_id)

    @classmethod
    def of_responses(cls, address: str, pool: str, capacity_bytes: int, ttl_s: float) -> RedisStore:
        """Return the store of the responses of a pool at an address.

        It has its own connections, because a response may have megabytes and must not delay
        reservations. They do not decode responses, which would hold the event loop. Requests decode
        long responses in a thread.

        Args:
            capacity_bytes: the bytes of all values of the pool together.
            ttl_s: seconds after which a value ends.

        Raises:
            ValueError: the address is invalid.
        """
        client, bounds = open_client(address, decode=False), ResponseBounds(capacity_bytes, ttl_s)
        return cls(client, pool, node_id="", responses=bounds)

    async def warm_up(self) -> None:
        """Load all scripts into the server, and open connections for the first burst of calls.

        Raises:
            StoreError: the server does not respond.
        """
        try:
            for _, script in self._scripts.values():
                await self._client.script_load(script.script)
        except (RedisError, OSError, *BROKEN) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error
        await asyncio.gather(*(self.call(ReadTotals("")) for _ in range(WARM_CONNECTIONS)))

    async def call(self, command: StoreCommand[T]) -> T:
        """Run the script of a command, and return the result.

        Raises:
            StoreError: the server did not respond, or responded with an error.
        """
        codec, script = self._scripts[type(command)]
        granted = self._granted
        caller = Caller(self._node_id, granted > self._reported, self._bounds)
        args = codec.arguments(command, caller)
        is_empty = not args and command.__struct_fields__  # such as no requests to release
        try:
            found = None if is_empty else await script((self._pool,), args)
        except (RedisError, OSError, *BROKEN) as error:
            raise StoreError(f"{type(error).__name__}: {error}") from error
        result: T = codec.result(command, found)
        if isinstance(result, Reservation):
            self._granted += result.lease is not None
        elif isinstance(command, RenewLeases):
            self._reported = granted
        return result

    async def close(self) -> None:
        """Close all connections."""
        for close in self._closing:
            await close()


def _read_lua(name: str) -> str:
    return (_LUA / f"{name}.lua").read_text(encoding="utf-8")
