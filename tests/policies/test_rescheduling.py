"""The contract of rescheduling policies, and the decisions of each policy."""

from __future__ import annotations

import math
from copy import deepcopy
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st
from msgspec import structs

from draftgate.policies.capacity import CapacityNeed, WorkerUsage, missing_tokens
from draftgate.policies.moves import MoveReason
from draftgate.policies.protocols import ReschedulingPolicy
from draftgate.policies.registry import rescheduling_policy
from draftgate.policies.rescheduling.least_time import LeastTime
from draftgate.policies.rescheduling.llumnix import (
    HIGH_STEPS,
    LOW_STEPS,
    Llumnix,
    freeness,
    steps_to_full,
)
from draftgate.policies.rescheduling.testing import check_moves, check_rescheduling
from draftgate.policies.rescheduling.types import (
    LEAST_INTERVAL_S,
    ChosenMove,
    PoolState,
    StreamView,
    WorkerState,
    with_stream,
)
from draftgate.policies.types import RequestView, ServiceLevel, WorkerLoad, WorkerSpeed
from draftgate.policies.values import replace

SPECS = ("off", "llumnix", "llumnix:3,3", "least_time")
BLOCKS, BLOCK = 800, 16
SPEED = WorkerSpeed(0.03, 2e-4, 3e-4, 0.02, 3e-4, 1e-4)
SLOW = replace(SPEED, step_s=0.06, step_sequence_s=1e-3, tpot_s=0.09)
URGENT = ServiceLevel(priority=-1)


@dataclass
class Pool:
    """Workers and their streams, to which moves are applied at once."""

    workers: dict[str, WorkerState]
    streams: dict[str, list[StreamView]]
    head: CapacityNeed | None = None

    @property
    def view(self) -> PoolState:
        """The policy's view."""
        return PoolState(tuple(self.workers.values()), lambda _source, _sink: 2.55e9, self.head)

    def choose(self, policy: ReschedulingPolicy) -> list[ChosenMove]:
        """Return the moves of a policy, which keep its contract."""
        return list(check_moves(policy, self.view, self.streams))

    def apply(self, move: ChosenMove) -> None:
        """Move a stream, and let enough time pass for its next move."""
        names = [one.stream_id for one in self.streams[move.source]]
        stream = self.streams[move.source].pop(names.index(move.stream_id))
        self.streams[move.sink].append(replace(stream, moves=stream.moves + 1))
        for end, sign in ((move.source, -1), (move.sink, 1)):
            self.workers[end] = with_stream(self.workers[end], stream, sign)
        self.admit()

    def admit(self) -> None:
        """Start the request at the head of the queue on a worker with room."""
        for name, worker in self.workers.items():
            if self.head is not None and not missing_tokens(worker.usage, self.head):
                new = stream("head", self.head.prompt_tokens)
                self.streams[name].append(new)
                self.workers[name] = with_stream(worker, new, 1)
                self.head = None


def stream(name: str, tokens: int, left: float = 300.0, **more: object) -> StreamView:
    """Return a stream of the usual class unless `service` is given."""
    service = more.pop("service", ServiceLevel())
    request = RequestView(tokens, 1000, 0.0, service=service)
    return StreamView(name, tokens, left, 6144, request, **more)


def request(prompt_tokens: int) -> CapacityNeed:
    """Return the need of a request for one token."""
    return CapacityNeed(1, prompt_tokens, prompt_tokens + 1)


def pool(*workers: list[StreamView], speeds: tuple[WorkerSpeed, ...] = (SPEED,)) -> Pool:
    """Return a pool of workers with these streams, and with each speed in turn."""
    found = Pool({}, {})
    for number, streams in enumerate(workers):
        name, speed = f"w-{number}", speeds[number % len(speeds)]
        load = WorkerLoad(0, 0, BLOCKS, BLOCKS, 0.0, 0.5, (), max_sequences=64, speed=speed)
        worker = WorkerState(name, WorkerUsage(load), "f")
        for one in streams:
            worker = with_stream(worker, one, 1)
        found.workers[name], found.streams[name] = worker, list(streams)
    return found


