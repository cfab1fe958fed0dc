"""The quotas of tenants in Redis, which the gateways of a pool share.

docs/guide/cluster.md describes the keys.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Final

from draftgate.gateway.state.redis.client import Connected
from draftgate.gateway.state.redis.scripts import Scripts
from draftgate.gateway.state.store import GATEWAY_S
from draftgate.policies.quotas import (
    Levels,
    Limit,
    QuotaReservation,
    Settlement,
    Shortage,
    Totals,
    shortage_of,
)

_SCRIPTS: Final = ("reserve_quota", "renew_quota", "settle_quota", "quota_totals", "quota_levels")
_LIMITS: Final = tuple(Limit)


class RedisQuotas:
    """A `QuotaStore` in Redis, with one script and one round trip for each call.

    Attributes:
        scripts: its scripts.
    """

    def __init__(self, connected: Connected, pool: str, node_id: str, clock: str = "") -> None:
        """Use a client, which the owner of this store closes.

        Args:
            pool: name of the pool, which is part of the prefix of all keys.
            node_id: the id of this node among the nodes with quotas.
            clock: Lua source that replaces `lua/clock.lua`.
        """
        self._node_id = node_id
        self.scripts = Scripts(connected, pool, _SCRIPTS, ("pool", "quotas"), clock=clock)

    async def reserve(self, reservation: QuotaReservation, ttl_s: float) -> Shortage | None:
        """Reserve what a request may use, as `QuotaStore.reserve` describes."""
        args = (round(ttl_s * 1e6), *reservation_arguments(reservation))
        found = await self.scripts.run("reserve_quota", args)
        return shortage_in(reservation, found) if found else None

    async def renew(self, reservations: Collection[QuotaReservation], ttl_s: float) -> int:
        """Extend reservations, as `QuotaStore.renew` describes."""
        args: list[object] = [round(ttl_s * 1e6), round(GATEWAY_S * 1e6), self._node_id]
        for reservation in reservations:
            quota = reservation.quota
            args += _fields(reservation)
            args += (quota.requests_per_minute or 0, quota.tokens_per_minute or 0)
        gateways: int = await self.scripts.run("renew_quota", args)
        return gateways

    async def settle(self, settlements: Collection[Settlement]) -> None:
        """End reservations, as `QuotaStore.settle` describes."""
        if settlements:
            await self.scripts.run("settle_quota", [one for used in settlements for one in used])

    async def totals(self, tenant: str) -> Totals:
        """Return the totals of a tenant, as `QuotaStore.totals` describes."""
        reserved, settled, released = await self.scripts.run("quota_totals", (tenant,))
        return Totals(reserved, settled, released, reserved - settled - released)

    async def levels(self, tenant: str) -> Levels:
        """Return what a tenant uses now, as `QuotaStore.levels` describes."""
        return Levels(*map(int, await self.scripts.run("quota_levels", (tenant,))))


def reservation_arguments(reservation: QuotaReservation) -> list[object]:
    """Return the arguments of `reserve_quota` in `lua/quotas.lua`."""
    limits = reservation.quota.limits()
    args: list[object] = [*_fields(reservation)]
    for limit in _LIMITS:
        args += limits.get(limit, (0, 0))
    return args


def shortage_in(reservation: QuotaReservation, found: Sequence[int]) -> Shortage:
    """Return the shortage that `reserve_quota` in `lua/quotas.lua` has found."""
    index, wait_us = found
    return shortage_of(reservation, _LIMITS[index - 1], None if wait_us < 0 else wait_us)


def _fields(reservation: QuotaReservation) -> tuple[str, str, int, int]:
    return reservation.request_id, reservation.tenant, reservation.requests, reservation.tokens
