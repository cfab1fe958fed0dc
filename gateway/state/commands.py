"""The commands to the stores of a gateway, as values.

A command is one immutable value with a typed result. A store in memory has a function for each type
of command (`memory`), Redis a script with a codec (`redis.scripts`), and the guard of a remote
store a rule for what happens if it does not respond (`guarded`). Every store passes the tests in
`tests/gateway/*_contract.py`.

The store has the clock, so that callers need not agree on the time. The memory store uses the given
clock, and Redis uses the server's clock.

*Leases.* A worker's *epoch* is one life of the worker. A newer epoch ends the leases of older
epochs, whose late reports are dropped. Each lease has an increasing *number*. The *watermark* of a
report is the number of the last lease that its values include. Leases with higher numbers are on
their way to the worker, and are added to the values of the report.

*Quotas.* A *reservation* contains what a request may use of its tenant's quota
(`draftgate.policies.quotas`). A reservation that its gateway does not renew expires, and is then
charged in full, because the request may have used its tokens.

*Flows.* A *flow* is several requests of one tenant that serve one user action, and its requests are
*hops*. Any gateway of a pool can serve the next hop. A flow is kept for a bounded time after its
deadline, and each tenant has a bounded number of flows.

*News.* A gateway sends `ExchangeNews` and gets all entries that have changed since its last
exchange. An entry has a *revision*, which increases with each change in the store. The exchanges of
a gateway are numbered, so that an exchange that arrives twice counts once. A store that has lost
its memory has another `start`, and ignores the exchange. Each gateway then sends the totals that it
knows. The store uses the total with the most choices, and adds the tallies that it gets meanwhile.

*Responses* are values for requests that continue or retrieve an earlier response. A value belongs
to a tenant, and only this tenant can read or delete the value. Values end after a fixed time. The
store has a capacity in bytes that all tenants share. If the values exceed the capacity, the tenant
with the most bytes loses its oldest values. A tenant with many values therefore cannot displace the
values of a tenant with few.
"""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar, Final, Generic, TypeAlias, TypeVar, get_args

import msgspec

from draftgate.gateway.state.values import (
    FlowHop,
    FlowKey,
    HopArrival,
    HopLengths,
    Lease,
    LeaseCandidate,
    News,
    PutResult,
    Reservation,
    Snapshot,
    StoreUsage,
    WorkerReport,
)
from draftgate.policies.admission.appointments import BookingNote
from draftgate.policies.flows.types import HopRecord
from draftgate.policies.quotas import Levels, QuotaReservation, Settlement, Shortage, Totals
from draftgate.policies.speculation.acceptance_history import KeyTally

T = TypeVar("T")

NO_FALLBACK: Final = object()
"""The fallback of commands that fail if the store does not respond."""


class StoreCommand(msgspec.Struct, Generic[T], frozen=True, array_like=True, tag=True):
    """A command to a store, with a result of the type `T`.

    Attributes:
        fallback: the result if the store does not respond and nothing else is known, or
            `NO_FALLBACK`. Requests then run without leases and limits.
    """

    fallback: ClassVar[Any] = NO_FALLBACK


CommandType: TypeAlias = type[StoreCommand[Any]]


@cache
def result_decoder(kind: CommandType) -> msgspec.msgpack.Decoder[Any]:
    """Return the decoder of the results of a type of command."""
    (result,) = get_args(vars(kind)["__orig_bases__"][0])
    return msgspec.msgpack.Decoder(result)


# --- leases ---------------------------------------------------------------------------------------


class PublishReport(StoreCommand[bool], frozen=True):
    """Replace a worker's report. The result is False for a late report or an old epoch."""

    fallback = True

    report: WorkerReport


class WithdrawWorker(StoreCommand[None], frozen=True):
    """Remove a worker from the pool.

    A late call or a call for an old epoch has no effect. The leases of the worker stay until they
    are released, because its streams may still end. A later report of the same epoch adds the
    worker again.
    """

    fallback = None

    worker_id: str
    epoch: str
    seq: int


class ListWorkers(StoreCommand[Snapshot], frozen=True):
    """Return every worker that has reported within `FORGET_S`."""

    fallback = Snapshot((), degraded=True)