def changed(found: Pool, name: str, **fields: object) -> Pool:
    """Return a pool in which the load of a worker has other fields."""
    worker = found.workers[name]
    usage = replace(worker.usage, load=structs.replace(worker.load, **fields))
    found.workers[name] = replace(worker, usage=usage)
    return found


def full(name: str, count: int = 10) -> list[StreamView]:
    """Return streams that nearly fill a worker."""
    return [stream(f"{name}/{number}", 1270 + number) for number in range(count)]


@st.composite
def pools(draw: st.DrawFn) -> Pool:
    """Draw pools of two to five workers whose memory holds their streams."""
    counts = draw(st.lists(st.integers(0, 8), min_size=2, max_size=4))
    workers = [
        [
            stream(
                f"{number}/{one}",
                draw(st.integers(16, 1500)),
                draw(st.floats(1.0, 2000.0)),
                service=ServiceLevel(priority=draw(st.sampled_from([-1, 0, 0, 0, 1]))),
            )
            for one in range(count)
        ]
        for number, count in enumerate(counts)
    ]
    found = pool(*workers, speeds=draw(st.sampled_from([(SPEED,), (SPEED, SLOW)])))
    found.head = draw(st.sampled_from([None, request(4000), request(12_000)]))
    found.admit()
    return found


def recorded(
    head: int, *workers: tuple[tuple[int, float, int], ...], slow: tuple[int, ...] = ()
) -> Pool:
    """Return a pool from the tokens, the rest and the priority of each stream.

    Args:
        slow: numbers of the workers with slow steps.
    """
    streams = [
        [
            stream(f"{number}/{one}", tokens, left, service=ServiceLevel(priority=priority))
            for one, (tokens, left, priority) in enumerate(each)
        ]
        for number, each in enumerate(workers)
    ]
    speeds = tuple(SLOW if number in slow else SPEED for number in range(len(workers)))
    found = pool(*streams, speeds=speeds)
    found.head = request(head)
    return found


def restless_pools() -> list[Pool]:
    """Return pools in which streams moved back and forth forever in earlier versions."""
    return [
        # The plan to free the second worker did not pay, and one to free the first one did.
        recorded(
            12_000,
            ((1322, 1.0, -1),),
            ((2860, 1.0, 1), (1183, 1.0, -1)),
            ((851, 1.0, 0), (1462, 300, 0)),
            ((511, 2000, -1), (5869, 1.0, 0), (267, 300, 0)),
            slow=(1, 3),
        ),
        recorded(
            12_000,
            (
                *((1031, 50, 1), (612, 2000, 0), (411, 1.0, 1)),
                *((431, 2000, -1), (391, 50, 0), (488, 1.0, 0)),
            ),
            (
                *((3117, 50, 1), (979, 2000, 0), (1312, 2000, 0), (297, 2000, 0)),
                *((1111, 50, -1), (978, 50, 0), (434, 300, 1)),
            ),
            slow=(1,),
        ),
        # Headroom for an urgent stream filled the memory that was freed for the next request.
        recorded(
            12_000,
            ((1175, 300, 0), (1313, 300, 0), (4011, 50, 1), (1478, 50, -1)),
            ((1460, 2000, 0), (682, 1.0, 0), (1288, 1.0, 0)),
        ),
    ]


@pytest.mark.parametrize("spec", SPECS)
def test_shipped_policy_keeps_its_contract(spec: str) -> None:
    """Every shipped policy is found by its name and keeps the contract of `ReschedulingPolicy`."""
    policy = rescheduling_policy(spec)
    assert isinstance(policy, ReschedulingPolicy)
    assert policy.name == spec
    check_rescheduling(policy)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("nearest", r"known: least_time, llumnix\[:LOW,HIGH\], off"),
        ("off:2", "takes no argument"),
        ("llumnix:10", "needs two numbers"),
        ("llumnix:9,8", "must not exceed"),
    ],
)
def test_wrong_name_is_explained(spec: str, words: str) -> None:
    """The error for a wrong policy or argument says what was expected."""
    with pytest.raises(ValueError, match=words):
        rescheduling_policy(spec)


