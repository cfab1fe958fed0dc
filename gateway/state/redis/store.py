"""The state store in Redis, with one script and one round trip for each call.

docs/guide/cluster.md describes the keys.
"""

from __future__ import annotations

import asyncio
from collections.abc import Collection, Sequence
from typing import Final

import msgspec

from draftgate.gateway.state.exchange import News, Update
from draftgate.gateway.state.redis.client import Connected, open_client
from draftgate.gateway.state.redis.exchange import news_of, update_arguments
from draftgate.gateway.state.redis.flows import RedisFlows
from draftgate.gateway.state.redis.quotas import RedisQuotas, reservation_arguments, shortage_in
from draftgate.gateway.state.redis.scripts import Scripts
from draftgate.gateway.state.store import (
    FORGET_S,
    GATEWAY_S,
    STALE_S,
    Lease,
    LeaseCandidate,
    Refusal,
    Reservation,
    Snapshot,
    WorkerReport,
    WorkerView,
)
from draftgate.policies.quotas import QuotaReservation

_SCRIPTS: Final = (
    *("report", "withdraw", "snapshot", "claim_worker", "renew", "release"),
    *("begin_move", "end_move", "exchange"),
)
WARM_CONNECTIONS: Final = 16
"""Connections of a node that starts.

Each connection serves a call at a time, so they serve 16 calls per round trip. (Chosen, not tuned,
2026-11-28.)"""

_VIEW_FIELDS: Final = 5
_REPORT: Final = msgspec.json.Decoder(WorkerReport)


class RedisStore:
    """A `Store` in Redis.

    Attributes:
        quotas: the quotas of tenants.
        flows: the flows of tenants.
    """

    outage = None

    def __init__(self, connected: Connected, pool: str, node_id: str, clock: str = "") -> None:
        """Use a client, which is closed with this store.

        Args:
            pool: name of the pool, which is part of the prefix of all keys.
            node_id: the id of this node among the nodes that renew leases.
            clock: Lua source that replaces `lua/clock.lua`.
        """
        self.quotas = RedisQuotas(connected, pool, node_id, clock)
        self.flows = RedisFlows(connected, pool, clock)
        self._node_id = node_id
        self._granted = self._reported = 0  # leases, in total and before the last renewal
        constants = f"local FORGET_MS = {round(FORGET_S * 1000)}"
        leases = ("pool", "leases")
        self._scripts = Scripts(
            *(connected, pool, _SCRIPTS, leases), clock=clock, constants=constants
        )
        self._reserving = Scripts(
            *(connected, pool, ("reserve",), (*leases, "quotas")), clock=clock, constants=constants
        )

    @classmethod
    def at(cls, address: str, pool: str, node_id: str) -> RedisStore:
        """Return the store of a pool at an address (`gateway.state.redis.url`).

        Raises:
            ValueError: the address is invalid.
        """
        return cls(open_client(address), pool, node_id)

    async def warm_up(self) -> None:
        """Load all scripts into the server, and open connections for the first burst of calls.

        Raises:
            StoreError: the server does not respond.
        """
        for scripts in (self._scripts, self._reserving, self.quotas.scripts, self.flows.scripts):
            await scripts.load()
        await asyncio.gather(*(self.quotas.totals("") for _ in range(WARM_CONNECTIONS)))

    async def publish(self, report: WorkerReport) -> bool:
        """Replace a worker's report, as `Store.publish` describes."""
        head = (report.worker_id, report.epoch, report.seq)
        body = msgspec.json.encode(report)
        found = await self._scripts.run(
            "report", (*head, report.capacity_tokens, report.watermark, body)
        )
        return bool(found)

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        """Remove a worker from the pool, as `Store.withdraw` describes."""
        await self._scripts.run("withdraw", (worker_id, epoch, seq))

    async def snapshot(self) -> Snapshot:
        """Return the live workers, as `Store.snapshot` describes.

        Reports that this version cannot read are omitted.
        """
        args = (_us(FORGET_S), _us(STALE_S), _us(GATEWAY_S), self._node_id)
        nodes, gateways, *fields = await self._scripts.run("snapshot", args)
        rows = zip(*[iter(fields)] * _VIEW_FIELDS, strict=True)
        views = (_view(*row) for row in rows)
        found = sorted(filter(None, views), key=lambda view: view.worker_id)
        return Snapshot(tuple(found), gateways, nodes=max(1, nodes))

    async def reserve(
        self,
        request_id: str,
        tokens: int,
        offers: Sequence[LeaseCandidate],
        ttl_s: float,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        """Lease tokens of an offered worker, as `Store.reserve` describes."""
        args: list[object] = [request_id, tokens, _us(ttl_s), _us(STALE_S), len(offers)]
        for offer in offers:
            args += (offer.worker_id, offer.epoch, offer.watermark)
            args += (float(offer.score), float(offer.score_per_token))
        if quota is not None:
            args += reservation_arguments(quota)
        outcome, *rest = await self._reserving.run("reserve", args)
        if outcome == "short" and quota is not None:
            return Reservation(None, shortage=shortage_in(quota, rest))
        if outcome == "refused":
            return Reservation(None, Refusal(rest[0]))
        index, number, behind_tokens = rest
        self._granted += 1
        chosen = offers[index]
        lease = Lease(request_id, chosen.worker_id, chosen.epoch, tokens, number)
        return Reservation(lease, behind_tokens=behind_tokens)

    async def claim(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Lease | None:
        """Claim the next room of an offered worker, as `Store.claim` describes."""
        args: list[object] = [request_id, tokens, _us(ttl_s), _us(STALE_S)]
        for offer in offers:
            args += (offer.worker_id, offer.epoch)
        found = await self._scripts.run("claim_worker", args)
        if found is None:
            return None
        index, number = found
        claimed = offers[index]
        return Lease(request_id, claimed.worker_id, claimed.epoch, tokens, number)

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Extend leases, as `Store.renew` describes."""
        granted = self._granted
        is_gateway = bool(leases) or granted > self._reported
        args: list[object] = [self._node_id, _us(ttl_s), int(is_gateway)]
        for lease in leases:
            args += (lease.request_id, lease.worker_id, lease.epoch, lease.tokens, lease.number)
        fenced = frozenset(await self._scripts.run("renew", args))
        self._reported = granted
        return fenced

    async def release(self, request_ids: Collection[str]) -> None:
        """End the leases and claims of requests, as `Store.release` describes."""
        if request_ids:
            await self._scripts.run("release", request_ids)

    async def begin_move(self, move_id: str, worker_ids: Sequence[str], ttl_s: float) -> bool:
        """Take the move slots of workers, as `Store.begin_move` describes."""
        args = (move_id, _us(ttl_s), *worker_ids)
        return bool(await self._scripts.run("begin_move", args))

    async def end_move(self, move_id: str, worker_ids: Sequence[str]) -> None:
        """Free the move slots of workers, as `Store.end_move` describes."""
        await self._scripts.run("end_move", (move_id, *worker_ids))

    async def exchange(self, update: Update) -> News:
        """Tell the other gateways, as `Store.exchange` describes."""
        return news_of(await self._scripts.run("exchange", update_arguments(update)))

    async def close(self) -> None:
        """Close all connections."""
        await self._scripts.close()


def _view(report: str, age_us: int, *tokens: int) -> WorkerView | None:
    try:
        return WorkerView(_REPORT.decode(report), age_us / 1e6, *tokens)
    except msgspec.MsgspecError:
        return None


def _us(seconds: float) -> int:
    return round(seconds * 1e6)
