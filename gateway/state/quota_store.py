"""The contract of a store of quotas, and its implementation in memory.

A *reservation* contains what a request may use of its tenant's quota (`draftgate.policies.quotas`).
The store has the clock. A reservation that its gateway does not renew expires, and is then charged
in full, because the request may have used its tokens. Every store passes the tests in
`tests/gateway/quota_contract.py`.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection
from typing import Protocol

from draftgate.gateway.state.expiries import Expiries
from draftgate.policies.quotas import (
    Levels,
    QuotaLedger,
    QuotaReservation,
    Settlement,
    Shortage,
    Totals,
)


class QuotaStore(Protocol):
    """The quotas of tenants, shared by the gateways of a pool.

    Raises:
        StoreError: from any method of a remote store (`GuardedQuotas` handles it).
    """

    async def reserve(self, reservation: QuotaReservation, ttl_s: float) -> Shortage | None:
        """Reserve what a request may use, or reserve nothing, in one atomic step.

        The reservation ends at `settle`, or after `ttl_s` seconds. A repeated call extends it.

        Returns:
            None if the request fits, otherwise the shortage with the longest wait.
        """
        ...

    async def renew(self, reservations: Collection[QuotaReservation], ttl_s: float) -> int:
        """Extend reservations to `ttl_s` seconds from now.

        The store restores a reservation that it does not know, even beyond the quota. Such a
        reservation exists, but the store has lost it, or did not respond when it was made.
        Therefore pass all open reservations.

        Returns:
            The number of gateways that have called this method recently, including this gateway.
            They share the quotas.
        """
        ...

    async def settle(self, settlements: Collection[Settlement]) -> None:
        """End reservations, charge what their requests have used, and release the rest.

        Unknown requests are ignored.
        """
        ...

    async def totals(self, tenant: str) -> Totals:
        """Return the totals of a tenant, which are zero for an unknown tenant."""
        ...

    async def levels(self, tenant: str) -> Levels:
        """Return what a tenant uses now."""
        ...


class MemoryQuotas:
    """A `QuotaStore` in this process, which is the reference for every other implementation.

    Its calls never suspend.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._ledger = QuotaLedger()
        self._expiries = Expiries()

    async def reserve(self, reservation: QuotaReservation, ttl_s: float) -> Shortage | None:
        """Reserve what a request may use, as `QuotaStore.reserve` describes."""
        now_s = self._prune()
        shortage = self._ledger.reserve(reservation, now_s)
        if shortage is None:
            self._expiries.put(reservation.request_id, now_s + ttl_s)
        return shortage

    async def renew(self, reservations: Collection[QuotaReservation], ttl_s: float) -> int:
        """Extend reservations, as `QuotaStore.renew` describes."""
        now_s = self._prune()
        for reservation in reservations:
            self._ledger.restore(reservation, now_s)
            self._expiries.put(reservation.request_id, now_s + ttl_s)
        return 1

    async def settle(self, settlements: Collection[Settlement]) -> None:
        """End reservations, as `QuotaStore.settle` describes."""
        now_s = self._prune()
        for used in settlements:
            self._ledger.settle(used, now_s)
            self._expiries.drop(used.request_id)

    async def totals(self, tenant: str) -> Totals:
        """Return the totals of a tenant, as `QuotaStore.totals` describes."""
        self._prune()
        return self._ledger.totals(tenant)

    async def levels(self, tenant: str) -> Levels:
        """Return what a tenant uses now, as `QuotaStore.levels` describes."""
        return self._ledger.levels(tenant, self._prune())

    def _prune(self) -> float:
        """Charge expired reservations in full, and return the time in seconds."""
        now_s = self._clock()
        for request_id in self._expiries.pop_due(now_s):
            self._ledger.charge(request_id, now_s)
        return now_s