class ReserveLease(StoreCommand[Reservation], frozen=True):
    """Lease tokens of one of the offered workers to a request, in one atomic step.

    The store considers live workers of the offered epoch with enough capacity. The lowest value of
    `score + score_per_token * tokens leased after the watermark` wins. A worker has enough capacity
    if all its leases fit into `capacity_tokens`, or if it has no lease yet. A worker with claims
    has capacity only for the request of the first claim.

    Any earlier lease of the request ends, on any worker. The new lease ends with `ReleaseLeases`,
    or after `ttl_s` seconds (at most `FORGET_S`). A new lease ends the claim of its request, and a
    refusal does not.

    Attributes:
        quota: what the store reserves first in the same step, as `ReserveQuota` does. It stays
            reserved even if every offer is refused. If the quota is too small, nothing else
            changes.
    """

    fallback = Reservation(None, degraded=True)

    request_id: str
    tokens: int
    offers: tuple[LeaseCandidate, ...]
    ttl_s: float
    quota: QuotaReservation | None = None


class ClaimWorker(StoreCommand[Lease | None], frozen=True):
    """Claim the next room of one of the offered workers for a request that waits.

    Until the claim ends, the worker grants leases only to the request of its first claim. Its
    leases therefore end one after the other until the claimed tokens fit. Claims are ordered by
    their `number`, which the first call determines. A later call renews the claim.

    The store considers live workers of the offered epoch whose `capacity_tokens` are known and can
    hold the tokens. A claim stays on its worker while the worker is among them. Otherwise the claim
    moves to the worker with the fewest leased and claimed tokens that must end first, or to the
    first of equals. A request with a lease gets no claim.

    The claim ends with a lease of the request, with `ReleaseLeases`, or after `ttl_s` seconds. The
    result is the claim in the form of a lease, or None if no offered worker can be claimed.
    """

    fallback = None

    request_id: str
    tokens: int
    offers: tuple[LeaseCandidate, ...]
    ttl_s: float


class RenewLeases(StoreCommand[frozenset[str]], frozen=True):
    """Extend leases to `ttl_s` seconds from now, and count this gateway as live.

    The store adopts a lease that it does not know, or knows differently, even beyond the worker's
    capacity. Such a lease exists, but the store has lost it. Therefore pass all held leases, even
    if none exist.

    The result has the ids of requests whose leases have ended, because the worker has a newer
    epoch.
    """

    fallback = frozenset[str]()

    leases: tuple[Lease, ...]
    ttl_s: float


class ReleaseLeases(StoreCommand[None], frozen=True):
    """End the leases and claims of requests. Unknown requests are ignored."""

    fallback = None

    request_ids: tuple[str, ...]


class HoldSlots(StoreCommand[bool], frozen=True):
    """Take slots, all of them or none.

    Each worker has a slot for the move of a stream, and each batch has one for the gateway that
    runs it. The holder keeps the slots until `FreeSlots`, or for `ttl_s` seconds (at most
    `FORGET_S`). A repeated command extends this time. The result is False also while the store does
    not respond.

    Attributes:
        holder: an id of the move, or of the gateway.
        names: ids of the workers or batches.
    """

    fallback = False

    holder: str
    names: tuple[str, ...]
    ttl_s: float


class FreeSlots(StoreCommand[None], frozen=True):
    """Free those slots that a holder still has."""

    fallback = None

    holder: str
    names: tuple[str, ...]


# --- quotas ---------------------------------------------------------------------------------------


class ReserveQuota(StoreCommand[Shortage | None], frozen=True):
    """Reserve what a request may use, or reserve nothing, in one atomic step.

    The reservation ends with `SettleQuotas`, or after `ttl_s` seconds. A repeated command extends
    it. The result is None if the request fits, otherwise the shortage with the longest wait.
    """

    fallback = None

    reservation: QuotaReservation
    ttl_s: float


class RenewQuotas(StoreCommand[int], frozen=True):
    """Extend reservations to `ttl_s` seconds from now.

    The store restores a reservation that it does not know, even beyond the quota. Such a
    reservation exists, but the store has lost it, or did not respond when it was made. Therefore
    pass all open reservations.

    The result is the number of gateways that have sent this command recently, including this
    gateway. They share the quotas.
    """

    fallback = 1

    reservations: tuple[QuotaReservation, ...]
    ttl_s: float


class SettleQuotas(StoreCommand[None], frozen=True):
    """End reservations, charge what their requests have used, and release the rest.

    Unknown requests are ignored.
    """

    fallback = None

    settlements: tuple[Settlement, ...]


class ReadTotals(StoreCommand[Totals], frozen=True):
    """Return the totals of a tenant, which are zero for an unknown tenant."""

    tenant: str


