"""The store of responses in Redis, which the gateways of a pool share.

docs/guide/cluster.md describes the keys.
"""

from __future__ import annotations

from typing import Final

from draftgate.gateway.state.redis.client import Connected, open_client
from draftgate.gateway.state.redis.scripts import Scripts
from draftgate.gateway.state.response_store import StoreUsage

_SCRIPTS: Final = ("put_response", "get_response", "delete_response", "response_usage")


class RedisResponseStore:
    """A `ResponseStore` in Redis, with one script and one round trip for each call.

    The store has its own connections, because a response may have megabytes and must not delay
    reservations. They do not decode responses, which would hold the event loop. Requests decode
    long responses in a thread.
    """

    def __init__(
        self, connected: Connected, pool: str, capacity_bytes: int, ttl_s: float, clock: str = ""
    ) -> None:
        """Use a client, which is closed with this store and does not decode results.

        Args:
            pool: name of the pool, which is part of the prefix of all keys.
            capacity_bytes: the bytes of all values of the pool together.
            ttl_s: seconds after which a value ends.
            clock: Lua source that replaces `lua/clock.lua`.
        """
        self.evicted = 0
        self._bounds = (round(ttl_s * 1e6), capacity_bytes)
        self._scripts = Scripts(connected, pool, _SCRIPTS, ("responses",), clock=clock)

    @classmethod
    def at(cls, address: str, pool: str, capacity_bytes: int, ttl_s: float) -> RedisResponseStore:
        """Return the store of a pool at an address (`gateway.state.redis.url`).

        Raises:
            ValueError: the address is invalid.
        """
        return cls(open_client(address, decode=False), pool, capacity_bytes, ttl_s)

    async def put(self, tenant: str, response_id: str, value: bytes) -> bool:
        """Store a value, as `ResponseStore.put` describes."""
        args = (tenant, response_id, value, *self._bounds)
        kept, evicted = await self._scripts.run("put_response", args)
        self.evicted += evicted
        return bool(kept)

    async def get(self, tenant: str, response_id: str) -> bytes | None:
        """Return a value, as `ResponseStore.get` describes."""
        found: bytes | None = await self._scripts.run("get_response", (tenant, response_id))
        return found

    async def delete(self, tenant: str, response_id: str) -> bool:
        """Delete a value, as `ResponseStore.delete` describes."""
        return bool(await self._scripts.run("delete_response", (tenant, response_id)))

    async def usage(self) -> StoreUsage:
        """Return the usage by the whole pool, as `ResponseStore.usage` describes."""
        return StoreUsage(*await self._scripts.run("response_usage", ()))

    async def close(self) -> None:
        """Close all connections."""
        await self._scripts.close()
