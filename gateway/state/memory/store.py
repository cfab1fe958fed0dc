"""The state of a node without a pool, or of the processes of a node."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from operator import attrgetter
from typing import Final

from draftgate.gateway.state import commands
from draftgate.gateway.state.memory.accounting import MemoryAccounting
from draftgate.gateway.state.memory.exchange import MemoryExchange
from draftgate.gateway.state.memory.flows import MemoryFlows
from draftgate.gateway.state.memory.lease_table import LeaseTable
from draftgate.gateway.state.memory.quotas import MemoryQuotas
from draftgate.gateway.state.store import InMemory
from draftgate.gateway.state.values import (
    FORGET_S,
    STALE_S,
    Lease,
    LeaseCandidate,
    News,
    Refusal,
    Reservation,
    Snapshot,
    WorkerReport,
    WorkerView,
)

_NUMBER_OF: Final = attrgetter("number")


@dataclass(slots=True)
class _Worker:
    """One epoch of a worker.

    Attributes:
        epoch: the epoch.
        touched_s: time of the last call that named the worker.
        seq: number of the last report, or -1 before the first.
        report: the last report, or None after the worker has left.
        heard_s: time of the last report.
    """

    epoch: str
    touched_s: float
    seq: int = -1
    report: WorkerReport | None = None
    heard_s: float = 0.0


class MemoryStore(InMemory):
    """A `Store` in this process, which is the reference for every other implementation.

    Attributes:
        gateways: number of gateways that share the capacity of workers with an address.
        quotas: the quotas of tenants.
        flows: the flows of tenants.
    """

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
        self.flows = MemoryFlows(clock)
        self._clock = clock
        self._stale_s = stale_s
        self._workers: dict[str, _Worker] = {}
        self._leases, self._claims = LeaseTable(), LeaseTable()
        self._number = 0
        self._expired_claims = 0
        self._slots: dict[str, tuple[str, float]] = {}  # holder of each slot, and until when
        self._exchange = MemoryExchange(clock)
        self.handlers = {
            commands.PublishReport: self.publish,
            commands.WithdrawWorker: self.withdraw,
            commands.ListWorkers: self.list_workers,
            commands.ReserveLease: self.reserve,
            commands.ClaimWorker: self.claim,
            commands.RenewLeases: self.renew,
            commands.ReleaseLeases: self.release,
            commands.HoldSlots: self.hold_slots,
            commands.FreeSlots: self.free_slots,
            commands.ExchangeNews: self.exchange,
            **self.quotas.handlers,
            **self.flows.handlers,
            **MemoryAccounting(clock).handlers,
        }

    def publish(self, command: commands.PublishReport) -> bool:
        """Replace a worker's report."""
        return self.add_report(command.report, 0.0)

    def add_report(self, report: WorkerReport, age_s: float) -> bool:
        """Replace a worker's report by one with an age of `age_s` seconds."""
        worker = self._entered(report.worker_id, report.epoch)
        if worker is None or report.seq <= worker.seq:
            return False
        worker.seq, worker.report = report.seq, report
        worker.heard_s = self._clock() - age_s
        self._number = max(self._number, report.watermark)
        return True

    def withdraw(self, command: commands.WithdrawWorker) -> None:
        """Remove a worker from the pool."""
        worker = self._entered(command.worker_id, command.epoch)
        if worker is not None and command.seq > worker.seq:
            worker.seq, worker.report = command.seq, None

    def list_workers(self, _command: commands.ListWorkers) -> Snapshot:
        """Return the live workers."""
        now_s = self._clock()
        self._prune(now_s)
        self._forget(now_s)
        views = (
            WorkerView(
                worker.report,
                now_s - worker.heard_s,
                self._leases.tokens(worker_id),
                self._leases.tokens(worker_id, worker.report.watermark),
                self._claims.tokens(worker_id),
            )
            for worker_id, worker in sorted(self._workers.items())
            if worker.report is not None and now_s - worker.heard_s < FORGET_S
        )
        return Snapshot(tuple(views), self.gateways)

    def reserve(self, command: commands.ReserveLease) -> Reservation:
        """Lease tokens of an offered worker."""
        request_id, tokens, ttl_s = command.request_id, command.tokens, command.ttl_s
        if command.quota is not None:
            shortage = self.quotas.reserve(commands.ReserveQuota(command.quota, ttl_s))
            if shortage is not None:
                return Reservation(None, shortage=shortage)
        now_s = self._clock()
        self._prune(now_s)
        self._leases.drop(request_id)
        refusals: list[Refusal] = []
        chosen, lowest_score, behind_tokens = None, 0.0, 0
        for offer in command.offers:
            refusal = self._refusal(offer, request_id, tokens, now_s)
            if refusal is not None:
                refusals.append(refusal)
                continue
            behind = self._leases.tokens(offer.worker_id, offer.watermark)
            score = offer.score + offer.score_per_token * behind
            if chosen is None or score < lowest_score:
                chosen, lowest_score, behind_tokens = offer, score, behind
        if chosen is None:
            first = next((one for one in Refusal if one in refusals), Refusal.UNKNOWN)
            return Reservation(None, first)
        number = self._next_number(now_s)
        lease = Lease(request_id, chosen.worker_id, chosen.epoch, tokens, number)
        self._leases.put(lease, now_s + ttl_s)
        self._claims.drop(request_id)
        return Reservation(lease, behind_tokens=behind_tokens)

    def claim(self, command: commands.ClaimWorker) -> Lease | None:
        """Claim the next room of an offered worker."""
        now_s, request_id, tokens = self._clock(), command.request_id, command.tokens
        self._prune(now_s)
        held = self._claims.get(request_id)
        self._claims.drop(request_id)
        fit = [offer for offer in command.offers if self._is_claimable(offer, tokens, now_s)]
        if not fit or request_id in self._leases:
            return None
        stay = [offer for offer in fit if held is not None and offer.worker_id == held.worker_id]
        chosen = min(stay or fit, key=lambda offer: self._missing_tokens(offer, tokens))
        number = self._next_number(now_s) if held is None else held.number
        claim = Lease(request_id, chosen.worker_id, chosen.epoch, tokens, number)
        self._claims.put(claim, now_s + command.ttl_s)
        return claim

    def renew(self, command: commands.RenewLeases) -> frozenset[str]:
        """Extend leases."""
        now_s = self._clock()
        until_s = now_s + command.ttl_s
        self._prune(now_s)
        fenced = set[str]()
        for lease in command.leases:
            if self._entered(lease.worker_id, lease.epoch) is None:
                fenced.add(lease.request_id)
            elif self._leases.get(lease.request_id) == lease:
                self._leases.extend(lease.request_id, until_s)
            else:
                self._number = max(self._number, lease.number)
                self._leases.put(lease, until_s)
                self._claims.drop(lease.request_id)
        return frozenset(fenced)

    def release(self, command: commands.ReleaseLeases) -> None:
        """End the leases and claims of requests."""
        for request_id in command.request_ids:
            self._leases.drop(request_id)
            self._claims.drop(request_id)

    def hold_slots(self, command: commands.HoldSlots) -> bool:
        """Take slots."""
        now_s, holder = self._clock(), command.holder
        self._slots = {name: slot for name, slot in self._slots.items() if slot[1] > now_s}
        if any(self._slots.get(name, (holder,))[0] != holder for name in command.names):
            return False
        self._slots.update(dict.fromkeys(command.names, (holder, now_s + command.ttl_s)))
        return True

    def free_slots(self, command: commands.FreeSlots) -> None:
        """Free slots."""
        for name in command.names:
            if self._slots.get(name, ("", 0.0))[0] == command.holder:
                del self._slots[name]

    def exchange(self, command: commands.ExchangeNews) -> News:
        """Apply what a gateway tells, and return the news."""
        self._prune(self._clock())
        news = self._exchange.exchange(command)
        return news._replace(expired_claims=self._expired_claims)

    def holds(self, request_id: str) -> bool:
        """Return whether a request has a lease or a claim."""
        return request_id in self._leases or request_id in self._claims

    def end_lease(self, request_id: str) -> None:
        """End the lease of a request, but not its claim."""
        self._leases.drop(request_id)

    def leases(self) -> list[Lease]:
        """Return all living leases."""
        self._prune(self._clock())
        return self._leases.all()

    def _entered(self, worker_id: str, epoch: str) -> _Worker | None:
        """Return the worker in this epoch, or None if a newer epoch is known.

        Leases and claims of older epochs end.
        """
        worker = self._workers.get(worker_id)
        if worker is not None and worker.epoch > epoch:
            return None
        if worker is None or worker.epoch < epoch:
            self._leases.drop_worker(worker_id)
            self._claims.drop_worker(worker_id)
            worker = self._workers[worker_id] = _Worker(epoch, 0.0)
        worker.touched_s = self._clock()
        return worker

    def _refusal(
        self, offer: LeaseCandidate, request_id: str, tokens: int, now_s: float
    ) -> Refusal | None:
        """Return why a request gets no lease on an offered worker, or None if it may."""
        unusable = self._unusable(offer, now_s)
        if unusable is not None:
            return unusable
        claims = self._claims.of_worker(offer.worker_id)
        if claims and min(claims, key=_NUMBER_OF).request_id != request_id:
            return Refusal.FULL
        leased_tokens = self._leases.tokens(offer.worker_id)
        capacity_tokens = self._capacity(offer.worker_id)
        if capacity_tokens and leased_tokens and leased_tokens + tokens > capacity_tokens:
            return Refusal.FULL
        return None

    def _unusable(self, offer: LeaseCandidate, now_s: float) -> Refusal | None:
        """Return why an offered worker gets no leases at all, or None for a live worker."""
        worker = self._workers.get(offer.worker_id)
        if worker is None or worker.seq < 0:
            return Refusal.UNKNOWN
        if worker.epoch != offer.epoch:
            return Refusal.FENCED
        if worker.report is None:
            return Refusal.GONE
        return Refusal.STALE if now_s - worker.heard_s > self._stale_s else None

    def _is_claimable(self, offer: LeaseCandidate, tokens: int, now_s: float) -> bool:
        """Return whether a live worker has a known capacity that can hold the tokens."""
        if self._unusable(offer, now_s) is not None:
            return False
        report = self._workers[offer.worker_id].report
        return report is not None and tokens <= report.capacity_tokens

    def _missing_tokens(self, offer: LeaseCandidate, tokens: int) -> int:
        """Return the leased and claimed tokens that must end before the tokens fit."""
        taken = self._leases.tokens(offer.worker_id) + self._claims.tokens(offer.worker_id)
        return max(0, taken + tokens - self._capacity(offer.worker_id))

    def _next_number(self, now_s: float) -> int:
        self._number = max(self._number + 1, round(now_s * 1e6))
        return self._number

    def _capacity(self, worker_id: str) -> int:
        """Return this gateway's share of a worker's capacity in tokens, or 0 if unknown."""
        report = self._workers[worker_id].report
        if report is None or not report.address or not report.capacity_tokens:
            return 0 if report is None else report.capacity_tokens
        return max(1, report.capacity_tokens // self.gateways)

    def _prune(self, now_s: float) -> None:
        """End expired leases and claims."""
        self._leases.prune(now_s)
        self._expired_claims += self._claims.prune(now_s)

    def _forget(self, now_s: float) -> None:
        """Forget workers without leases that no call has named for `FORGET_S`."""
        for worker_id, worker in tuple(self._workers.items()):
            if now_s - worker.touched_s > FORGET_S and not self._leases.of_worker(worker_id):
                del self._workers[worker_id]
