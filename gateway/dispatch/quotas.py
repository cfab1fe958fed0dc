"""The quotas of tenants, and the reservations of this node's requests on them."""

from __future__ import annotations

from collections.abc import Mapping

from draftgate.gateway.dispatch.leases import LEASE_S
from draftgate.gateway.state.quota_store import QuotaStore
from draftgate.policies.quotas import (
    UNLIMITED,
    Quota,
    QuotaReservation,
    Settlement,
    Shortage,
    release_of,
)


class Quotas:
    """The quotas of tenants, which hold for all nodes that share the store."""

    def __init__(self, store: QuotaStore, quotas: Mapping[str, Quota]) -> None:
        """Start without reservations.

        Args:
            quotas: quotas by tenant. Other tenants have no quota.
        """
        self._store = store
        self._quotas = quotas
        self._held: dict[str, QuotaReservation] = {}

    @property
    def open(self) -> int:
        """Number of requests that have reserved a part of a limited quota."""
        return sum(reservation.quota.is_limited for reservation in self._held.values())

    async def reserve(self, tenant: str, request_id: str, tokens: int) -> Shortage | None:
        """Reserve a request and its maximum number of tokens, or reserve nothing.

        Returns:
            None if the request fits, otherwise the shortage with the longest wait.
        """
        reservation = QuotaReservation(
            request_id, tenant, tokens, self._quotas.get(tenant, UNLIMITED)
        )
        shortage = await self._store.reserve(reservation, LEASE_S)
        if shortage is None:
            self._held[request_id] = reservation
        return shortage

    async def settle(self, request_id: str, used_tokens: int) -> None:
        """Charge the tokens that a request used, and release the rest."""
        await self._end(Settlement(request_id, used_tokens))

    async def release(self, request_id: str) -> None:
        """Undo a reservation, so that the quota of requests ignores the request, too."""
        await self._end(release_of(request_id))

    async def renew(self) -> None:
        """Renew the reservations of all open requests."""
        await self._store.renew(tuple(self._held.values()), LEASE_S)

    def change(self, quotas: Mapping[str, Quota]) -> None:
        """Replace all quotas.

        What a tenant has used of a limit counts against its new limit, which applies from the
        tenant's next request on.
        """
        self._quotas = quotas

    async def _end(self, used: Settlement) -> None:
        self._held.pop(used.request_id, None)
        await self._store.settle((used,))
