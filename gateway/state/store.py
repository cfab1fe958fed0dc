"""The contract of the state store, for reports of workers and leases on their capacity.

The store has the clock, so that callers need not agree on the time. The memory store uses the given
clock, and Redis uses the server's clock. Every store passes the tests in
`tests/gateway/store_contract.py`.

A worker's *epoch* is one life of the worker. A newer epoch ends the leases of older epochs, whose
late reports are dropped. Each lease has an increasing *number*. The *watermark* of a report is the
number of the last lease that its values include. Leases with higher numbers are on their way to the
worker, and are added to the values of the report.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from enum import StrEnum
from typing import Final, Protocol

from draftgate.gateway.state.exchange import News, Update
from draftgate.gateway.state.flow_store import FlowStore
from draftgate.gateway.state.quota_store import QuotaStore
from draftgate.policies.quotas import QuotaReservation, Shortage
from draftgate.policies.values import immutable

STALE_S: Final = 3.0
"""A worker without a report for this time gets no leases, because it missed three heartbeats.

A limit of two heartbeats would sometimes skip a worker whose event loop stalls for a second.
(Chosen, not tuned, 2026-11-22.)"""

GATEWAY_S: Final = 60.0
"""A node counts as a gateway for this time after its last lease.

A node without leases only runs requests of others. The gateways that lease share the capacity and
the quotas during an outage. A gateway whose clients pause still counts. (Chosen, not tuned,
2026-11-27.)"""

FORGET_S: Final = 60.0
"""A worker without a report for this time is forgotten, with its epoch.

The time is also the longest lease, and twice the life of a lease without a renewal."""


@immutable
class WorkerReport:
    """A report that a worker publishes about itself.

    The load is not part of the report, because links to the worker carry it
    (`backends.remote_worker`).

    Attributes:
        epoch: the result of `new_epoch`. Later epochs compare greater as text.
        seq: a number that increases with each report of an epoch. Reports out of order are dropped.
        capacity_tokens: tokens of prompts and outputs that its KV memory holds, or 0 if unknown.
        watermark: number of the last lease whose request had reached the worker, initially 0.
        address: URL at which other nodes reach the worker, or an empty string without access.
        model_id: the name that clients use.
        max_model_len: the longest sequence of prompt and output, in tokens.
    """

    worker_id: str
    epoch: str
    seq: int
    capacity_tokens: int = 0
    watermark: int = 0
    address: str = ""
    model_id: str = ""
    max_model_len: int = 0


@immutable
class WorkerView:
    """A worker as the store knows it.

    Attributes:
        report: the latest report.
        age_s: seconds since the report.
        leased_tokens: tokens of prompt and output in all live leases.
        behind_tokens: tokens in live leases after the report's watermark.
        claimed_tokens: tokens of requests that wait with a claim on the worker.
    """

    report: WorkerReport
    age_s: float
    leased_tokens: int
    behind_tokens: int
    claimed_tokens: int = 0

    @property
    def worker_id(self) -> str:
        """The id of the worker."""
        return self.report.worker_id


@immutable
class Snapshot:
    """All workers of a pool at one time.

    Attributes:
        workers: the workers, sorted by id. The reader decides which are too old.
        gateways: number of nodes that held a lease within `GATEWAY_S`, including this node.
        degraded: whether the store did not respond. The snapshot then has the last known reports
            and only the leases of this gateway.
        nodes: number of nodes of the pool, which renewed within `STALE_S`.
    """

    workers: tuple[WorkerView, ...]
    gateways: int = 1
    degraded: bool = False
    nodes: int = 1


@immutable
class LeaseCandidate:
    """A worker that may get a request, with the score of a routing policy.

    Attributes:
        epoch, watermark: values of the report that determined the score.
        score: cost in the policy's own unit, without leases after the watermark. The lowest cost
            wins. The first offer wins if costs are equal.
        score_per_token: increase of the score for each token leased after the watermark.
    """

    worker_id: str
    epoch: str
    score: float = 0.0
    score_per_token: float = 0.0
    watermark: int = 0


@immutable
class Lease:
    """A claim on a worker's capacity for one request, with all data needed to rebuild it."""

    request_id: str
    worker_id: str
    epoch: str
    tokens: int
    number: int


class Refusal(StrEnum):
    """The reason why no worker was chosen.

    The first reason in this order is reported if the offers have several reasons.
    """

    FULL = "full"
    """The worker has no capacity for these tokens now, or another request has claimed its next
    room, so the request should wait."""
    STALE = "stale"
    """The worker has not reported for `STALE_S`."""
    UNKNOWN = "unknown"
    """The worker has never reported, or the store has lost its data."""
    FENCED = "fenced"
    """The offer names another epoch than the worker's current epoch."""
    GONE = "gone"
    """The worker has left the pool."""


