"""A store that wraps a remote store and always responds in time.

The wrapper keeps a *mirror* with the latest reports and the leases of this gateway. The mirror
responds while the remote store does not, and marks its results as `degraded`. Reports then grow
old, and this gateway uses only its share of the capacity of workers that others also reach. This
gateway renews its leases in the remote store after an outage, and releases ended leases there.
"""

from __future__ import annotations

import asyncio
import math
import random
import secrets
import time
from collections.abc import Callable, Collection, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from itertools import islice
from typing import Final

from draftgate.gateway.state.exchange import News, Update
from draftgate.gateway.state.guarded.calls import (
    DEADLINE_S,
    PATIENCE,
    QUOTA_DEADLINE_S,
    GuardedCalls,
)
from draftgate.gateway.state.guarded.flows import GuardedFlows
from draftgate.gateway.state.guarded.quotas import GuardedQuotas
from draftgate.gateway.state.local.store import SCHEME, LocalStore, socket_path
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.state.store import (
    FORGET_S,
    STALE_S,
    Lease,
    LeaseCandidate,
    Refusal,
    Reservation,
    Snapshot,
    Store,
    StoreError,
    WorkerReport,
    WorkerView,
)
from draftgate.policies.quotas import QuotaReservation, Shortage
from draftgate.policies.resilience.breaker import Patience

AT_ONCE: Final = 200
"""Leases per call of renew or release.

Such a call takes 1.0 ms, or 2.6 ms if the store has lost the leases. That is an eighth of the
deadline (Redis 6.2 on the same machine, AMD Zen 5, 2026-11-22)."""

_FORGETFUL: Final = frozenset({Refusal.UNKNOWN, Refusal.STALE})
"""Refusals of a store that has just started or was unavailable.

Workers report again within a heartbeat, and the mirror has more data until then."""


