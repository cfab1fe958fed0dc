"""Leases under any order of events: one state machine on the memory store and on Redis.

All stores execute every step and must answer alike. A simple model computes the expected sums.
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

from draftgate.gateway.state.store import (
    STALE_S,
    Lease,
    LeaseCandidate,
    Refusal,
    Snapshot,
    Store,
    WorkerView,
)
from tests.gateway.redis_server import RedisServer
from tests.gateway.stores import Timed, TimedMemory, TimedRedis, report

T = TypeVar("T")

CAPACITY = {"w0": 100, "w1": 250, "w2": 0}
REQUESTS = [f"r{index}" for index in range(8)]
TTL_S = 10.0
SILENCE_S = 40.0
"""Longest silence of a worker, because a forgotten worker could return with an older epoch."""

workers = st.sampled_from(sorted(CAPACITY))
requests = st.sampled_from(REQUESTS)


class Leasing(RuleBasedStateMachine):
    """Workers that report, restart and leave; gateways that lease, renew and release."""

    def __init__(self, opened: Callable[[], list[Timed]]) -> None:
        super().__init__()
        self.runner = asyncio.Runner()
        self.timed = self.runner.run(self._open(opened))
        self.epochs = dict.fromkeys(CAPACITY, 0)
        self.known: dict[str, int] = {}  # epochs that the store knows
        self.seqs = Counter[str]()
        self.sent = Counter[str]()  # the last lease number that reached each worker
        self.held: dict[str, Lease] = {}  # by gateways
        self.living: dict[str, tuple[Lease, float]] = {}  # leases in the store and their expiry
        self.rebuilt: set[str] = set()  # the part of them that skipped the capacity check
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

    def all_do(self, call: Callable[[Store], Awaitable[T]]) -> T:
        """Execute a step on every store; the answers must be equal."""

        async def done(store: Store) -> T:
            return await call(store)

        first, *others = [self.runner.run(done(timed.store)) for timed in self.timed]
        for other in others:
            assert comparable(other) == comparable(first)
        return first

    @property
    def snapshot(self) -> Snapshot:
        return self.all_do(lambda store: store.snapshot())

    # --- workers ----------------------------------------------------------------------------------

    @rule(worker=workers)
    def report(self, worker: str) -> None:
        self.seqs[worker] += 1
        told = report(
            worker,
            f"{self.epochs[worker]:04}",
            self.seqs[worker],
            capacity_tokens=CAPACITY[worker],
            watermark=self.sent[worker],
        )
        assert self.all_do(lambda store: store.publish(told))
        self._entered(worker, self.epochs[worker])

    @rule(worker=workers)
    def begin_anew(self, worker: str) -> None:
        self.epochs[worker] += 1
        self.sent[worker] = 0
        self.report(worker)

    @rule(worker=workers)
    def leave(self, worker: str) -> None:
        self.seqs[worker] += 1
        epoch, seq = f"{self.epochs[worker]:04}", self.seqs[worker]
        self.all_do(lambda store: store.withdraw(worker, epoch, seq))
        self._entered(worker, self.epochs[worker])
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
        assert not self.all_do(lambda store: store.publish(late))
        assert comparable(self.snapshot) == comparable(before)

    # --- gateways ---------------------------------------------------------------------------------

    @rule(
        request=requests,
        tokens=st.integers(1, 120),
        offered=st.lists(
            st.tuples(workers, st.integers(0, 4), st.integers(0, 2), st.integers(0, 1)), max_size=4
        ),
    )
    def reserve(self, request: str, tokens: int, offered: list[tuple[str, int, int, int]]) -> None:
        seen = {view.worker_id: view for view in self._snapshot_without(request).workers}
        offers = []
        for worker, score, per_token, behind in offered:
            watermark = seen[worker].report.watermark if worker in seen and behind else 0
            epoch = f"{self.epochs[worker]:04}"
            offers.append(LeaseCandidate(worker, epoch, score / 4, per_token / 256, watermark))
        found = self.all_do(lambda store: store.reserve(request, tokens, offers, TTL_S))
        fit = [one for one in offers if fits(seen.get(one.worker_id), one, tokens)]
        self.held.pop(request, None)
        if not fit:
            assert found.lease is None
            assert found.refusal is not None
            self._check_refusal(found.refusal, offers, seen)
            return
        assert found.lease is not None
        costs = [one.score + one.score_per_token * self._behind(one) for one in fit]
        best = fit[costs.index(min(costs))]
        assert (found.lease.worker_id, found.behind_tokens) == (best.worker_id, self._behind(best))
        assert found.lease.number > max((one.number for one in self._leases()), default=0)
        self.held[request] = found.lease
        self._live(found.lease)

    @rule(request=requests)
    def arrive(self, request: str) -> None:
        """Let the request arrive at the worker, whose next report includes it."""
        lease = self.held.get(request)
        if lease is not None and int(lease.epoch) == self.epochs[lease.worker_id]:
            self.sent[lease.worker_id] = max(self.sent[lease.worker_id], lease.number)

    @rule(ended=st.sets(requests, max_size=3))
    def release(self, ended: set[str]) -> None:
        for _ in range(2):  # repeating it changes nothing
            self.all_do(lambda store: store.release(sorted(ended)))
            for request in ended:
                self.held.pop(request, None)
                self.living.pop(request, None)
            self.sums()

    @rule(skipped=st.sets(requests, max_size=4))
    def renew(self, skipped: set[str]) -> None:
        leases = [lease for request, lease in self.held.items() if request not in skipped]
        fenced = self.all_do(lambda store: store.renew(leases, TTL_S))
        for lease in leases:
            if int(lease.epoch) < self.known.get(lease.worker_id, 0):
                assert lease.request_id in fenced
                del self.held[lease.request_id]
                continue
            assert lease.request_id not in fenced
            self._entered(lease.worker_id, int(lease.epoch))
            if self.living.get(lease.request_id, (None,))[0] != lease:
                self.rebuilt.add(lease.request_id)
            self._live(lease, keep=True)

    # --- what happens to all ----------------------------------------------------------------------

    @rule(seconds=st.sampled_from([0.25, 1.0, STALE_S, STALE_S + 0.25, 8.0]))
    def pass_time(self, seconds: float) -> None:
        for timed in self.timed:
            self.runner.run(timed.pass_time(seconds))
        self.now_s += seconds
        for request, (_, until_s) in tuple(self.living.items()):
            if until_s <= self.now_s:
                del self.living[request]
        for worker, spoken_s in self.spoken_s.items():
            if self.now_s - spoken_s > SILENCE_S:
                self.report(worker)

    @rule()
    def flush(self) -> None:
        for timed in self.timed:
            self.runner.run(timed.flush())
        self.living.clear()
        self.known.clear()

    # --- what must be true ------------------------------------------------------------------------

    @invariant()
    def sums(self) -> None:
        """Check leased tokens against the model, and the bound on leases."""
        for view in self.snapshot.workers:
            mine = [one for one in self._leases() if one.worker_id == view.worker_id]
            assert view.leased_tokens == sum(one.tokens for one in mine) >= 0
            behind = [one.tokens for one in mine if one.number > view.report.watermark]
            assert view.behind_tokens == sum(behind) >= 0
            asked = [one.tokens for one in mine if one.request_id not in self.rebuilt]
            capacity = CAPACITY[view.worker_id]
            assert not capacity or sum(asked) <= capacity or len(asked) == 1

    def _leases(self) -> list[Lease]:
        return [lease for lease, _ in self.living.values()]

    def _behind(self, offered: LeaseCandidate) -> int:
        mine = [one for one in self._leases() if one.worker_id == offered.worker_id]
        return sum(one.tokens for one in mine if one.number > offered.watermark)

    def _live(self, lease: Lease, *, keep: bool = False) -> None:
        if not keep:
            self.rebuilt.discard(lease.request_id)
        self.living[lease.request_id] = (lease, self.now_s + TTL_S)

    def _entered(self, worker: str, epoch: int) -> None:
        """Whether the store learns an epoch that no newer one fences."""
        self.spoken_s[worker] = self.now_s
        if self.known.get(worker, -1) < epoch:
            self.known[worker] = epoch
            for request, (lease, _) in tuple(self.living.items()):
                if lease.worker_id == worker and int(lease.epoch) < epoch:
                    del self.living[request]

    def _snapshot_without(self, request: str) -> Snapshot:
        """The snapshot as if a request had no lease, which it gives up in any case."""
        found = self.snapshot
        lease, _ = self.living.pop(request, (None, 0.0))
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
        """Check that `full` means that no offered worker had enough capacity."""
        fresh = [
            seen[one.worker_id]
            for one in offers
            if one.worker_id in seen
            and seen[one.worker_id].age_s <= STALE_S
            and seen[one.worker_id].report.epoch == one.epoch
        ]
        assert (refusal is Refusal.FULL) == bool(fresh)


def fits(view: WorkerView | None, offered: LeaseCandidate, tokens: int) -> bool:
    """Whether an offer is acceptable by the previous snapshot."""
    if view is None or view.report.epoch != offered.epoch or view.age_s > STALE_S + 1e-6:
        return False
    capacity, leased = view.report.capacity_tokens, view.leased_tokens
    return not capacity or not leased or leased + tokens <= capacity


def comparable(answer: object) -> object:
    """An answer with rounded ages, because the stores keep them in different units."""
    if not isinstance(answer, Snapshot):
        return answer
    rounded = (replace(view, age_s=round(view.age_s, 4)) for view in answer.workers)
    return replace(answer, gateways=1, workers=tuple(rounded))


def test_leases_in_memory() -> None:
    """Leases never exceed the capacity, use it fully, end once, are fenced by a restart, and are
    restored."""
    run_state_machine_as_test(
        lambda: Leasing(lambda: [TimedMemory()]),
        settings=settings(max_examples=150, stateful_step_count=50),
    )


def test_leases_in_redis(redis_server: RedisServer) -> None:
    """The scripts do the same as the memory store, call by call."""
    run_state_machine_as_test(
        lambda: Leasing(lambda: [TimedMemory(), TimedRedis(redis_server.url)]),
        settings=settings(max_examples=40, stateful_step_count=40),
    )