@immutable
class Reservation:
    """The result of `Store.reserve`.

    Attributes:
        lease: the new lease, or None if every offer was refused or the quota is too small.
        refusal: the reason if every offer was refused.
        behind_tokens: tokens leased after the offer's watermark, without this lease.
        degraded: whether this gateway decided alone, because the store did not respond.
        shortage: the quota that is too small for the request, or None.
    """

    lease: Lease | None
    refusal: Refusal | None = None
    behind_tokens: int = 0
    degraded: bool = False
    shortage: Shortage | None = None


class StoreError(Exception):
    """The store did not respond.

    The store may still have executed the call.
    """


class Store(Protocol):
    """State shared by the gateways and workers of a pool.

    Raises:
        StoreError: from any method of a remote store (`GuardedStore` handles it).
    """

    @property
    def outage(self) -> str | None:
        """The reason why the store is not used at present, or None while it works."""
        ...

    @property
    def quotas(self) -> QuotaStore:
        """The quotas of tenants."""
        ...

    @property
    def flows(self) -> FlowStore:
        """The flows of tenants."""
        ...

    async def warm_up(self) -> None:
        """Prepare for the first requests, so that none of them waits for a new connection."""
        ...

    async def publish(self, report: WorkerReport) -> bool:
        """Replace a worker's report, and return False for a late report or an old epoch."""
        ...

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        """Remove a worker from the pool.

        A late call or a call for an old epoch has no effect. The leases of the worker stay until
        they are released, because its streams may still end. A later report of the same epoch adds
        the worker again.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Return every worker that has reported within `FORGET_S`."""
        ...

    async def reserve(
        self,
        request_id: str,
        tokens: int,
        offers: Sequence[LeaseCandidate],
        ttl_s: float,
        quota: QuotaReservation | None = None,
    ) -> Reservation:
        """Lease tokens of one of the offered workers to a request, in one atomic step.

        The store considers live workers of the offered epoch with enough capacity. The lowest value
        of `score + score_per_token * tokens leased after the watermark` wins. A worker has enough
        capacity if all its leases fit into `capacity_tokens`, or if it has no lease yet. A worker
        with claims has capacity only for the request of the first claim.

        Any earlier lease of the request ends, on any worker. The new lease ends at `release`, or
        after `ttl_s` seconds (at most `FORGET_S`). A new lease ends the claim of its request, and a
        refusal does not.

        Args:
            quota: what the store reserves first in the same step, as `QuotaStore.reserve` does. It
                stays reserved even if every offer is refused. If the quota is too small, nothing
                else changes.
        """
        ...

    async def claim(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Lease | None:
        """Claim the next room of one of the offered workers for a request that waits.

        Until the claim ends, the worker grants leases only to the request of its first claim. Its
        leases therefore end one after the other until the claimed tokens fit. Claims are ordered by
        their `number`, which the first call determines. A later call renews the claim.

        The store considers live workers of the offered epoch whose `capacity_tokens` are known and
        can hold the tokens. A claim stays on its worker while the worker is among them. Otherwise
        the claim moves to the worker with the fewest leased and claimed tokens that must end
        first, or to the first of equals. A request with a lease gets no claim.

        The claim ends with a lease of the request, with `release`, or after `ttl_s` seconds.

        Returns:
            The claim in the form of a lease, or None if no offered worker can be claimed.
        """
        ...

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Extend leases to `ttl_s` seconds from now, and count this gateway as live.

        The store adopts a lease that it does not know, or knows differently, even beyond the
        worker's capacity. Such a lease exists, but the store has lost it. Therefore pass all held
        leases, even if none exist.

        Returns:
            The ids of requests whose leases have ended, because the worker has a newer epoch.
        """
        ...

    async def release(self, request_ids: Collection[str]) -> None:
        """End the leases and claims of requests.

        Unknown requests are ignored.
        """
        ...

    async def begin_move(self, move_id: str, worker_ids: Sequence[str], ttl_s: float) -> bool:
        """Take the move slots of workers for a move, all of them or none.

        Each worker has one slot. The move keeps the slots until `end_move`, or for `ttl_s` seconds.

        Returns:
            Whether the move has the slots. False also while the store does not respond.
        """
        ...

    async def end_move(self, move_id: str, worker_ids: Sequence[str]) -> None:
        """Free the slots of workers that a move still has."""
        ...

    async def exchange(self, update: Update) -> News | None:
        """Tell the other gateways what this gateway has learned, and return what they have learned.

        A repeated update has no further effect. Nodes call this method with each heartbeat, so no
        request waits for it.

        Returns:
            The news, or None if the store does not respond.
        """
        ...

    async def close(self) -> None:
        """Close all connections.

        The method is idempotent.
        """
        ...


def new_epoch(now_s: float, nonce: str) -> str:
    """Return the epoch of a worker that starts at `now_s`, in Unix time.

    Epochs compare as text.

    Args:
        nonce: a text that distinguishes workers that start in the same microsecond.
    """
    return f"{round(now_s * 1e6):016d}-{nonce}"
