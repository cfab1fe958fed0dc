"""Leases: what this node has reserved of workers' capacity, in the state store."""

from __future__ import annotations

from typing import Final

from gateway.state.store import Store

LEASE_S: Final = 30.0
"""A lease outlives this many seconds of silence from the node that holds it."""


class Leases:
    """The leases of this node's requests."""

    def __init__(self, store: Store) -> None:
        """Begin with none."""
        self._store = store
        self._held: set[str] = set()

    async def take(self, worker_id: str, request_id: str, tokens: int) -> None:
        """Reserve tokens of prompt and output for a request, until `give_back`."""
        self._held.add(request_id)
        await self._store.reserve(worker_id, request_id, tokens, LEASE_S)

    async def give_back(self, request_id: str) -> None:
        """End a request's lease, also one whose taking failed. Idempotent."""
        self._held.discard(request_id)
        await self._store.release(request_id)

    async def renew(self) -> None:
        """Let all that are held live on."""
        await self._store.renew(tuple(self._held), LEASE_S)