@pytest.mark.parametrize("spec", SPECS)
@given(found=pools())
def test_pool_without_arrivals_comes_to_rest(spec: str, found: Pool) -> None:
    """Every move keeps the contract, and no move follows a bounded number of moves."""
    check_rest(rescheduling_policy(spec), found)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("number", range(3))
def test_restless_pool_comes_to_rest(spec: str, number: int) -> None:
    """Pools of earlier counterexamples come to rest, too."""
    check_rest(rescheduling_policy(spec), restless_pools()[number])


def check_rest(policy: ReschedulingPolicy, found: Pool) -> None:
    """Check that a pool comes to rest."""
    streams = sum(map(len, found.streams.values()))
    for _ in range(10 * streams + 1):
        moves = found.choose(policy)
        if not moves:
            break
        for move in moves:
            found.apply(move)
    assert not found.choose(policy)


def check_tails(policy: ReschedulingPolicy, found: Pool) -> None:
    """Check that no move of a pool delays the next request or the first preemption."""
    for move in found.choose(policy):
        source, sink = found.workers[move.source], found.workers[move.sink]
        lacking = least_lacking(found)
        after = deepcopy(found)
        after.apply(move)
        if move.reason is MoveReason.BALANCE:
            alone = deepcopy(found)
            alone.head = None  # it may get the memory that the move frees
            alone.apply(move)
            steps = [steps_to_full(alone.workers[end]) for end in (move.source, move.sink)]
            assert min(steps) > min(steps_to_full(source), HIGH_STEPS)
            assert steps[1] >= LOW_STEPS
        if move.reason is not MoveReason.MAKE_ROOM and lacking:
            assert least_lacking(after) <= lacking
        assert sink.free_tokens > 0


def least_lacking(found: Pool) -> int:
    """Return the tokens that the worker with the most room lacks for the next request."""
    if found.head is None:
        return 0
    return min(missing_tokens(one.usage, found.head) for one in found.workers.values())


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
@given(found=pools())
def test_no_move_predicts_a_worse_tail(spec: str, found: Pool) -> None:
    """The memory of both workers lasts longer than before, or long, and the next request waits for
    no more memory."""
    check_tails(rescheduling_policy(spec), found)


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
@pytest.mark.parametrize("number", range(3))
def test_no_move_in_a_restless_pool_predicts_a_worse_tail(spec: str, number: int) -> None:
    """In recorded pools, no move takes the memory that the next request waits for."""
    policy, found = rescheduling_policy(spec), restless_pools()[number]
    while moves := found.choose(policy):
        check_tails(policy, found)
        for move in moves:
            found.apply(move)


@pytest.mark.parametrize("spec", SPECS)
@pytest.mark.parametrize("count", [0, 1, 9])
def test_equal_workers_stay_at_rest(spec: str, count: int) -> None:
    """Workers with equal streams exchange none."""
    equal = [[stream(f"{worker}/{one}", 1000) for one in range(count)] for worker in range(4)]
    assert not pool(*equal).choose(rescheduling_policy(spec))


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
def test_full_worker_gives_a_stream_to_an_idle_worker(spec: str) -> None:
    """A stream leaves a worker that will run out of memory, for one with free memory."""
    (move,) = pool(full("a"), []).choose(rescheduling_policy(spec))
    assert (move.source, move.sink) == ("w-0", "w-1")


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
def test_stream_rests_after_a_move(spec: str) -> None:
    """A stream does not move for `LEAST_INTERVAL_S` after a move."""
    policy = rescheduling_policy(spec)
    moved = [replace(one, moved_s=LEAST_INTERVAL_S - 0.1) for one in full("a")]
    assert not pool(moved, []).choose(policy)
    rested = [replace(one, moved_s=LEAST_INTERVAL_S) for one in full("a")]
    assert pool(rested, []).choose(policy)


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
def test_leaving_worker_is_emptied(spec: str) -> None:
    """All streams leave a leaving worker, even if the others are slower and fuller."""
    policy = rescheduling_policy(spec)
    found = pool([stream("a", 500), stream("b", 700)], full("c", 8))
    found.workers["w-0"] = replace(found.workers["w-0"], leaving=True)
    for _ in range(2):
        (move,) = found.choose(policy)
        assert move.reason is MoveReason.DRAIN
        found.apply(move)
    assert not found.streams["w-0"]


