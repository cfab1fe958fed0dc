"""A store that wraps a remote store and always responds in time.

The wrapper keeps a *mirror* with the latest reports and the leases of this gateway. The mirror
responds while the remote store does not, and marks its results as `degraded`. Reports then grow
old, and this gateway uses only its share of the capacity of workers that others also reach. This
gateway renews its leases in the remote store after an outage, and releases ended leases there.
"""

from __future__ import annotations

import math
import random
import secrets
import time
from collections.abc import Awaitable, Callable, Collection, Sequence
from contextlib import suppress
from functools import partial
from typing import Any, Final

from draftgate.gateway.state import commands
from draftgate.gateway.state.commands import StoreCommand, T
from draftgate.gateway.state.guarded.calls import (
    DEADLINE_S,
    PATIENCE,
    QUOTA_DEADLINE_S,
    RESPONSE_DEADLINE_S,
    GuardedCalls,
)
from draftgate.gateway.state.guarded.flows import GuardedFlows
from draftgate.gateway.state.guarded.outbox import Outbox
from draftgate.gateway.state.guarded.quotas import GuardedQuotas
from draftgate.gateway.state.local.store import SCHEME, LocalStore, socket_path
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.gateway.state.store import Handlers, RemoteStore, Store, StoreError, fallback
from draftgate.gateway.state.values import (
    FORGET_S,
    STALE_S,
    Lease,
    Refusal,
    Reservation,
    Snapshot,
    WorkerView,
)
from draftgate.policies.resilience.breaker import Patience
from draftgate.policies.values import replace

AT_ONCE: Final = 200
"""Leases per call of renew or release.

Such a call takes 1.0 ms, or 2.6 ms if the store has lost the leases. That is an eighth of the
deadline (Redis 6.2 on the same machine, AMD Zen 5, 2026-11-22)."""

_FORGETFUL: Final = frozenset({Refusal.UNKNOWN, Refusal.STALE})
"""Refusals of a store that has just started or was unavailable.

Workers report again within a heartbeat, and the mirror has more data until then."""


class BoundedStore:
    """A store with deadlines and a circuit breaker around a remote store.

    Commands to which the remote store does not respond have the result `StoreCommand.fallback`, or
    raise StoreError.
    """

    memory = None

    def __init__(self, remote: RemoteStore, calls: GuardedCalls) -> None:
        self._remote = remote
        self._calls = calls

    @property
    def outage(self) -> str | None:
        """The reason why the remote store is not used, or None while it works."""
        return self._calls.outage

    async def warm_up(self) -> None:
        """Connect to the remote store, as `Store.warm_up` describes, unless it is unavailable."""
        with suppress(StoreError):
            await self._remote.warm_up()

    async def call(self, command: StoreCommand[T]) -> T:
        """Return the result of a command, as `Store.call` describes."""
        try:
            return await self._calls.run(command)
        except StoreError as error:
            return fallback(command, error)

    async def close(self) -> None:
        """Close all connections."""
        await self._calls.close()
        await self._remote.close()


