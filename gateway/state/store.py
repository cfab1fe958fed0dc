"""The contract of the state store: what workers report, and leases on their capacity.

Time belongs to the store (memory: a clock it is given; Redis: the server's), so that no caller's
clock can disagree with another's. What every store must do is in `tests/gateway/store_contract.py`.

A worker's *epoch* is one life of it: a newer one voids the leases of the older and makes its late
reports count for nothing. Each lease has a *number*; numbers rise, so that a report can say by one
number, its *watermark*, which leases its figures include: those up to it. What was leased *behind*
the watermark is on its way to the worker and comes on top of what the report says.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from enum import StrEnum
from typing import Final, Protocol

from draftgate.policies.types import WorkerLoad

STALE_S: Final = 3.0
"""A worker that is silent for so long gets no leases: three heartbeats of 1 s are missing. With two
a worker whose event loop is held up for a second would be left out now and then. (Chosen, not
tuned; 2026-11-22.)"""

FORGET_S: Final = 60.0
"""After so long a silence a worker is forgotten, its epoch too: twice the life of a lease that
nobody renews, and no lease may be taken for longer."""


@dataclass(frozen=True, slots=True)
class WorkerReport:
    """What a worker says of itself.

    Attributes:
        epoch: of `new_epoch`; texts compare as the lives they stand for.
        seq: rises with each report of an epoch; what comes late is dropped.
        load: what it has to do.
        capacity_tokens: tokens of prompts and outputs that its KV memory holds; 0 where nobody
            knows.
        watermark: number of the last lease that `load` includes; 0 before the first.
        address: where other nodes reach it; "" where only its own gateway does.
        model_id: the name clients use.
        numerics_class: what must be equal for bits to be equal; None where nothing is promised.
        max_model_len: most tokens of prompt and output together.
    """

    worker_id: str
    epoch: str
    seq: int
    load: WorkerLoad
    capacity_tokens: int = 0
    watermark: int = 0
    address: str = ""
    model_id: str = ""
    numerics_class: str | None = None
    max_model_len: int = 0


@dataclass(frozen=True, slots=True)
class WorkerView:
    """A worker as the store knows it.

    Attributes:
        report: the last one.
        age_s: seconds since then.
        leased_tokens: tokens of prompt and output that living leases have reserved.
        behind_tokens: of these, those that `report.load` does not include yet.
    """

    report: WorkerReport
    age_s: float
    leased_tokens: int
    behind_tokens: int

    @property
    def worker_id(self) -> str:
        """Whose view this is."""
        return self.report.worker_id

    @property
    def load(self) -> WorkerLoad:
        """The load it reported last."""
        return self.report.load


@dataclass(frozen=True, slots=True)
class Snapshot:
    """All workers of a pool at one instant.

    Attributes:
        workers: sorted by id; what is stale is for the reader to judge.
        gateways: nodes that renewed leases within `STALE_S`, this one included.
        degraded: whether the store did not answer: these are the last known reports, older by now,
            and the leases of this gateway alone.
    """

    workers: tuple[WorkerView, ...]
    gateways: int = 1
    degraded: bool = False


@dataclass(frozen=True, slots=True)
class LeaseCandidate:
    """A worker that a request may go to, as a routing policy sees it.

    Attributes:
        epoch, watermark: of the report that `score` was made from.
        score: what speaks against it, in the policy's own unit, as if nothing had been leased
            behind the watermark; the least wins, the first of equals.
        score_per_token: by how much each token leased behind the watermark adds to that.
    """

    worker_id: str
    epoch: str
    score: float = 0.0
    score_per_token: float = 0.0
    watermark: int = 0


@dataclass(frozen=True, slots=True)
class Lease:
    """A part of a worker's capacity, reserved for a request: all that is needed to rebuild it."""

    request_id: str
    worker_id: str
    epoch: str
    tokens: int
    number: int


class Refusal(StrEnum):
    """Why a worker was not taken; the first that applies to any of them speaks for all."""

    FULL = "full"
    """More tokens would be leased than it holds. Waiting helps."""
    STALE = "stale"
    """It was not heard of for `STALE_S`."""
    UNKNOWN = "unknown"
    """It was never heard of, or the store has lost its memory."""
    FENCED = "fenced"
    """The offer is of another epoch than the worker's."""
    GONE = "gone"
    """It has left."""


@dataclass(frozen=True, slots=True)
class Reservation:
    """The answer to `Store.reserve`.

    Attributes:
        lease: what was taken; None where every worker was refused.
        refusal: why, in that case.
        behind_tokens: tokens leased behind the offer's watermark before this lease came.
        degraded: whether it was decided without the store, from what this gateway knows.
    """

    lease: Lease | None
    refusal: Refusal | None = None
    behind_tokens: int = 0
    degraded: bool = False


class StoreError(Exception):
    """The store did not answer; what was asked may have been done all the same."""


class Store(Protocol):
    """State shared by the gateways and workers of a pool.

    Raises:
        StoreError: from any method of a store that is not in this process (`GuardedStore` answers
            in its place).
    """

    @property
    def outage(self) -> str | None:
        """Why the store is not asked now; None while it is well."""
        ...

    async def publish(self, report: WorkerReport) -> bool:
        """Replace what is known of a worker; return False for a late or fenced report."""
        ...

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        """Take a worker out of the pool; no-op for a late or fenced call.

        Its leases stay until they are released: its streams may still end. A later report of the
        same epoch brings it back.
        """
        ...

    async def snapshot(self) -> Snapshot:
        """Return every worker that was heard of within `FORGET_S`."""
        ...

    async def reserve(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Reservation:
        """Lease `tokens` of one of the offered workers to a request, in one atomic step.

        Of the workers that are there, in the offered epoch, and have room, the one with the least
        `score + score_per_token * tokens leased behind the watermark` is taken. A worker has room
        while its leases stay within `capacity_tokens`, and for anything while it has none.

        A lease that the request holds already ends, on whichever worker and whatever the answer.
        The new one ends at `release`, or by itself `ttl_s` seconds from now (at most `FORGET_S`).
        """
        ...

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Let leases last until `ttl_s` from now, and count this gateway as there.

        A lease that the store does not know, or knows otherwise, is put as it is here, even beyond
        the worker's capacity: it is a fact, which the store has lost. So call it with all that are
        held, and with none.

        Returns:
            The requests whose worker has a newer epoch: their leases are void.
        """
        ...

    async def release(self, request_ids: Collection[str]) -> None:
        """End the leases of requests. Idempotent; unknown ones are ignored."""
        ...

    async def close(self) -> None:
        """Give back connections. Idempotent."""
        ...


def new_epoch(now_s: float, nonce: str) -> str:
    """Return the epoch of a worker that begins now, in Unix time; it compares with others as text.

    Args:
        nonce: tells lives apart that begin in the same microsecond.
    """
    return f"{round(now_s * 1e6):016d}-{nonce}"
