"""Leases: what this node has reserved of workers' capacity, in the state store."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from typing import Final

from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.state.store import Lease, LeaseCandidate, Refusal, Reservation, Store

LEASE_S: Final = 30.0
"""A lease outlives this many seconds of silence from the node that holds it."""

MOST_OFFERS: Final = 8
"""Workers that a reservation may choose among, the best ones by what its gateway knows. With more
it could hardly do better: all eight would have had to fill up since they last reported."""


class NoCapacity(Exception):
    """Everybody's leases together leave no room on any worker that was offered."""


class Leases:
    """The leases of this node's requests."""

    def __init__(self, store: Store, *, shared: bool = False) -> None:
        """Begin with none.

        Args:
            shared: whether other gateways lease the same workers. Where none does, the queue knows
                all that is there, and better than by leases.
        """
        self._store = store
        self._shared = shared
        self._held: dict[str, Lease] = {}

    async def take(self, request_id: str, tokens: int, routed: Routed) -> Reservation:
        """Reserve tokens of prompt and output for a request, until `give_back`.

        What it held before ends, whatever the answer. Where the store does not know a worker, or
        knows another life of it, there is no lease; whoever is linked to the worker may go on.

        Raises:
            NoCapacity: every worker is full; to wait helps.
        """
        self._held.pop(request_id, None)
        choices = MOST_OFFERS if self._shared and self._store.outage is None else 1
        offers = tuple(_offers(routed, choices))
        found = await self._store.reserve(request_id, tokens, offers, LEASE_S)
        if found.refusal is Refusal.FULL and self._shared:
            raise NoCapacity
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


def _offers(routed: Routed, most: int) -> Iterator[LeaseCandidate]:
    """Yield what a reservation may choose among, the routing policy's own choice first."""
    if routed.route is None:
        yield LeaseCandidate(
            routed.worker.worker_id, routed.worker.epoch, watermark=routed.worker.watermark
        )
        return
    pairs = zip(routed.choices, routed.route.offers, strict=True)
    for worker, offer in islice(pairs, most):
        yield LeaseCandidate(
            worker.worker_id, worker.epoch, offer.score, offer.score_per_token, worker.watermark
        )