class GuardedStore(BoundedStore):
    """A `Store` that raises `StoreError` only for `ReadLevels`.

    Attributes:
        quotas: decides about quotas.
    """

    def __init__(
        self,
        remote: RemoteStore,
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
        calls = partial(GuardedCalls, remote, clock=clock, uniform=uniform, patience=patience)
        # The probes need a writable server.
        super().__init__(
            remote,
            calls(commands.RenewLeases((), FORGET_S), purpose="leases", deadline_s=deadline_s),
        )
        self._calls.on_recovery = self._restore_leases
        self.quotas = GuardedQuotas(
            calls(
                commands.RenewQuotas((), FORGET_S),
                purpose="quotas",
                deadline_s=max(deadline_s, quota_deadline_s),
                takes_turns=True,
            ),
            clock,
        )
        self._mirror = MemoryStore(clock, stale_s=math.inf)
        self._ttl_s = FORGET_S
        self._pending = Outbox(self._calls, commands.ReleaseLeases, AT_ONCE, clock)
        self._posted: Handlers = {
            commands.ReleaseLeases: self._release,
            commands.SettleQuotas: self.quotas.settle,
        }
        self._rules: dict[commands.CommandType, Callable[[Any], Awaitable[Any]]] = {
            commands.PublishReport: self._publish,
            commands.WithdrawWorker: self._withdraw,
            commands.ListWorkers: self._list_workers,
            commands.ReserveLease: self._reserve,
            commands.ClaimWorker: self._claim,
            commands.RenewLeases: self._renew,
            **self.quotas.rules,
            **GuardedFlows(self._calls, clock).rules,
        }

    async def call(self, command: StoreCommand[T]) -> T:
        """Return the result of a command, as `Store.call` describes."""
        result: T
        if (posted := self._posted.get(type(command))) is not None:
            result = posted(command)
        elif (rule := self._rules.get(type(command))) is not None:
            result = await rule(command)
        else:
            result = await super().call(command)
        return result

    def post(self, command: StoreCommand[None]) -> None:
        """Execute a command in the background, as `Store.post` describes."""
        self._posted[type(command)](command)

    async def close(self) -> None:
        """Close all connections.

        Pending releases are sent first, if the remote store responds.
        """
        await self._pending.close()
        await self.quotas.close()
        await super().close()

    async def _publish(self, command: commands.PublishReport) -> bool:
        # A worker that the mirror knows is listed at once, so the remote store must know it first.
        try:
            counts = await self._calls.run(command)
        except StoreError:
            return self._mirror.publish(command)
        self._mirror.publish(command)
        return counts

    async def _withdraw(self, command: commands.WithdrawWorker) -> None:
        self._mirror.withdraw(command)
        await super().call(command)

    async def _list_workers(self, command: commands.ListWorkers) -> Snapshot:
        """Return the live workers. Those that the remote store has lost remain for `STALE_S`."""
        try:
            found = await self._calls.run(command)
        except StoreError:
            return replace(self._mirror.list_workers(command), degraded=True)
        for view in found.workers:
            self._mirror.add_report(view.report, view.age_s)
        self._mirror.gateways = found.gateways
        missing = self._missing_from(found)
        workers = sorted((*found.workers, *missing), key=lambda view: view.worker_id)
        return replace(found, workers=tuple(workers))

    async def _reserve(self, command: commands.ReserveLease) -> Reservation:
        request_id, quota = command.request_id, command.quota
        self._pending.drop(request_id)
        self._mirror.end_lease(request_id)
        when_late = partial(self._schedule_release, (request_id,))
        found = None
        try:
            if quota is None:
                found = await self._calls.run(command, when_late)
            else:
                found = await self.quotas.reserve_by(command, quota, when_late)
        except StoreError:
            shortage = None if quota is None else self.quotas.reserve_alone(quota)
            if shortage is not None:
                return Reservation(None, degraded=True, shortage=shortage)
        if found is None or found.refusal in _FORGETFUL:
            local = self._mirror.reserve(replace(command, quota=None))
            return replace(local, degraded=True)
        if found.lease is not None:
            self._mirror.renew(commands.RenewLeases((found.lease,), command.ttl_s))
        return found

    async def _claim(self, command: commands.ClaimWorker) -> Lease | None:
        request_id, offers = command.request_id, command.offers
        self._pending.drop(request_id)
        found = None
        with suppress(StoreError):
            found = await self._calls.run(command, partial(self._schedule_release, (request_id,)))
        # The mirror decides alone if the remote store is unavailable or does not know the workers.
        if found is not None:
            offers = tuple([one for one in offers if one.worker_id == found.worker_id])
        local = self._mirror.claim(replace(command, offers=offers))
        return local if found is None else found

    async def _renew(self, command: commands.RenewLeases) -> frozenset[str]:
        self._ttl_s = command.ttl_s
        self._mirror.renew(command)
        try:
            fenced = await self._renew_remotely(command.leases)
        except StoreError:
            return frozenset()
        self._mirror.release(commands.ReleaseLeases(tuple(fenced)))
        return fenced

    def _release(self, command: commands.ReleaseLeases) -> None:
        """End the leases and claims of requests.

        A background task sends releases in batches, and repeats them after a failure.
        """
        self._mirror.release(command)
        self._schedule_release(command.request_ids)

    async def _renew_remotely(self, leases: Sequence[Lease]) -> frozenset[str]:
        """Renew leases in the remote store, in calls that are short enough for the deadline.

        Raises:
            StoreError: some leases were not renewed.
        """
        fenced = set[str]()
        for begin in range(0, max(1, len(leases)), AT_ONCE):
            some = tuple(leases[begin : begin + AT_ONCE])
            held = partial(self._schedule_release, [lease.request_id for lease in some])
            ended = await self._calls.run(commands.RenewLeases(some, self._ttl_s), held)
            fenced |= ended
            held()
        return frozenset(fenced)

    def _missing_from(self, found: Snapshot) -> list[WorkerView]:
        """Return workers that have reported recently but are missing from a snapshot."""
        present = {view.worker_id for view in found.workers}
        return [
            view
            for view in self._mirror.list_workers(commands.ListWorkers()).workers
            if view.worker_id not in present and view.age_s < STALE_S
        ]

    def _schedule_release(self, request_ids: Collection[str]) -> None:
        """Schedule the release of requests that hold no lease or claim in the mirror."""
        for request_id in request_ids:
            if not self._mirror.holds(request_id):
                self._pending.put(request_id, request_id, self._ttl_s)
        self._pending.start()

    async def _restore_leases(self) -> None:
        """Update the remote store with the leases of this gateway."""
        self._pending.start()
        with suppress(StoreError):  # the next renewal tries again
            await self._renew_remotely(self._mirror.leases())


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


def open_response_store(
    join: str | None, pool: str, capacity_bytes: int, ttl_s: float
) -> RemoteStore:
    """Return the store of a node's responses, which is not connected yet.

    Args:
        join, pool: as for `open_store`.
        capacity_bytes: the bytes of all values together.
        ttl_s: seconds after which a value ends.

    Raises:
        ValueError: the address is invalid.
    """
    if join is None:
        return MemoryResponses(capacity_bytes, ttl_s)
    if join.startswith(SCHEME):
        return guarded_responses(LocalStore(socket_path(join)))
    from draftgate.gateway.state.redis.store import RedisStore

    return guarded_responses(RedisStore.of_responses(join, pool, capacity_bytes, ttl_s))


def guarded_responses(
    remote: RemoteStore,
    clock: Callable[[], float] = time.monotonic,
    uniform: Callable[[], float] = random.random,
) -> BoundedStore:
    """Return a store of responses that wraps a remote store and always responds in time.

    Args:
        clock: a monotonic clock, in seconds.
        uniform: a function that draws from [0, 1), for jitter.
    """
    calls = GuardedCalls(
        remote,
        commands.GetResponse("", ""),
        purpose="responses",
        clock=clock,
        uniform=uniform,
        deadline_s=RESPONSE_DEADLINE_S,
    )
    return BoundedStore(remote, calls)
