"""The values in commands to stores and in their results."""

from __future__ import annotations

from enum import StrEnum
from typing import Final, NamedTuple

from draftgate.policies.admission.appointments import BookingNote
from draftgate.policies.flows.types import HopKind
from draftgate.policies.quotas import Shortage
from draftgate.policies.speculation.acceptance_history import KeyTally
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
    """The result of `ReserveLease`.

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


def new_epoch(now_s: float, nonce: str) -> str:
    """Return the epoch of a worker that starts at `now_s`, in Unix time.

    Epochs compare as text.

    Args:
        nonce: a text that distinguishes workers that start in the same microsecond.
    """
    return f"{round(now_s * 1e6):016d}-{nonce}"


MOST_FLOWS: Final = 4096
"""Maximum number of flows of a tenant. Requests of further flows run as ordinary requests.

A flow takes about 1 kB in Redis. With deadlines of 10 s, a tenant may begin 160 flows per second.
(Chosen, not tuned.)"""

MOST_FLOW_HOPS: Final = 64
"""Maximum number of hops of a flow. Further requests run as ordinary requests."""

KEEP_S: Final = 15.0
"""Seconds for which the store keeps a flow after its deadline.

The gateway of the first hop takes the flow earlier, `SETTLE_S` after the deadline
(`gateway.dispatch.flows`). The rest is for calls that are late."""


class FlowKey(NamedTuple):
    """The name of a flow. Two tenants that use the same id have two flows."""

    tenant: str
    flow_id: str

    @property
    def text(self) -> str:
        """The key as one text, which differs for any two keys."""
        return f"{len(self.tenant)}:{self.tenant}{self.flow_id}"


@immutable
class HopArrival:
    """A request that names its flow.

    Attributes:
        ago_s: seconds since its arrival.
        deadline_s: deadline of the flow after the arrival of its first request in seconds, or None
            if the request has none. Only the value of the first request counts.
    """

    kind: HopKind
    ago_s: float
    deadline_s: float | None


@immutable
class FlowHop:
    """The place of a request in its flow.

    Attributes:
        number: number of the hop in the order of arrival, from 1.
        age_s: seconds since the arrival of the first request.
        deadline_s: deadline of the flow after that arrival, in seconds.
        life: a number that distinguishes flows with the same key.
    """

    number: int
    age_s: float
    deadline_s: float
    life: int

    @property
    def remaining_s(self) -> float:
        """Seconds to the deadline, negative after the deadline."""
        return self.deadline_s - self.age_s


class HopLengths(NamedTuple):
    """The measured lengths of a hop that has ended, as in `HopRecord`."""

    prompt_tokens: int
    output_tokens: int
    service_s: float


class News(NamedTuple):
    """What a gateway learns.

    Attributes:
        start: the time when the store's memory began, in microseconds. With another start than that
            of the exchange, the store has ignored the exchange.
        cursor: the revision up to which the gateway now knows the entries.
        more: whether further entries may have changed.
        history: the totals of all gateways for keys that have changed.
        bookings: the bookings of all gateways that have changed.
        expired_claims: number of claims on workers that have expired in the pool since the store's
            memory began.
    """

    start: int
    cursor: int = 0
    more: bool = False
    history: tuple[KeyTally, ...] = ()
    bookings: tuple[BookingNote, ...] = ()
    expired_claims: int = 0


class StoreUsage(NamedTuple):
    """The values of a store that have not ended, and their bytes."""

    values: int
    bytes: int


class PutResult(NamedTuple):
    """Whether the store has a place for a value, and how many other values it displaced."""

    kept: bool
    evicted: int
