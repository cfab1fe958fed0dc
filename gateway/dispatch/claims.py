"""Claims, with which resumed requests keep the next free capacity of a worker for themselves.

A resumed request with a long context may need more free capacity than a new request. If new
requests took all capacity as soon as it is free, enough for the resumed request would never
accumulate. The resumed request therefore claims one worker in the store. No gateway sends new
requests to that worker until the resumed request has its lease. Other workers remain usable.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from collections.abc import Set as AbstractSet
from functools import partial
from typing import Final

from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.state.commands import ClaimWorker, ReleaseLeases
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import Lease, LeaseCandidate
from draftgate.policies.capacity import CapacityNeed, missing_tokens

CLAIM_S: Final = 2.0
"""A claim expires after this time without a renewal.

A killed gateway blocks a worker for at most this time. A stall of an event loop is usually shorter.
(Chosen, not tuned, 2026-11-23.)"""

RENEW_S: Final = 0.5
"""Interval of renewals, of which three may fail before a claim expires."""


class _Claimant:
    """A request that waits, its claim and the task that renews the claim."""

    claim: Lease | None = None
    renewing: asyncio.Task[None]

    def __init__(
        self, request_id: str, tokens: int, need: CapacityNeed, avoid: frozenset[str]
    ) -> None:
        self.request_id = request_id
        self.tokens = tokens
        self.need = need
        self.avoid = avoid


class Claims:
    """The claims of this node's requests.

    Use the object only on the thread of the event loop.
    """

    def __init__(self, fleet: Fleet, store: Store) -> None:
        self._fleet = fleet
        self._store = store
        self._waiters: dict[str, _Claimant] = {}

    @property
    def open(self) -> int:
        """Number of requests that have a claim."""
        return sum(waiter.claim is not None for waiter in self._waiters.values())

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._waiters

    def worker_of(self, request_id: str) -> str | None:
        """Return the id of the worker that a request has claimed, or None."""
        claim = self._claim_of(request_id)
        return None if claim is None else claim.worker_id

    def taken(self, request_id: str) -> AbstractSet[str]:
        """Return the ids of workers that other requests claimed before this request."""
        if not self._waiters:
            return frozenset()
        # The store numbers the claims. Any other order could let two requests block each other.
        own = self._claim_of(request_id)
        claims = (waiter.claim for waiter in self._waiters.values())
        return {
            claim.worker_id
            for claim in claims
            if claim is not None and (own is None or claim.number < own.number)
        }

    def begin(
        self,
        request_id: str,
        tokens: int,
        need: CapacityNeed,
        avoid: frozenset[str],
        *,
        changed: Callable[[], None],
    ) -> None:
        """Claim a worker for a request until `end`, if the request has no claim yet.

        Args:
            tokens: tokens of its lease.
            avoid: ids of workers that run the request only if no other worker is available.
            changed: a callback for a claim that has moved to another worker.
        """
        if request_id not in self._waiters:
            waiter = self._waiters[request_id] = _Claimant(request_id, tokens, need, avoid)
            waiter.renewing = asyncio.create_task(self._renew(waiter, changed))

    def end(self, request_id: str, *, leased: bool = False) -> None:
        """End the claim of a request, if it has one.

        Args:
            leased: whether the request has got a lease, which has ended its claim in the store.
        """
        waiter = self._waiters.pop(request_id, None)
        if waiter is None:
            return
        waiter.renewing.cancel()
        if not leased:
            self._store.post(ReleaseLeases((request_id,)))

    def _claim_of(self, request_id: str) -> Lease | None:
        waiter = self._waiters.get(request_id)
        return None if waiter is None else waiter.claim

    async def _renew(self, waiter: _Claimant, changed: Callable[[], None]) -> None:
        """Claim a worker, and move the claim if the worker leaves, until cancelled."""
        while True:
            able = self._fleet.open_among(self._fleet.workers, waiter.need.offer)
            workers = preferred(able, waiter.avoid)
            missing = partial(_missing_tokens, waiter.need)
            offers = [
                LeaseCandidate(worker.worker_id, worker.epoch)
                for worker in sorted(workers, key=missing)
            ]
            claim = ClaimWorker(waiter.request_id, waiter.tokens, tuple(offers), CLAIM_S)
            found = await self._store.call(claim)
            if found != waiter.claim:
                waiter.claim = found
                changed()
            await asyncio.sleep(RENEW_S)


def _missing_tokens(need: CapacityNeed, worker: FleetWorker) -> int:
    return missing_tokens(worker.usage, need)


def preferred(workers: list[FleetWorker], avoid: frozenset[str]) -> list[FleetWorker]:
    """Return the workers that a request does not avoid, or all if the request avoids all."""
    if not avoid:
        return workers
    return [worker for worker in workers if worker.worker_id not in avoid] or workers