class ReadLevels(StoreCommand[Levels], frozen=True):
    """Return what a tenant uses now."""

    tenant: str


# --- keys, budgets and usage ----------------------------------------------------------------------


class ReadKeys(StoreCommand[tuple[str, str | None]], frozen=True):
    """Return the revision of the keys, or an empty one, and the keys unless it is the given one."""

    revision: str


class WriteKeys(StoreCommand[bool], frozen=True):
    """Replace the keys of a revision. The result is False if the keys have another revision."""

    expected: str
    revision: str
    keys: str


class ExchangeSpending(StoreCommand[tuple[int, ...] | None], frozen=True):
    """Report what a gateway has charged, and return the sums of all gateways in the same order.

    A report has the total of the gateway, so a repeated one has no further effect, and a store that
    has lost its memory gets all totals again. The result is None if the store does not respond.

    Attributes:
        source: an id of this run of the gateway.
        totals: name of an account, total in billionths of a USD, and seconds for which the account
            is kept after this report.
    """

    fallback = None

    source: str
    totals: tuple[tuple[str, int, float], ...]


class PutUsage(StoreCommand[None], frozen=True):
    """Replace what a gateway has counted in a period, which is kept for `ttl_s` from now on."""

    source: str
    period: str
    counts: str
    ttl_s: float


class ListUsage(StoreCommand[tuple[str, ...]], frozen=True):
    """Return what the gateways have counted in a period."""

    period: str


# --- flows ----------------------------------------------------------------------------------------


class BeginHop(StoreCommand[FlowHop | None], frozen=True):
    """Add a hop to a flow, or begin a flow with its first hop.

    The result is the place of the hop, or None for an ordinary request: the flow is unknown and the
    request has no deadline, or the tenant or the flow has reached its maximum.
    """

    fallback = None

    key: FlowKey
    arrival: HopArrival


class EndHop(StoreCommand[None], frozen=True):
    """Record that the response of a hop has ended. A hop of an unknown flow is ignored."""

    fallback = None

    key: FlowKey
    hop: FlowHop
    lengths: HopLengths


class CancelFlow(StoreCommand[bool], frozen=True):
    """End a flow whose first hop was refused, unless another hop has arrived.

    The result is whether the flow has ended.
    """

    fallback = True

    key: FlowKey
    hop: FlowHop


class TakeFlow(StoreCommand[tuple[HopRecord, ...] | None], frozen=True):
    """End the flow of a hop, and return its hops in the order of their arrival.

    The result is None if the store does not know the flow.
    """

    fallback = None

    key: FlowKey
    hop: FlowHop


# --- news -----------------------------------------------------------------------------------------


class ExchangeNews(StoreCommand[News | None], frozen=True):
    """Tell the other gateways what this gateway has learned, and get what they have learned.

    A repeated exchange has no further effect. Nodes send it with each heartbeat, so no request
    waits for it. The result is None if the store does not respond.

    Attributes:
        source: an id of this run of the gateway.
        number: a number that increases with each new exchange. A repeated one keeps its number.
        start: the start of the store that the gateway knows, or 0.
        cursor: the revision up to which the gateway knows the entries.
        history: tallies of choices that the store does not know yet.
        restored: totals of an earlier memory of the store.
        bookings: new and closed bookings.
    """

    fallback = None

    source: str
    number: int
    start: int
    cursor: int
    history: tuple[KeyTally, ...] = ()
    restored: tuple[KeyTally, ...] = ()
    bookings: tuple[BookingNote, ...] = ()


# --- responses ------------------------------------------------------------------------------------


class PutResponse(StoreCommand[PutResult], frozen=True):
    """Store a value of a tenant by its response id. Ids are unique among all tenants.

    A value gets no place if it exceeds the capacity, or if its tenant has the most bytes and the
    value is the tenant's only one.
    """

    fallback = PutResult(kept=False, evicted=0)

    tenant: str
    response_id: str
    value: bytes


class GetResponse(StoreCommand[bytes | None], frozen=True):
    """Return a value of the tenant, or None if the store does not have it."""

    tenant: str
    response_id: str


class DeleteResponse(StoreCommand[bool], frozen=True):
    """Delete a value of the tenant, and return whether the store had it."""

    tenant: str
    response_id: str


class ReadUsage(StoreCommand[StoreUsage], frozen=True):
    """Return the usage of the store by all tenants and nodes."""