def test_freeness_counts_steps_until_the_memory_is_full() -> None:
    """Freeness is the free memory per running sequence, as in Llumnix."""
    found = pool([stream("a", 1600), stream("b", 3200)], [])
    assert freeness(found.workers["w-0"]) == (BLOCKS * BLOCK - 4800) / 2
    assert freeness(found.workers["w-1"]) == BLOCKS * BLOCK


def test_head_of_a_queue_lowers_freeness() -> None:
    """The demand of the first waiting sequence counts as used, and may make freeness negative."""
    found = changed(pool([stream("a", 1600)]), "w-0", waiting=2, head_tokens=BLOCKS * BLOCK)
    assert freeness(found.workers["w-0"]) == -1600


def test_leaving_worker_has_no_freeness() -> None:
    """Freeness of a leaving worker is minus infinity, even without streams."""
    found = pool([])
    assert freeness(replace(found.workers["w-0"], leaving=True)) == -math.inf


def test_urgent_stream_keeps_headroom() -> None:
    """Usual streams leave the worker of an urgent stream until an eighth of its memory is used."""
    found = pool([stream("urgent", 800, service=URGENT), *full("a", 4)], [], [])
    left = []
    while moves := found.choose(Llumnix()):
        for move in moves:
            left.append(move.stream_id)
            found.apply(move)
    assert left
    assert "urgent" not in left
    assert found.workers["w-0"].used_tokens <= BLOCKS * BLOCK / 8


def test_llumnix_moves_low_priority_and_then_what_frees_most() -> None:
    """The victim has the lowest priority, and its move frees most memory per sequence."""
    low = ServiceLevel(priority=1)
    streams = [*full("a", 8), stream("long", 900, service=low), stream("short", 100, service=low)]
    (move,) = pool([*streams, stream("usual", 1000)], []).choose(Llumnix("llumnix", 100.0, 100.0))
    assert move.stream_id == "long"


