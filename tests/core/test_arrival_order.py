"""The order of sequences of several classes that move between workers, under random steps."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import pairwise

from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.core.queues import CLASS_S
from draftgate.backends.core.sequence import Sequence, SequenceState
from draftgate.backends.types import FinishReason, ResumedChoice
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import ServiceLevel
from draftgate.policies.values import replace
from tests.core.fakes import FakeExecutor, request
from tests.core.scheduler_harness import SchedulerHarness

WORKERS = 3
BLOCKS = 12


@dataclass
class Pool:
    """Small workers whose sequences move from one to another.

    Attributes:
        arrived_s: time of arrival of each request at its first worker.
    """

    workers: list[SchedulerHarness] = field(
        default_factory=lambda: [SchedulerHarness(BLOCKS, policy=Off()) for _ in range(WORKERS)]
    )
    arrived_s: dict[str, float] = field(default_factory=dict)
    now_s: float = 0.0

    def arrive(self, place: int, prompt: int, priority: int) -> None:
        """Send a new request to a worker."""
        service = ServiceLevel(priority=priority)
        new = request(prompt, max_tokens=24, service=service, ignore_eos=True)
        self.arrived_s[new.request_id] = self.now_s
        self._add(place, Sequence.for_choice(self._key(place), new, ResumedChoice(0, ())))

    def move(self, place: int, sink: int, index: int) -> None:
        """Move a sequence of a worker to another one."""
        open_ = self.open(place)
        if not open_:
            return
        moved = open_[index % len(open_)]
        self.workers[place].scheduler.finish(moved, FinishReason.ABORT)
        output = tuple(moved.token_ids[moved.prompt_tokens :])
        age_s = self.now_s - self.arrived_s[moved.request.request_id]
        rest = replace(moved.request, age_s=age_s)
        self._add(sink, Sequence.for_choice(self._key(sink), rest, ResumedChoice(0, output)))

    def step(self, place: int) -> None:
        """Run a step of a worker, in which no sequence is preempted before a younger one."""
        scheduler = self.workers[place].scheduler
        before = scheduler.running
        plan = scheduler.plan(self.now_s)
        if plan is None:
            return
        planned = {work.sequence.key for work in plan.work}
        kept = [self.rank(one) for one in scheduler.running if one.key not in planned]
        for one in before:
            if one.state is SequenceState.WAITING:
                assert all(rank < self.rank(one) for rank in kept)
        scheduler.apply(plan, FakeExecutor().execute(plan), self.now_s)

    def rank(self, sequence: Sequence) -> float:
        """Return the time by which a sequence is ranked."""
        request = sequence.request
        return self.arrived_s[request.request_id] + CLASS_S * request.service.priority

    def open(self, place: int) -> list[Sequence]:
        """Return the sequences of a worker."""
        ended = SequenceState.FINISHED
        return [one for one in self.workers[place].sequences if one.state is not ended]

    def check(self) -> None:
        """Check that every queue is in order of class and arrival at the first worker."""
        for worker in self.workers:
            ranks = map(self.rank, worker.scheduler.waiting)
            assert all(one < other for one, other in pairwise(ranks))

    def _key(self, place: int) -> int:
        return len(self.workers[place].sequences)

    def _add(self, place: int, sequence: Sequence) -> None:
        self.workers[place].sequences.append(sequence)
        self.workers[place].scheduler.add(sequence, self.now_s)


places = st.integers(0, WORKERS - 1)
actions = st.one_of(
    st.tuples(st.just("arrive"), places, st.integers(1, 20), st.integers(-1, 1)),
    st.tuples(st.just("move"), places, places, st.integers(0, 5)),
    st.tuples(st.just("step"), places),
)


@given(st.lists(actions, max_size=60))
def test_moved_sequences_keep_their_order_of_arrival(
    chosen: list[tuple[str, int, int, int]],
) -> None:
    """Queues stay in order of class and arrival at the first worker, and the last is preempted.

    A request of a lower class that is older by `CLASS_S` precedes one of a higher class.
    """
    pool = Pool()
    for name, *values in chosen:
        pool.now_s += 1.375  # exact in floating point, and no ranks of two requests are equal
        getattr(pool, name)(*values)
        pool.check()


def test_moved_sequence_is_not_preempted_before_a_younger_one() -> None:
    """On a full worker, the sequence that arrived last at its first worker is preempted."""
    pool = Pool()
    pool.arrive(0, 12, 0)
    for _ in range(2):
        pool.now_s += 0.25
        pool.arrive(1, 12, 0)
        pool.step(1)
    pool.now_s += 0.25
    pool.step(0)
    pool.move(0, 1, 0)
    for _ in range(40):
        pool.now_s += 0.25
        pool.step(1)
    young, old = pool.workers[1].sequences[1], pool.workers[1].sequences[2]
    assert young.preemptions
    assert not old.preemptions
