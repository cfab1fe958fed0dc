"""A store in dictionaries, for a node without a pool, whose calls never suspend."""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field

from draftgate.gateway.state.expiries import Expiries
from draftgate.gateway.state.quota_store import MemoryQuotas
from draftgate.gateway.state.store import (
    FORGET_S,
    STALE_S,
    Lease,
    LeaseCandidate,
    Refusal,
    Reservation,
    Snapshot,
    WorkerReport,
    WorkerView,
)


@dataclass(slots=True)
class _Worker:
    """One epoch of a worker.

    Attributes:
        epoch: the epoch.
        touched_s: time of the last call that named the worker.
        seq: number of the last report, or -1 before the first.
        report: the last report, or None after the worker has left.
        heard_s: time of the last report.
        leases: leases by request id.
    """

    epoch: str
    touched_s: float
    seq: int = -1
    report: WorkerReport | None = None
    heard_s: float = 0.0
    leases: dict[str, Lease] = field(default_factory=dict)

    def leased_tokens(self, watermark: int = -1) -> int:
        """Return the tokens of leases with numbers above the watermark."""
        return sum(lease.tokens for lease in self.leases.values() if lease.number > watermark)


class MemoryStore:
    """A `Store` in this process, which is the reference for every other implementation.

    Attributes:
        gateways: number of gateways that share the capacity of workers with an address.
        quotas: the quotas of tenants.
    """

    outage = None

    def __init__(
        self, clock: Callable[[], float] = time.monotonic, *, stale_s: float = STALE_S
    ) -> None:
        """Start empty.

        Args:
            clock: a monotonic clock, in seconds.
            stale_s: replaces `STALE_S`.
        """
        self.gateways = 1
        self.quotas = MemoryQuotas(clock)
        self._clock = clock
        self._stale_s = stale_s
        self._workers: dict[str, _Worker] = {}
        self._leases: dict[str, Lease] = {}
        self._expiries = Expiries()  # of leases, by request
        self._number = 0

    async def publish(self, report: WorkerReport) -> bool:
        """Replace a worker's report, as `Store.publish` describes."""
        return self.add_report(report, 0.0)

    def add_report(self, report: WorkerReport, age_s: float) -> bool:
        """Publish a report with an age of `age_s` seconds."""
        worker = self._entered(report.worker_id, report.epoch)
        if worker is None or report.seq <= worker.seq:
            return False
        worker.seq, worker.report = report.seq, report
        worker.heard_s = self._clock() - age_s
        self._number = max(self._number, report.watermark)
        return True

    async def withdraw(self, worker_id: str, epoch: str, seq: int) -> None:
        """Remove a worker from the pool, as `Store.withdraw` describes."""
        worker = self._entered(worker_id, epoch)
        if worker is not None and seq > worker.seq:
            worker.seq, worker.report = seq, None

    async def snapshot(self) -> Snapshot:
        """Return the live workers, as `Store.snapshot` describes."""
        now_s = self._clock()
        self._prune(now_s)
        self._forget(now_s)
        views = (
            WorkerView(
                worker.report,
                now_s - worker.heard_s,
                worker.leased_tokens(),
                worker.leased_tokens(worker.report.watermark),
            )
            for _, worker in sorted(self._workers.items())
            if worker.report is not None and now_s - worker.heard_s < FORGET_S
        )
        return Snapshot(tuple(views), self.gateways)

    async def reserve(
        self, request_id: str, tokens: int, offers: Sequence[LeaseCandidate], ttl_s: float
    ) -> Reservation:
        """Lease tokens of an offered worker, as `Store.reserve` describes."""
        now_s = self._clock()
        self._prune(now_s)
        self._drop(request_id)
        verdicts = [self._refusal(offer, tokens, now_s) for offer in offers]
        fit = [offer for offer, why in zip(offers, verdicts, strict=True) if why is None]
        if not fit:
            first = next((one for one in Refusal if one in verdicts), Refusal.UNKNOWN)
            return Reservation(None, first)
        behind = [self._workers[one.worker_id].leased_tokens(one.watermark) for one in fit]
        scores = [o.score + o.score_per_token * b for o, b in zip(fit, behind, strict=True)]
        best = scores.index(min(scores))
        self._number = max(self._number + 1, round(now_s * 1e6))
        lease = Lease(request_id, fit[best].worker_id, fit[best].epoch, tokens, self._number)
        self._put(lease, now_s + ttl_s)
        return Reservation(lease, behind_tokens=behind[best])

    async def renew(self, leases: Collection[Lease], ttl_s: float) -> frozenset[str]:
        """Extend leases, as `Store.renew` describes."""
        now_s = self._clock()
        self._prune(now_s)
        fenced = set[str]()
        for lease in leases:
            if self._entered(lease.worker_id, lease.epoch) is None:
                fenced.add(lease.request_id)
            elif self._leases.get(lease.request_id) == lease:
                self._expiries.put(lease.request_id, now_s + ttl_s)
            else:
                self._drop(lease.request_id)
                self._put(lease, now_s + ttl_s)
        return frozenset(fenced)

    async def release(self, request_ids: Collection[str]) -> None:
        """End the leases of requests, as `Store.release` describes."""
        for request_id in request_ids:
            self._drop(request_id)

    async def close(self) -> None:
        """Do nothing, because the store has no connections."""

    def holds(self, request_id: str) -> bool:
        """Return whether a request has a lease."""
        return request_id in self._leases

    def leases(self) -> list[Lease]:
        """Return all living leases."""
        self._prune(self._clock())
        return list(self._leases.values())

    def _entered(self, worker_id: str, epoch: str) -> _Worker | None:
        """Return the worker in this epoch, or None if a newer epoch is known.

        Leases of older epochs end.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and worker.epoch > epoch:
            return None
        if worker is None or worker.epoch < epoch:
            for request_id in tuple(worker.leases) if worker is not None else ():
                self._drop(request_id)
            worker = self._workers[worker_id] = _Worker(epoch, 0.0)
        worker.touched_s = self._clock()
        return worker

    def _refusal(self, offer: LeaseCandidate, tokens: int, now_s: float) -> Refusal | None:
        worker = self._workers.get(offer.worker_id)
        if worker is None or worker.seq < 0:
            return Refusal.UNKNOWN
        if worker.epoch != offer.epoch:
            return Refusal.FENCED
        if worker.report is None:
            return Refusal.GONE
        if now_s - worker.heard_s > self._stale_s:
            return Refusal.STALE
        capacity_tokens, leased_tokens = self._capacity(worker.report), worker.leased_tokens()
        if capacity_tokens and leased_tokens and leased_tokens + tokens > capacity_tokens:
            return Refusal.FULL
        return None

    def _capacity(self, report: WorkerReport) -> int:
        """Return this gateway's share of a worker's capacity in tokens, or 0 if unknown."""
        if not report.address or not report.capacity_tokens:
            return report.capacity_tokens
        return max(1, report.capacity_tokens // self.gateways)

    def _put(self, lease: Lease, until_s: float) -> None:
        """Add a lease for a request without a lease."""
        self._number = max(self._number, lease.number)
        self._leases[lease.request_id] = lease
        self._workers[lease.worker_id].leases[lease.request_id] = lease
        self._expiries.put(lease.request_id, until_s)

    def _drop(self, request_id: str) -> None:
        lease = self._leases.pop(request_id, None)
        if lease is not None:
            self._expiries.drop(request_id)
            del self._workers[lease.worker_id].leases[request_id]

    def _prune(self, now_s: float) -> None:
        """End expired leases."""
        for request_id in self._expiries.pop_due(now_s):
            self._drop(request_id)

    def _forget(self, now_s: float) -> None:
        """Forget workers without leases that no call has named for `FORGET_S`."""
        for worker_id, worker in tuple(self._workers.items()):
            if now_s - worker.touched_s > FORGET_S and not worker.leases:
                del self._workers[worker_id]
