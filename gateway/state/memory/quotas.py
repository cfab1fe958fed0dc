"""The quotas of tenants in memory."""

from __future__ import annotations

import time
from collections.abc import Callable

from draftgate.gateway.state.commands import (
    ReadLevels,
    ReadTotals,
    RenewQuotas,
    ReserveQuota,
    SettleQuotas,
)
from draftgate.gateway.state.expiries import Expiries
from draftgate.gateway.state.store import InMemory
from draftgate.policies.quotas import (
    Levels,
    QuotaLedger,
    Shortage,
    Totals,
)


class MemoryQuotas(InMemory):
    """Quotas in this process, which are the reference for every other implementation."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._clock = clock
        self._ledger = QuotaLedger()
        self._expiries = Expiries()
        self.handlers = {
            ReserveQuota: self.reserve,
            RenewQuotas: self.renew,
            SettleQuotas: self.settle,
            ReadTotals: self.totals,
            ReadLevels: self.levels,
        }

    def reserve(self, command: ReserveQuota) -> Shortage | None:
        """Reserve what a request may use."""
        now_s = self._prune()
        shortage = self._ledger.reserve(command.reservation, now_s)
        if shortage is None:
            self._expiries.put(command.reservation.request_id, now_s + command.ttl_s)
        return shortage

    def renew(self, command: RenewQuotas) -> int:
        """Extend reservations."""
        now_s = self._prune()
        for reservation in command.reservations:
            self._ledger.restore(reservation, now_s)
            self._expiries.put(reservation.request_id, now_s + command.ttl_s)
        return 1

    def settle(self, command: SettleQuotas) -> None:
        """End reservations."""
        now_s = self._prune()
        for used in command.settlements:
            self._ledger.settle(used, now_s)
            self._expiries.drop(used.request_id)

    def totals(self, command: ReadTotals) -> Totals:
        """Return the totals of a tenant."""
        self._prune()
        return self._ledger.totals(command.tenant)

    def levels(self, command: ReadLevels) -> Levels:
        """Return what a tenant uses now."""
        return self._ledger.levels(command.tenant, self._prune())

    def _prune(self) -> float:
        """Charge expired reservations in full, and return the time in seconds."""
        now_s = self._clock()
        for request_id in self._expiries.pop_due(now_s):
            self._ledger.charge(request_id, now_s)
        return now_s