class GuardedStore:
    """A `Store` that never raises `StoreError`.

    Attributes:
        quotas: the quotas of tenants.
        flows: the flows of tenants.
    """

    def __init__(
        self,
        remote: Store,
        *,
        clock: Callable[[], float] = time.monotonic,
        uniform: Callable[[], float] = random.random,
        patience: Patience = PATIENCE,
        deadline_s: float = DEADLINE_S,
        quota_deadline_s: float = QUOTA_DEADLINE_S,
    ) -> None:
        """Wrap a store, which is closed together with this store.

        Args:
            clock: a monotonic clock, in seconds.
            uniform: a function that draws from [0, 1), for jitter.
            patience: the limits of the circuit breaker.
            deadline_s: deadline of a call, in seconds.
            quota_deadline_s: deadline of a call that reserves, renews or settles quotas.
        """
        self._remote = remote
        self._clock = clock
        self._mirror = MemoryStore(clock, stale_s=math.inf)
        self._ttl_s = FORGET_S
        self._pending: dict[str, float] = {}
        self._sending: asyncio.Task[None] | None = None
        self._calls = GuardedCalls(
            self._probe,
            self._restore_leases,
            purpose="leases",
            clock=clock,
            uniform=uniform,
            patience=patience,
            deadline_s=deadline_s,
        )
        self.quotas = GuardedQuotas(
            remote.quotas,
            clock=clock,
            uniform=uniform,
            patience=patience,
            deadline_s=max(deadline_s, quota_deadline_s),
        )
        self.flows = GuardedFlows(remote.flows, self._calls, clock)

    @property
    def outage(self) -> str | None:
        """The reason why the remote store is not used, or None while it works."""
        return self._calls.outage

    async def warm_up(self) -> None:
        """Connect to the remote store, as `Store.warm_up` describes, unless it is unavailable."""
        with suppress(StoreError):
            await self._remote.warm_up()

    async def publish(self, report: WorkerReport) -> bool:
        """Replace a worker's report, as `Store.publish` describes."""
        # A worker that the mirror knows is listed at once, so the remote store must know it first.
        try:
            counts = await self._calls.run(partial(self._remote.publish, report))
        except StoreError:
            return await self._mirror.publish(report)
        await self._mirror.publish(report)
        return counts

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        """Remove a worker from the pool, as `Store.withdraw` describes."""
        await self._mirror.withdraw(worker_id, epoch, seq)
        try:
            await self._calls.run(partial(self._remote.withdraw, worker_id, epoch, seq))
        except StoreError:
            return

    async def snapshot(self) -> Snapshot:
        """Return the live workers, as `Store.snapshot` describes.

        Workers that the remote store has lost remain listed for `STALE_S`.
        """
        try:
            found = await self._calls.run(self._remote.snapshot)
        except StoreError:
            return replace(await self._mirror.snapshot(), degraded=True)
        for view in found.workers:
            self._mirror.add_report(view.report, view.age_s)
        self._mirror.gateways = found.gateways
        missing = await self._missing_from(found)
        workers = sorted((*found.workers, *missing), key=lambda view: view.worker_id)
        return replace(found, workers=tuple(workers))

    async def reserve(
        self,
        request_id: str,
        tokens: int,
        offers: Sequence[LeaseCandidate],
        ttl_s: float,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        """Lease tokens of an offered worker, as `Store.reserve` describes."""
        self._pending.pop(request_id, None)
        self._mirror.end_lease(request_id)
        call = partial(self._remote.reserve, request_id, tokens, offers, ttl_s, quota)
        when_late = partial(self._schedule_release, (request_id,))
        try:
            if quota is None:
                found = await self._calls.run(call, when_late)
            else:
                found = await self.quotas.reserve_by(quota, call, _shortage_in, when_late)
        except StoreError:
            found = None
            shortage = None if quota is None else self.quotas.reserve_alone(quota)
            if shortage is not None:
                return Reservation(None, degraded=True, shortage=shortage)
        if found is None or found.refusal in _FORGETFUL:
            local = await self._mirror.reserve(request_id, tokens, offers, ttl_s)
            return replace(local, degraded=True)
        if found.lease is not None:
            await self._mirror.renew((found.lease,), ttl_s)
        return found

    async def claim(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Lease | None:
        """Claim the next room of an offered worker, as `Store.claim` describes."""
        self._pending.pop(request_id, None)
        call = partial(self._remote.claim, request_id, tokens, offers, ttl_s)
        try:
            found = await self._calls.run(call, partial(self._schedule_release, (request_id,)))
        except StoreError:
            found = None
        # The mirror decides alone if the remote store is unavailable or does not know the workers.
        chosen = [one for one in offers if found is None or one.worker_id == found.worker_id]
        local = await self._mirror.claim(request_id, tokens, chosen, ttl_s)
        return local if found is None else found

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Extend leases, as `Store.renew` describes."""
        self._ttl_s = ttl_s
        await self._mirror.renew(leases, ttl_s)
        try:
            fenced = await self._renew_remotely(tuple(leases))
        except StoreError:
            return frozenset()
        await self._mirror.release(fenced)
        return fenced

    async def release(self, request_ids: Collection[str]) -> None:
        """End the leases and claims of requests, as `Store.release` describes.

        A background task sends releases in batches, and repeats them after a failure.
        """
        await self._mirror.release(request_ids)
        self._schedule_release(request_ids)

    async def begin_move(self, move_id: str, worker_ids: Sequence[str], ttl_s: float) -> bool:
        """Take the move slots of workers, as `Store.begin_move` describes.

        Slots that a call takes after its deadline end after `ttl_s`.
        """
        call = partial(self._remote.begin_move, move_id, worker_ids, ttl_s)
        try:
            return await self._calls.run(call)
        except StoreError:
            return False

    async def end_move(self, move_id: str, worker_ids: Sequence[str]) -> None:
        """Free the move slots of workers, as `Store.end_move` describes."""
        with suppress(StoreError):
            await self._calls.run(partial(self._remote.end_move, move_id, worker_ids))

    async def exchange(self, update: Update) -> News | None:
        """Tell the other gateways, as `Store.exchange` describes."""
        try:
            return await self._calls.run(partial(self._remote.exchange, update))
        except StoreError:
            return None

    async def close(self) -> None:
        """Close all connections.

        Pending releases are sent first, if the remote store responds.
        """
        self._start_releases()
        if self._sending is not None:
            await self._sending
        await self.quotas.close()
        await self._calls.close()
        await self._remote.close()

    async def _renew_remotely(self, leases: Sequence[Lease]) -> frozenset[str]:
        """Renew leases in the remote store, in calls that are short enough for the deadline.

        Raises:
            StoreError: some leases were not renewed.
        """
        fenced = set[str]()
        for begin in range(0, max(1, len(leases)), AT_ONCE):
            some = leases[begin : begin + AT_ONCE]
            held = partial(self._schedule_release, [lease.request_id for lease in some])
            fenced |= await self._calls.run(partial(self._remote.renew, some, self._ttl_s), held)
            held()
        return frozenset(fenced)

    async def _missing_from(self, found: Snapshot) -> list[WorkerView]:
        """Return workers that have reported recently but are missing from a snapshot."""
        present = {view.worker_id for view in found.workers}
        mirrored = await self._mirror.snapshot()
        return [
            view
            for view in mirrored.workers
            if view.worker_id not in present and view.age_s < STALE_S
        ]

    def _schedule_release(self, request_ids: Collection[str]) -> None:
        """Schedule the release of requests that hold no lease or claim in the mirror."""
        now_s = self._clock()
        for request_id in request_ids:
            if not self._mirror.holds(request_id):
                self._pending.pop(request_id, None)  # insert again, to keep the order by time
                self._pending[request_id] = now_s + self._ttl_s
        while self._pending and next(iter(self._pending.values())) <= now_s:
            del self._pending[next(iter(self._pending))]  # the lease has expired
        self._start_releases()

    def _start_releases(self) -> None:
        if self._pending and self._sending is None and self.outage is None:
            self._sending = asyncio.create_task(self._send_releases())

    async def _send_releases(self) -> None:
        """Release all pending requests in batches, until a call fails."""
        try:
            while self._pending:
                await self._calls.run(self._release_batch)
        except StoreError:
            return
        finally:
            self._sending = None

    async def _release_batch(self) -> None:
        batch = dict(islice(self._pending.items(), AT_ONCE))
        await self._remote.release(tuple(batch))
        for request_id, until_s in batch.items():
            if self._pending.get(request_id) == until_s:
                del self._pending[request_id]

    async def _probe(self) -> None:
        """Call the remote store with a request that needs a writable server."""
        await self._remote.renew((), self._ttl_s)

    async def _restore_leases(self) -> None:
        """Update the remote store with the leases of this gateway."""
        self._start_releases()
        with suppress(StoreError):  # the next renewal tries again
            await self._renew_remotely(self._mirror.leases())


def _shortage_in(found: Reservation) -> Shortage | None:
    return found.shortage


def open_store(join: str | None, pool: str) -> Store:
    """Return the store of a node, which is not connected yet.

    Args:
        join: address of a Redis server (`gateway.state.redis.url`) or of shared stores
            (`gateway.state.local`), or None without a pool.
        pool: name of the pool on that server.

    Raises:
        ValueError: the address is invalid.
    """
    if join is None:
        return MemoryStore()
    if join.startswith(SCHEME):
        return LocalStore(socket_path(join))
    from draftgate.gateway.state.redis.store import RedisStore

    return GuardedStore(RedisStore.at(join, pool, f"g-{secrets.token_hex(4)}"))
