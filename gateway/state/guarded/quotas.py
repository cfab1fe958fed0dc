"""Quotas that wrap a remote store and always respond in time.

A *mirror* has the reservations of this gateway. While the remote store does not respond, the mirror
decides with an equal share of each quota, and this gateway is *alone*. Once the remote store
responds, it gets the reservations that are still open, and what the others have used.

The calls have a longer deadline than those for leases, and a circuit breaker of their own. A store
that is too slow for leases can therefore still decide about quotas.
"""

from __future__ import annotations

import asyncio
import secrets
from collections.abc import Awaitable, Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from draftgate.gateway.state import commands
from draftgate.gateway.state.commands import StoreCommand, T
from draftgate.gateway.state.guarded.calls import GuardedCalls
from draftgate.gateway.state.guarded.outbox import Outbox
from draftgate.gateway.state.store import StoreError
from draftgate.gateway.state.values import FORGET_S, Reservation
from draftgate.policies.quotas import (
    Limit,
    Quota,
    QuotaLedger,
    QuotaReservation,
    Settlement,
    Shortage,
    Totals,
    release_of,
)
from draftgate.policies.values import replace

_AT_ONCE: Final = 100
"""Reservations per call of renew or settle.

The server needs 1.7 ms for 100 settlements, and 1.6 ms to restore 100 lost reservations. Meanwhile
it answers no call for a lease, whose deadline is twelve times as long. (Redis 7.0 on a busy
machine, AMD EPYC, 2026-11-23.)"""


