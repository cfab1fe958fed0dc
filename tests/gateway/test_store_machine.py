"""A state machine of leases that runs on the memory store and on Redis.

All stores execute every step and must return equal results. A simple model computes the expected
sums.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from dataclasses import replace
from typing import TypeVar

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import (
    RuleBasedStateMachine,
    invariant,
    precondition,
    rule,
    run_state_machine_as_test,
)

from draftgate.gateway.state.commands import (
    ClaimWorker,
    ListWorkers,
    PublishReport,
    ReadTotals,
    ReleaseLeases,
    RenewLeases,
    ReserveLease,
    SettleQuotas,
    WithdrawWorker,
)
from draftgate.gateway.state.store import Store
from draftgate.gateway.state.values import (
    STALE_S,
    Lease,
    LeaseCandidate,
    Refusal,
    Snapshot,
    WorkerView,
)
from draftgate.policies.quotas import Quota, QuotaReservation, Settlement
from tests.examples import examples
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import Timed, TimedMemory, TimedRedis, report

T = TypeVar("T")

CAPACITY = {"w0": 100, "w1": 250, "w2": 0}
REQUESTS = [f"r{index}" for index in range(8)]
QUOTA = Quota(requests_per_minute=12, tokens_per_minute=100)
TTL_S = 10.0
CLAIM_S = 2.0
SILENCE_S = 40.0
"""Longest silence of a worker, in seconds. A forgotten worker could return with an older epoch."""

workers = st.sampled_from(sorted(CAPACITY))
requests = st.sampled_from(REQUESTS)


class LeaseMachine(RuleBasedStateMachine):
    """Workers that report, restart and leave, and gateways that lease, renew and release."""

    def __init__(self, opened: Callable[[], list[Timed]]) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.timed = self.runner.run(self._open(opened))
        self.epochs = dict.fromkeys(CAPACITY, 0)
        self.known: dict[str, int] = {}  # the epoch of each worker in the store
        self.seqs = Counter[str]()
        self.sent = Counter[str]()  # the last lease number that reached each worker
        self.held: dict[str, Lease] = {}  # leases that gateways hold
        self.active: dict[str, tuple[Lease, float]] = {}  # leases in the store and their expiry
        self.claims: dict[str, tuple[Lease, float]] = {}  # by request, with their expiry
        self.rebuilt: set[str] = set()  # leases that skipped the capacity check
        self.spoken_s = dict.fromkeys(CAPACITY, 0.0)
        self.now_s = 0.0

    async def _open(self, opened: Callable[[], list[Timed]]) -> list[Timed]:
        found = opened()
        for timed in found:
            await timed.begin()
        return found

    def teardown(self) -> None:
        for timed in self.timed:
            self.runner.run(timed.close())
        self.runner.close()

    def run_on_all(self, call: Callable[[Store], Awaitable[T]]) -> T:
        """Execute a step on every store and assert that all results are equal."""

        async def done(store: Store) -> T:
            return await call(store)

        first, *others = [self.runner.run(done(timed.store)) for timed in self.timed]
        for other in others:
            assert comparable(other) == comparable(first)
        return first

    @property
    def snapshot(self) -> Snapshot:
        return self.run_on_all(lambda store: store.call(ListWorkers()))

    # --- workers ----------------------------------------------------------------------------------

    @rule(worker=workers)
    def report(self, worker: str) -> None:
        self.seqs[worker] += 1
        worker_report = report(
            worker,
            f"{self.epochs[worker]:04}",
            self.seqs[worker],
            capacity_tokens=CAPACITY[worker],
            watermark=self.sent[worker],
        )
        assert self.run_on_all(lambda store: store.call(PublishReport(worker_report)))
        self._record_epoch(worker, self.epochs[worker])

    @rule(worker=workers)
    def restart(self, worker: str) -> None:
        self.epochs[worker] += 1
        self.sent[worker] = 0
        self.report(worker)

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        self.seqs[worker] += 1
        epoch, seq = f"{self.epochs[worker]:04}", self.seqs[worker]
        self.run_on_all(lambda store: store.call(WithdrawWorker(worker, epoch, seq)))
        self._record_epoch(worker, self.epochs[worker])
        assert worker not in {view.worker_id for view in self.snapshot.workers}

    @precondition(lambda self: self.known)
    @rule(data=st.data(), lives_ago=st.integers(0, 1))
    def report_late(self, data: st.DataObject, lives_ago: int) -> None:
        worker = data.draw(st.sampled_from(sorted(self.known)))
        before, epoch = self.snapshot, self.known[worker] - lives_ago
        heard = {view.worker_id for view in before.workers}
        if epoch < 0 or (not lives_ago and worker not in heard):
            return  # no earlier report exists
        late = report(worker, f"{epoch:04}", 10**6 if lives_ago else 0)
        assert not self.run_on_all(lambda store: store.call(PublishReport(late)))
        assert comparable(self.snapshot) == comparable(before)

    # --- gateways ---------------------------------------------------------------------------------

    @rule(
        request=requests,
        tokens=st.integers(1, 120),
        offered=st.lists(
            st.tuples(workers, st.integers(0, 4), st.integers(0, 2), st.integers(0, 1)), max_size=4
        ),
        quota_tokens=st.none() | st.integers(0, 60),
    )
    def reserve(
        self,
        request: str,
        tokens: int,
        offered: list[tuple[str, int, int, int]],
        quota_tokens: int | None,
    ) -> None:
        before, earlier = self.snapshot, self.active.get(request)
        seen = {view.worker_id: view for view in self._snapshot_without(request).workers}
        offers = []
        for worker, score, per_token, behind in offered:
            watermark = seen[worker].report.watermark if worker in seen and behind else 0
            epoch = f"{self.epochs[worker]:04}"
            offers.append(LeaseCandidate(worker, epoch, score / 4, per_token / 256, watermark))
        quota = (
            None if quota_tokens is None else QuotaReservation(request, "t", quota_tokens, QUOTA)
        )
        found = self.run_on_all(
            lambda store: store.call(ReserveLease(request, tokens, offers, TTL_S, quota))
        )
        if found.shortage is not None:
            assert found.lease is None
            if earlier is not None:
                self.active[request] = earlier
            assert comparable(self.snapshot) == comparable(before)
            return
        fit = [
            offer
            for offer in offers
            if fits(seen.get(offer.worker_id), offer, tokens)
            and self._first_claimant(offer.worker_id) in (None, request)
        ]
        self.held.pop(request, None)
        if not fit:
            assert found.lease is None
            assert found.refusal is not None
            self._check_refusal(found.refusal, offers, seen)
            return
        assert found.lease is not None
        costs = [offer.score + offer.score_per_token * self._behind(offer) for offer in fit]
        best = fit[costs.index(min(costs))]
        assert (found.lease.worker_id, found.behind_tokens) == (best.worker_id, self._behind(best))
        assert found.lease.number > max((lease.number for lease in self._leases()), default=0)
        self.held[request] = found.lease
        self._activate(found.lease)
        self.claims.pop(request, None)

    @rule(request=requests, tokens=st.integers(1, 260), offered=st.lists(workers, max_size=3))
    def claim(self, request: str, tokens: int, offered: list[str]) -> None:
        seen = {view.worker_id: view for view in self.snapshot.workers}
        offers = [LeaseCandidate(worker, f"{self.epochs[worker]:04}") for worker in offered]
        found = self.run_on_all(
            lambda store: store.call(ClaimWorker(request, tokens, offers, CLAIM_S))
        )
        before, _ = self.claims.pop(request, (None, 0.0))
        live = [offer.worker_id for offer in offers if is_live(seen.get(offer.worker_id), offer)]
        missing = {
            worker: max(0, tokens - CAPACITY[worker] + self._taken(worker))
            for worker in live
            if tokens <= CAPACITY[worker]
        }
        if not missing or request in self.active:
            assert found is None
            return
        assert found is not None
        stays = before is not None and before.worker_id in missing
        worker = before.worker_id if stays else min(missing, key=missing.__getitem__)
        epoch = f"{self.epochs[worker]:04}"
        assert found == Lease(request, worker, epoch, tokens, found.number)
        if before is not None:
            assert found.number == before.number
        else:
            assert found.number > max(
                (claim.number for claim, _ in self.claims.values()), default=0
            )
        self.claims[request] = (found, self.now_s + CLAIM_S)

    @rule(request=requests, used=st.integers(0, 60))
    def settle(self, request: str, used: int) -> None:
        self.run_on_all(lambda store: store.call(SettleQuotas([Settlement(request, used)])))

    @rule(request=requests)
    def arrive(self, request: str) -> None:
        """Record that the request has arrived at its worker, whose next report includes it."""
        lease = self.held.get(request)
        if lease is not None and int(lease.epoch) == self.epochs[lease.worker_id]:
            self.sent[lease.worker_id] = max(self.sent[lease.worker_id], lease.number)

    @rule(ended=st.sets(requests, max_size=3))
    def release(self, ended: set[str]) -> None:
        for _ in range(2):  # a second release has no effect
            self.run_on_all(lambda store: store.call(ReleaseLeases(sorted(ended))))
            for request in ended:
                self.held.pop(request, None)
                self.active.pop(request, None)
                self.claims.pop(request, None)
            self.check_sums()

    @rule(skipped=st.sets(requests, max_size=4))
    def renew(self, skipped: set[str]) -> None:
        leases = [lease for request, lease in self.held.items() if request not in skipped]
        fenced = self.run_on_all(lambda store: store.call(RenewLeases(leases, TTL_S)))
        for lease in leases:
            if int(lease.epoch) < self.known.get(lease.worker_id, 0):
                assert lease.request_id in fenced
                del self.held[lease.request_id]
                continue
            assert lease.request_id not in fenced
            self._record_epoch(lease.worker_id, int(lease.epoch))
            if self.active.get(lease.request_id, (None,))[0] != lease:
                self.rebuilt.add(lease.request_id)
                self.claims.pop(lease.request_id, None)
            self._activate(lease, keep=True)

    # --- time and memory loss ---------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.25, 1.0, STALE_S, STALE_S + 0.25, 8.0]))
    def pass_time(self, seconds: float) -> None:
        for timed in self.timed:
            self.runner.run(timed.pass_time(seconds))
        self.now_s += seconds
        for held in (self.active, self.claims):
            for request, (_, until_s) in tuple(held.items()):
                if until_s <= self.now_s:
                    del held[request]
        for worker, spoken_s in self.spoken_s.items():
            if self.now_s - spoken_s > SILENCE_S:
                self.report(worker)

    @rule()
    def flush(self) -> None:
        for timed in self.timed:
            self.runner.run(timed.flush())
        self.active.clear()
        self.claims.clear()
        self.known.clear()

    # --- invariants -------------------------------------------------------------------------------

    @invariant()
    def check_totals(self) -> None:
        """Check that the stores count the same tokens, and that the ledger balances."""
        found = self.run_on_all(lambda store: store.call(ReadTotals("t")))
        assert found.reserved == found.settled + found.released + found.open

    @invariant()
    def check_sums(self) -> None:
        """Check the leased tokens against the model and the bound on leases."""
        for view in self.snapshot.workers:
            mine = [lease for lease in self._leases() if lease.worker_id == view.worker_id]
            assert view.leased_tokens == sum(lease.tokens for lease in mine) >= 0
            behind = [lease.tokens for lease in mine if lease.number > view.report.watermark]
            assert view.behind_tokens == sum(behind) >= 0
            checked = [lease.tokens for lease in mine if lease.request_id not in self.rebuilt]
            capacity = CAPACITY[view.worker_id]
            assert not capacity or sum(checked) <= capacity or len(checked) == 1
            claims = self._claims(view.worker_id)
            assert view.claimed_tokens == sum(claim.tokens for claim in claims)

    def _leases(self) -> list[Lease]:
        return [lease for lease, _ in self.active.values()]

    def _claims(self, worker: str) -> list[Lease]:
        return [claim for claim, _ in self.claims.values() if claim.worker_id == worker]

    def _first_claimant(self, worker: str) -> str | None:
        """Return the request of the first claim on a worker."""
        first = min(self._claims(worker), key=lambda claim: claim.number, default=None)
        return None if first is None else first.request_id

    def _taken(self, worker: str) -> int:
        """Return the leased and claimed tokens of a worker."""
        leases = (lease for lease in self._leases() if lease.worker_id == worker)
        return sum(held.tokens for held in (*leases, *self._claims(worker)))

    def _behind(self, offered: LeaseCandidate) -> int:
        mine = [lease for lease in self._leases() if lease.worker_id == offered.worker_id]
        return sum(lease.tokens for lease in mine if lease.number > offered.watermark)

    def _activate(self, lease: Lease, *, keep: bool = False) -> None:
        if not keep:
            self.rebuilt.discard(lease.request_id)
        self.active[lease.request_id] = (lease, self.now_s + TTL_S)

    def _record_epoch(self, worker: str, epoch: int) -> None:
        """Record the latest epoch of a worker, which ends the leases of older epochs."""
        self.spoken_s[worker] = self.now_s
        if self.known.get(worker, -1) < epoch:
            self.known[worker] = epoch
            for held in (self.active, self.claims):
                for request, (lease, _) in tuple(held.items()):
                    if lease.worker_id == worker and int(lease.epoch) < epoch:
                        del held[request]

    def _snapshot_without(self, request: str) -> Snapshot:
        """Return the snapshot without the lease of this request, which a new reservation
        replaces."""
        found = self.snapshot
        lease, _ = self.active.pop(request, (None, 0.0))
        if lease is None:
            return found
        return replace(
            found,
            workers=tuple(
                replace(view, leased_tokens=view.leased_tokens - lease.tokens)
                if view.worker_id == lease.worker_id
                else view
                for view in found.workers
            ),
        )

    def _check_refusal(
        self, refusal: Refusal, offers: list[LeaseCandidate], seen: dict[str, WorkerView]
    ) -> None:
        """Assert that `full` means that every fresh offered worker lacked capacity."""
        fresh = [
            seen[offer.worker_id]
            for offer in offers
            if offer.worker_id in seen
            and seen[offer.worker_id].age_s <= STALE_S
            and seen[offer.worker_id].report.epoch == offer.epoch
        ]
        assert (refusal is Refusal.FULL) == bool(fresh)


def is_live(view: WorkerView | None, offered: LeaseCandidate) -> bool:
    """Return whether the offered worker and epoch are live in the previous snapshot."""
    fresh = view is not None and view.age_s <= STALE_S + 1e-6
    return fresh and view.report.epoch == offered.epoch


def fits(view: WorkerView | None, offered: LeaseCandidate, tokens: int) -> bool:
    """Return whether the offer is acceptable in the previous snapshot."""
    if not is_live(view, offered):
        return False
    capacity, leased = view.report.capacity_tokens, view.leased_tokens
    return not capacity or not leased or leased + tokens <= capacity


def comparable(result: object) -> object:
    """Return the result with rounded ages, because stores keep ages in different units."""
    if not isinstance(result, Snapshot):
        return result
    rounded = (replace(view, age_s=round(view.age_s, 4)) for view in result.workers)
    return replace(result, gateways=1, workers=tuple(rounded))


def test_leases_in_memory() -> None:
    """Leases in memory respect the capacity, end once, and survive restarts and memory loss."""
    run_state_machine_as_test(
        lambda: LeaseMachine(lambda: [TimedMemory()]),
        settings=settings(max_examples=examples(150), stateful_step_count=50),
    )


def test_leases_in_redis(redis_server: RedisServer) -> None:
    """The Redis scripts return the same results as the memory store, call by call."""
    run_state_machine_as_test(
        lambda: LeaseMachine(lambda: [TimedMemory(), TimedRedis(redis_server.url)]),
        settings=settings(max_examples=examples(80), stateful_step_count=40),
    )
