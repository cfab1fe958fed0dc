"""The leases that this node holds on the capacity of workers."""

from __future__ import annotations

import asyncio
import math
from collections.abc import Sequence
from itertools import islice
from typing import Final

from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.state.commands import ReleaseLeases, RenewLeases, ReserveLease, ReserveQuota
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import Lease, LeaseCandidate, Refusal, Reservation
from draftgate.policies.quotas import QuotaReservation

LEASE_S: Final = 30.0
"""A lease expires after this time without a renewal."""

_MOST_OFFERS: Final = 8
"""Maximum workers that a reservation may choose from, which are the routing policy's best.

More workers would hardly help, because all eight would have to fill up between two reports."""

_REFUSED_S: Final = 0.025
"""Time for which a refusal also answers requests that are at least as large.

It is half of `queue.BACKOFF_S`, after which the refused requests ask again."""

CONTENDED_S: Final = 1.0
"""Time after a refusal in which new requests ask one after the other, so that one answer can spare
the next requests a call. (Chosen, not tuned, 2026-11-24.)"""


_NO_LEASE: Final = Reservation(None)


class NoCapacity(Exception):
    """No offered worker has capacity left after the leases of all gateways."""


class Leases:
    """The leases of this node's requests.

    A node without a pool leases nothing. Its queue knows the capacity better than the store.

    Attributes:
        shared: whether other gateways lease the same workers.
    """

    def __init__(self, store: Store, *, shared: bool = False) -> None:
        self._store = store
        self.shared = shared
        self._held: dict[str, Lease] = {}
        self._refused_s, self._refused_tokens = -math.inf, 0
        self._asking = asyncio.Lock()

    def reserve_at_once(self, quota: QuotaReservation | None) -> Reservation | None:
        """Reserve the quota of a request that needs no lease, if that takes no waiting.

        Returns:
            The result, or None if `reserve` has to follow.
        """
        if self.shared:
            return None
        if quota is None:
            return _NO_LEASE
        if (memory := self._store.memory) is None:
            return None
        return Reservation(None, shortage=memory.apply(ReserveQuota(quota, LEASE_S)))

    async def reserve(
        self,
        request_id: str,
        tokens: int,
        routed: Routed,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        """Reserve tokens of prompt and output for a request.

        Any earlier lease of the request ends. If the store does not know the worker, or knows
        another epoch of it, the request gets no lease but may still run there.

        Args:
            quota: what the request reserves of its tenant's quota in the same call.
        """
        if not self.shared:
            return await self.reserve_quota(quota)
        self._held.pop(request_id, None)
        offers = _offers(routed, _MOST_OFFERS if self._store.outage is None else 1)
        command = ReserveLease(request_id, tokens, offers, LEASE_S, quota)
        found = await self._store.call(command)
        if found.lease is not None:
            self._held[request_id] = found.lease
        return found

    async def reserve_quota(self, quota: QuotaReservation | None) -> Reservation:
        """Reserve only the quota of a request that leases no capacity."""
        shortage = None
        if quota is not None:
            shortage = await self._store.call(ReserveQuota(quota, LEASE_S))
        return Reservation(None, shortage=shortage)

    async def reserve_new(
        self,
        request_id: str,
        tokens: int,
        routed: Routed,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        """Reserve tokens for a request without a claim in a shared pool, as `reserve` does.

        If leases fill the pool, all waiting requests of a gateway ask at the same time. The store
        then answers only requests that are smaller than those that it has just refused.
        """
        now_s = asyncio.get_running_loop().time
        if now_s() - self._refused_s > CONTENDED_S:
            return self._note(await self.reserve(request_id, tokens, routed, quota), tokens)
        async with self._asking:
            if now_s() - self._refused_s < _REFUSED_S and tokens >= self._refused_tokens:
                return Reservation(None, Refusal.FULL)
            return self._note(await self.reserve(request_id, tokens, routed, quota), tokens)

    def _note(self, found: Reservation, tokens: int) -> Reservation:
        """Remember a refusal, the smallest of those within `_REFUSED_S`."""
        if self.must_wait(found):
            now_s = asyncio.get_running_loop().time()
            recent = now_s - self._refused_s < _REFUSED_S
            self._refused_tokens = min(self._refused_tokens, tokens) if recent else tokens
            self._refused_s = now_s
        return found

    def must_wait(self, found: Reservation) -> bool:
        """Return whether every offered worker is full, so that the request has to wait."""
        return self.shared and found.refusal is Refusal.FULL

    def release(self, request_id: str) -> None:
        """End the lease and the claim of a request, even after a failed reservation.

        The method is idempotent.
        """
        if self.shared:
            self._held.pop(request_id, None)
            self._refused_tokens = 1 << 62  # other requests may fit now
            self._store.post(ReleaseLeases((request_id,)))

    async def renew(self) -> None:
        """Renew all leases, and forget leases of workers with a newer epoch."""
        if self.shared:
            command = RenewLeases(tuple(self._held.values()), LEASE_S)
            for request_id in await self._store.call(command):
                self._held.pop(request_id, None)


def lease_tokens(
    request: GenerationRequest, expected_tokens: float, lengths: Sequence[int] | None = None
) -> int:
    """Return the tokens of KV memory that a request is expected to use.

    The result is not the limit of the request. Clients without a limit would otherwise each lease a
    whole context and leave workers idle. A worker that becomes too full delays sequences but does
    not fail.

    Args:
        expected_tokens: expected output tokens of each choice. A resumed choice may have more.
        lengths: output tokens of each choice so far, or None if it has those of the request.
    """
    prompt_tokens, expected = len(request.prompt_ids), math.ceil(expected_tokens)
    if lengths is None and not request.resumed:
        tokens = (prompt_tokens + expected) * request.n
    else:
        if lengths is None:
            lengths = [len(one.output_ids) for one in request.resumed]
        tokens = sum([prompt_tokens + max(expected, length) for length in lengths])
    return max(1, min(request.most_tokens, tokens))


def _offers(routed: Routed, most: int) -> tuple[LeaseCandidate, ...]:
    """Return the offers of a reservation, with the routing policy's choice first."""
    if routed.route is None:
        worker = routed.worker
        return (LeaseCandidate(worker.worker_id, worker.epoch, watermark=worker.watermark),)
    pairs = zip(routed.choices, routed.route.offers, strict=True)
    return tuple(
        [
            LeaseCandidate(
                worker.worker_id, worker.epoch, offer.score, offer.score_per_token, worker.watermark
            )
            for worker, offer in islice(pairs, most)
        ]
    )