def test_no_worker_is_filled_for_a_long_prompt() -> None:
    """A prompt without room anywhere does not use up the memory in which short ones still fit."""
    streams = [stream(f"a/{number}", 1200) for number in range(10)]
    for others, moves in ((9, 0), (8, 1)):
        found = pool(streams, full("b", others))
        changed(found, "w-0", head_tokens=BLOCKS * BLOCK // 2, waiting=1)
        sink = found.workers["w-1"]
        assert freeness(sink) > HIGH_STEPS
        left = steps_to_full(with_stream(sink, streams[0], 1))
        assert left > 0
        assert (left >= LOW_STEPS) == bool(moves)
        assert len(found.choose(Llumnix())) == moves


def test_least_time_needs_twice_the_cost() -> None:
    """A move whose predicted gain is less than twice its cost is not chosen."""
    streams = [stream(f"a/{one}", 600, left=400.0) for one in range(8)]
    found = pool(streams, [])
    (move,) = found.choose(LeastTime())
    slow_link = replace(found.view, link=lambda _source, _sink: 1e6)
    assert not LeastTime().choose(slow_link, found.streams.__getitem__)
    assert move.gain > move.threshold


def test_least_time_needs_more_gain_for_each_earlier_move() -> None:
    """The threshold doubles with each move that a stream has made."""
    found = pool([stream(f"a/{one}", 600, left=400.0) for one in range(8)], [])
    again = pool([replace(one, moves=1) for one in found.streams["w-0"]], [])
    (first,), (second,) = found.choose(LeastTime()), again.choose(LeastTime())
    assert second.threshold == pytest.approx(2 * first.threshold)


def test_least_time_leaves_a_slow_worker() -> None:
    """A stream moves from a slow worker to an idle fast one, and never back."""
    slow = replace(SPEED, step_s=0.06, tpot_s=0.06)
    (move,) = pool([stream("a", 500)], [], speeds=(slow, SPEED)).choose(LeastTime())
    assert (move.source, move.sink) == ("w-0", "w-1")
    assert not pool([stream("a", 500)], [], speeds=(SPEED, slow)).choose(LeastTime())


def test_least_time_moves_to_where_drafts_pay() -> None:
    """Of two workers with equal steps, streams leave the one whose price makes drafts worthless."""
    found = pool([stream(f"a/{one}", 300) for one in range(3)], [])
    for name, price in (("w-0", 0.9), ("w-1", 0.0)):
        changed(found, name, price=price, proposers=("ngram",), acceptance=0.8)
    (with_drafts,) = found.choose(LeastTime())
    for name in found.workers:
        changed(found, name, proposers=())
    without = found.choose(LeastTime())
    assert not without or without[0].gain < with_drafts.gain / 2


def test_least_time_prefers_late_and_urgent_streams() -> None:
    """Of streams with equal work, the one with the highest weight moves."""
    tpot = ServiceLevel(tpot_s=0.03)
    streams = [stream("a", 500), stream("late", 500, service=tpot, laxity_s=-1.0)]
    slow = replace(SPEED, step_s=0.06, tpot_s=0.06)
    (move,) = pool(streams, [], speeds=(slow, SPEED)).choose(LeastTime())
    assert move.stream_id == "late"


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
def test_room_for_the_next_request_costs_the_fewest_bytes(spec: str) -> None:
    """The worker is freed whose streams release the missing memory at the fewest bytes."""
    workers = [
        [stream(f"{number}/{one}", tokens) for one, tokens in enumerate(lengths)]
        for number, lengths in enumerate([(4000, 4000), (4000, 700, 3300), (4000, 4000)])
    ]
    found = pool(*workers)
    found.head = request(BLOCKS * BLOCK - 8000 + 600)
    moves = [
        one for one in found.choose(rescheduling_policy(spec)) if one.reason is MoveReason.MAKE_ROOM
    ]
    assert [(move.source, move.stream_id) for move in moves] == [("w-1", "1/1")]


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
def test_stream_moves_only_to_capacity_that_the_gateway_can_reserve(spec: str) -> None:
    """A worker whose free memory is promised to other sequences takes no stream."""
    found, policy = pool(full("a"), full("b", 5)), rescheduling_policy(spec)
    assert found.choose(policy)
    worker = found.workers["w-1"]
    usage = replace(worker.usage, sequences=6, unstarted_prompt_tokens=worker.free_tokens)
    found.workers["w-1"] = replace(worker, usage=usage)
    assert not found.choose(policy)
    found.workers["w-1"] = replace(worker, leased_tokens=BLOCKS * BLOCK - 2000)
    assert found.choose(policy)
    found.streams["w-0"] = [replace(one, lease_tokens=2001) for one in found.streams["w-0"]]
    assert not found.choose(policy)


@pytest.mark.parametrize("spec", ["llumnix", "least_time"])
def test_no_room_is_made_for_a_request_that_fits(spec: str) -> None:
    """A request that waits for another reason than memory moves no stream."""
    found = pool(*[[stream(f"{number}", 4000)] for number in range(3)])
    found.head = request(4000)
    reasons = [move.reason for move in found.choose(rescheduling_policy(spec))]
    assert MoveReason.MAKE_ROOM not in reasons
