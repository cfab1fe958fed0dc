"""Which store a node has: that of the pool it joins, or its own."""

from __future__ import annotations

import secrets

from draftgate.gateway.state.guarded import GuardedStore
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.store import Store


def open_store(join: str | None, pool: str) -> Store:
    """Return a node's store; nothing is connected yet.

    Args:
        join: address of `gateway.state.redis.url`; None for a node that stands alone.
        pool: name of the pool in that server.

    Raises:
        ValueError: the address is none.
    """
    if join is None:
        return MemoryStore()
    from draftgate.gateway.state.redis.store import RedisStore

    return GuardedStore(RedisStore.at(join, pool, f"g-{secrets.token_hex(4)}"))