class GuardedQuotas:
    """Quotas whose commands never raise `StoreError`, except for `ReadLevels`.

    Attributes:
        rules: the functions that execute the commands.
    """

    def __init__(self, calls: GuardedCalls, clock: Callable[[], float]) -> None:
        """Wrap the quotas of a remote store.

        Args:
            clock: a monotonic clock, in seconds.
        """
        self._calls = calls
        calls.on_recovery = self._restore
        self._clock = clock
        self.rules: dict[commands.CommandType, Callable[[Any], Awaitable[Any]]] = {
            commands.ReserveQuota: self._reserve,
            commands.RenewQuotas: self._renew,
            commands.ReadTotals: self._totals,
            commands.ReadLevels: calls.run,
        }
        self._mirror = QuotaLedger()
        self._gateways = 1
        self._ttl_s = FORGET_S
        # Open reservations that the remote store may not know, with the tenants' whole quotas.
        self._alone: dict[str, QuotaReservation] = {}
        # What ended reservations of that kind have used, and what the remote store gets for them.
        self._used_alone = QuotaLedger()
        self._quotas: dict[str, Quota] = {}
        self._debts: dict[str, QuotaReservation] = {}
        self._pending = Outbox(calls, commands.SettleQuotas, _AT_ONCE, clock)

    @property
    def outage(self) -> str | None:
        """The reason why this gateway decides alone, or None while the remote store decides."""
        return self._calls.outage

    async def _reserve(self, command: commands.ReserveQuota) -> Shortage | None:
        try:
            return await self.reserve_by(command, command.reservation)
        except StoreError:
            return self.reserve_alone(command.reservation)

    async def reserve_by(
        self,
        command: StoreCommand[T],
        reservation: QuotaReservation,
        when_late: Callable[[], None] = lambda: None,
    ) -> T:
        """Return the result of a command that reserves what a request may use.

        Args:
            when_late: a callback for a call that succeeds after its deadline.

        Raises:
            StoreError: the remote store did not respond. `reserve_alone` must follow.
        """
        now_s = self._clock()

        def on_late() -> None:
            self._end_if_ended(reservation)
            when_late()

        try:
            found = await self._calls.run(command, on_late)
        except asyncio.CancelledError:
            self._schedule(release_of(reservation.request_id))
            raise
        shortage = found.shortage if isinstance(found, Reservation) else found
        if shortage is None:
            self._mirror.restore(reservation, now_s)
        return found

    def reserve_alone(self, reservation: QuotaReservation) -> Shortage | None:
        """Reserve from this gateway's share of the quota."""
        quota = reservation.quota.share(self._gateways, reservation.tokens)
        share = replace(reservation, quota=quota)
        shortage = self._mirror.reserve(share, self._clock())
        if shortage is None:
            self._alone[reservation.request_id] = reservation
        return shortage

    async def _renew(self, command: commands.RenewQuotas) -> int:
        self._ttl_s = command.ttl_s
        # A renewal would restore a reservation that is settled at the same time.
        async with self._pending.writing:
            open_ = [one for one in command.reservations if self._is_open(one)]
            if self._calls.outage is None:
                self._take_debts()
            with suppress(StoreError):
                await self._renew_remotely([*open_, *self._debts.values()])
        self._pending.start()
        return self._gateways

    def settle(self, command: commands.SettleQuotas) -> None:
        """End reservations.

        A background task sends settlements in batches, and repeats them after a failure.
        """
        now_s = self._clock()
        for used in command.settlements:
            reservation = self._mirror.settle(used, now_s)
            if reservation is None:
                continue
            alone = self._alone.pop(used.request_id, None)
            if alone is None:
                self._schedule(used)
            else:
                self._owe(alone, used)
                self._schedule(release_of(used.request_id))  # a lost response may have granted it

    async def _totals(self, command: commands.ReadTotals) -> Totals:
        """Return the totals of this gateway's requests, with reservations that it restored."""
        return self._mirror.totals(command.tenant)

    async def close(self) -> None:
        """Send the pending settlements, if the remote store responds."""
        await self._pending.close()
        await self._calls.close()

    async def _restore(self) -> None:
        """Charge the remote store with what this gateway granted alone, and settle the rest."""
        with suppress(StoreError):  # the next renewal tries again
            async with self._pending.writing:
                self._take_debts()
                await self._renew_remotely([*self._alone.values(), *self._debts.values()])
        self._pending.start()

    def _is_open(self, reservation: QuotaReservation) -> bool:
        return self._mirror.holds(reservation.request_id)

    def _owe(self, reservation: QuotaReservation, used: Settlement) -> None:
        """Note what a reservation has used that the remote store may not know."""
        quota = reservation.quota.share(self._gateways, used.tokens)
        charge = QuotaReservation(
            used.request_id, reservation.tenant, used.tokens, quota, used.requests
        )
        self._used_alone.restore(charge, self._clock())
        self._used_alone.charge(used.request_id, self._clock())
        self._quotas[reservation.tenant] = reservation.quota

    def _take_debts(self) -> None:
        """Make one reservation for what the reservations of each tenant have used and still use."""
        for tenant, used in self._used_alone.usage(self._clock()):
            if not any(used.values()):
                continue
            amounts = used.get(Limit.TOKENS, 0), self._quotas[tenant], used.get(Limit.REQUESTS, 0)
            debt = QuotaReservation(f"debt-{secrets.token_hex(8)}", tenant, *amounts)
            self._debts[debt.request_id] = debt
        self._used_alone = QuotaLedger()
        self._quotas.clear()

    async def _renew_remotely(self, reservations: Sequence[QuotaReservation]) -> None:
        """Renew reservations in the remote store, in calls that are short enough for the deadline.

        Raises:
            StoreError: some reservations were not renewed.
        """
        for begin in range(0, max(1, len(reservations)), _AT_ONCE):
            some = tuple(reservations[begin : begin + _AT_ONCE])
            known = partial(self._on_known, some)
            self._gateways = await self._calls.run(commands.RenewQuotas(some, self._ttl_s), known)
            known()

    def _on_known(self, reservations: Sequence[QuotaReservation]) -> None:
        """Note that the remote store knows some reservations, which may have ended meanwhile."""
        for reservation in reservations:
            request_id = reservation.request_id
            if self._debts.pop(request_id, None) is not None:
                self._schedule(Settlement(request_id, reservation.tokens, reservation.requests))
            elif self._is_open(reservation):
                self._alone.pop(request_id, None)
            else:
                self._end_if_ended(reservation)

    def _end_if_ended(self, reservation: QuotaReservation) -> None:
        """End a reservation that the remote store may have got after the end of its request.

        A pending settlement is sent again, because the store may have ignored it before.
        """
        if not self._is_open(reservation):
            request_id = reservation.request_id
            used = self._pending.get(request_id, release_of(request_id))
            self._schedule(used)

    def _schedule(self, used: Settlement) -> None:
        self._pending.put(used.request_id, used, self._ttl_s)
