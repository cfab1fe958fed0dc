"""The contract of the state store: reports of workers, and leases on their capacity.

The store keeps the time (memory: the given clock; Redis: the server's), so that callers need not
agree on one. Every store passes the tests in `tests/gateway/store_contract.py`.

A worker's *epoch* is one life of it. A newer epoch ends the leases of the older one, and late
reports of the older one are dropped. Each lease has an increasing *number*, so a report can name
the leases that its figures include by one number, its *watermark*. Leases with higher numbers are
on their way to the worker and are added to the figures of the report.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

STALE_S: Final = 3.0
"""A worker without a report for this long gets no leases: three heartbeats of 1 s are missing.

With two, a worker whose event loop stalls for a second would sometimes be skipped. (Chosen, not
tuned; 2026-11-22.)"""

FORGET_S: Final = 60.0
"""A worker without a report for this long is forgotten, with its epoch.

It is twice the life of a lease that is not renewed, and the longest lease."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker publishes about itself.

    Its load is not part of the report: links to the worker carry that (`backends.remote_worker`).

    Attributes:
        epoch: from `new_epoch`; later epochs compare greater as text.
        seq: increases with each report of an epoch; reports out of order are dropped.
        capacity_tokens: tokens of prompts and outputs that its KV memory holds; 0 if unknown.
        watermark: number of the last lease whose request had reached it; 0 before the first.
        address: URL at which other nodes reach it; "" if only its own gateway does.
        model_id: the name clients use.
        max_model_len: the longest sequence, prompt and output together, in tokens.
    """

    worker_id: str
    epoch: str
    seq: int
    capacity_tokens: int = 0
    watermark: int = 0
    address: str = ""
    model_id: str = ""
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the store knows it.

    Attributes:
        report: the latest one.
        age_s: seconds since the report.
        leased_tokens: tokens of prompt and output in all living leases.
        behind_tokens: the part of them behind the report's watermark.
    """

    report: WorkerReport
    age_s: float
    leased_tokens: int
    behind_tokens: int

    @property
    def worker_id(self) -> str:
        """The id of the worker."""
        return self.report.worker_id


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers of a pool at one time.

    Attributes:
        workers: sorted by id; the reader decides which are too old.
        gateways: nodes that renewed leases within `STALE_S`, this one included.
        degraded: whether the store did not answer, so that these are the last known reports and
            the leases of this gateway only.
    """

    workers: tuple[WorkerView, ...]
    gateways: int = 1
    degraded: bool = False


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """A worker that a request may go to, scored by a routing policy.

    Attributes:
        epoch, watermark: of the report that the score was computed from.
        score: cost in the policy's own unit, without leases after the watermark; the lowest wins,
            the first of equals.
        score_per_token: increase of the score for each token leased after the watermark.
    """

    worker_id: str
    epoch: str
    score: float = 0.0
    score_per_token: float = 0.0
    watermark: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """A claim on a worker's capacity for one request, with all that is needed to rebuild it."""

    request_id: str
    worker_id: str
    epoch: str
    tokens: int
    number: int


class Refusal(StrEnum):
    """Why no worker was chosen: the first reason, in this order, that applies to any offer."""

    FULL = "full"
    """It has no capacity for these tokens now. Waiting helps."""
    STALE = "stale"
    """It has not reported for `STALE_S`."""
    UNKNOWN = "unknown"
    """It has never reported, or the store has lost its memory."""
    FENCED = "fenced"
    """The offer names another epoch than the worker's current one."""
    GONE = "gone"
    """It has left the pool."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer to `Store.reserve`.

    Attributes:
        lease: the new lease; None if every offer was refused.
        refusal: the reason in that case.
        behind_tokens: tokens leased after the offer's watermark, without this lease.
        degraded: whether this gateway decided alone, because the store did not answer.
    """

    lease: Lease | None
    refusal: Refusal | None = None
    behind_tokens: int = 0
    degraded: bool = False


class StoreError(Exception):
    """The store did not answer. It may still have done what was asked."""


class Store(Protocol):
    """State shared by the gateways and workers of a pool.

    Raises:
        StoreError: from any method of a remote store (`GuardedStore` handles it).
    """

    @property
    def outage(self) -> str | None:
        """Why the store is currently not asked; None while it works."""
        ...

    async def publish(self, report: WorkerReport) -> bool:
        """Replace a worker's report; return False for a late or fenced one."""
        ...

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        """Remove a worker from the pool; a late or fenced call has no effect.

        Its leases stay until they are released, because its streams may still end. A later report
        of the same epoch adds it again.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Return every worker that has reported within `FORGET_S`."""
        ...

    async def reserve(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Reservation:
        """Lease `tokens` of one of the offered workers to a request, in one atomic step.

        Among live workers of the offered epoch with enough capacity, the lowest
        `score + score_per_token * tokens leased after the watermark` wins. A worker has enough
        capacity if all its leases fit into `capacity_tokens`, or if it has no lease yet.

        An earlier lease of the request ends in any case, on any worker. The new lease ends at
        `release`, or by itself after `ttl_s` seconds (at most `FORGET_S`).
        """
        ...

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Extend leases to `ttl_s` seconds from now, and count this gateway as live.

        The store adopts a lease that it does not know, or knows differently, even beyond the
        worker's capacity: the lease exists, and the store has lost it. Therefore pass all leases
        that are held, also when there are none.

        Returns:
            The requests whose worker has a newer epoch: their leases have ended.
        """
        ...

    async def release(self, request_ids: Collection[str]) -> None:
        """End the leases of requests. Unknown requests are ignored."""
        ...

    async def close(self) -> None:
        """Close all connections. Idempotent."""
        ...


def new_epoch(now_s: float, nonce: str) -> str:
    """Return the epoch of a worker that starts at `now_s`, in Unix time; epochs compare as text.

    Args:
        nonce: distinguishes workers that start in the same microsecond.
    """
    return f"{round(now_s * 1e6):016d}-{nonce}"
