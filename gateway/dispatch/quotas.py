"""The quotas of tenants for a model, and the reservations of this node's requests on them.

A quota holds for each model separately, as the rate limits of hosted APIs do.

A request that need not wait reserves its quota in the same call of the store as its lease. Any
other request reserves its quota before it waits, in a call of its own.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping

from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.gateway.state.commands import ReadLevels, RenewQuotas, ReserveQuota, SettleQuotas
from draftgate.gateway.state.guarded.calls import DEADLINE_S
from draftgate.gateway.state.store import Store, StoreError
from draftgate.policies.quotas import (
    Limit,
    Quota,
    QuotaLevel,
    QuotaReservation,
    Settlement,
    Shortage,
    release_of,
)


class Quotas:
    """The quotas of tenants, which hold for all nodes that share the store.

    Attributes:
        limited: the quotas by tenant.
    """

    def __init__(
        self,
        store: Store,
        quotas: Mapping[str, Quota],
        now_s: Callable[[], float],
        model: Callable[[], str] = lambda: "",
    ) -> None:
        """Start without reservations.

        Args:
            quotas: quotas by tenant. Other tenants have no quota.
            now_s: a monotonic clock, in seconds.
            model: a function that returns the name of the model in the pool.
        """
        self._store = store
        self._memory = store.memory
        self._now_s = now_s
        self._model = model
        self._held: dict[str, QuotaReservation] = {}
        self._short_until_s: dict[str, float] = {}  # by tenant
        self.change(quotas)

    @property
    def open(self) -> int:
        """Number of requests that have reserved a part of a quota."""
        return len(self._held)

    def needed(self, tenant: str, request_id: str, tokens: int) -> QuotaReservation | None:
        """Return what a request reserves, or None for a tenant without a quota.

        Args:
            tokens: the maximum number of tokens of the request.
        """
        quota = self.limited.get(tenant)
        if quota is None:
            return None
        return QuotaReservation(request_id, quota_account(tenant, self._model()), tokens, quota)

    def is_short(self, tenant: str) -> bool:
        """Return whether a tenant's quota was too small a moment ago, and may still be."""
        return self._now_s() < self._short_until_s.get(quota_account(tenant, self._model()), 0.0)

    async def reserve(self, reservation: QuotaReservation) -> Shortage | None:
        """Reserve what a request may use, or reserve nothing.

        Returns:
            None if the request fits, otherwise the shortage with the longest wait.
        """
        shortage = await self._store.call(ReserveQuota(reservation, LEASE_S))
        return self.record(reservation, shortage)

    @property
    def are_local(self) -> bool:
        """Whether the store is in memory, so that no call of it has to wait."""
        return self._memory is not None

    def reserve_at_once(self, reservation: QuotaReservation) -> Shortage | None:
        """Reserve as `reserve` does, if the quotas `are_local`."""
        assert self._memory is not None
        return self.record(reservation, self._memory.apply(ReserveQuota(reservation, LEASE_S)))

    def record(self, reservation: QuotaReservation, shortage: Shortage | None) -> Shortage | None:
        """Record the result of a call that made a reservation, and return the result."""
        account = reservation.tenant
        if shortage is None:
            self._held[reservation.request_id] = reservation
            self._short_until_s.pop(account, None)
        elif shortage.retry_after_s is not None:
            self._short_until_s[account] = self._now_s() + shortage.retry_after_s
        return shortage

    def levels_at_once(self, tenant: str) -> dict[Limit, QuotaLevel] | None:
        """Return what `levels` returns, or None if the store has to be awaited."""
        quota, memory = self.limited.get(tenant), self._memory
        if quota is None:
            return {}
        if memory is None:
            return None
        return memory.apply(ReadLevels(quota_account(tenant, self._model()))).of(quota)

    async def levels(self, tenant: str) -> dict[Limit, QuotaLevel]:
        """Return the state of each limit of a tenant.

        It is empty without a quota, and while the store does not answer within `DEADLINE_S`.
        """
        levels = self.levels_at_once(tenant)
        if levels is not None:
            return levels
        quota, command = self.limited[tenant], ReadLevels(quota_account(tenant, self._model()))
        try:
            async with asyncio.timeout(DEADLINE_S):
                return (await self._store.call(command)).of(quota)
        except (StoreError, TimeoutError):
            return {}

    def settle(self, request_id: str, used_tokens: int) -> None:
        """Charge the tokens that a request used, and release the rest."""
        if self._held.pop(request_id, None) is not None:
            self._store.post(SettleQuotas((Settlement(request_id, used_tokens),)))

    def release(self, request_id: str) -> None:
        """Undo a reservation, so that the request does not count against any limit."""
        if self._held.pop(request_id, None) is not None:
            self._store.post(SettleQuotas((release_of(request_id),)))

    async def renew(self) -> None:
        """Renew the reservations of all open requests.

        The call counts this node among those that share the quotas, even without reservations.
        """
        if self._held or self.limited:
            await self._store.call(RenewQuotas(tuple(self._held.values()), LEASE_S))

    def change(self, quotas: Mapping[str, Quota]) -> None:
        """Replace all quotas.

        What a tenant has used of a limit counts against its new limit, which applies from the
        tenant's next request on.
        """
        self.limited = {tenant: quota for tenant, quota in quotas.items() if quota.is_limited}
        self._short_until_s.clear()


def quota_account(tenant: str, model: str) -> str:
    """Return the name under which the store keeps what a tenant has used of a model.

    The length keeps names unique, because both parts may contain any character.
    """
    return f"{len(model)}:{model}{tenant}"
