"""Leases: what this node has reserved of workers' capacity, in the state store."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from gateway.state.store import Lease, Offer, Reservation, Store

LEASE_S: Final = 30.0
"""A lease outlives this many seconds of silence from the node that holds it."""


class Leases:
    """The leases of this node's requests."""

    def __init__(self, store: Store) -> None:
        """Begin with none."""
        self._store = store
        self._held: dict[str, Lease] = {}

    async def take(self, request_id: str, tokens: int, offers: Sequence[Offer]) -> Reservation:
        """Reserve tokens of prompt and output for a request, until `give_back`.

        What it held before ends, whatever the answer.
        """
        self._held.pop(request_id, None)
        found = await self._store.reserve(request_id, tokens, offers, LEASE_S)
        if found.lease is not None:
            self._held[request_id] = found.lease
        return found

    async def give_back(self, request_id: str) -> None:
        """End a request's lease, also one whose taking failed. Idempotent."""
        self._held.pop(request_id, None)
        await self._store.release((request_id,))

    async def renew(self) -> None:
        """Let all that are held live on, but for those of workers that began anew."""
        for request_id in await self._store.renew(tuple(self._held.values()), LEASE_S):
            self._held.pop(request_id, None)
