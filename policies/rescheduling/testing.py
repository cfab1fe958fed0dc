"""Conformance checks for rescheduling policies."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from itertools import product

from msgspec import structs

from draftgate.policies.capacity import CapacityNeed, WorkerUsage
from draftgate.policies.protocols import ReschedulingPolicy
from draftgate.policies.rescheduling.types import (
    ChosenMove,
    PoolState,
    StreamView,
    WorkerState,
    can_exchange,
    fits,
)
from draftgate.policies.types import RequestView, ServiceLevel, WorkerLoad, WorkerSpeed
from draftgate.policies.values import replace

_URGENT = ServiceLevel(0.5, 0.01, -1)


def check_rescheduling(policy: ReschedulingPolicy) -> None:
    """Check a rescheduling policy on many pools.

    Raises:
        AssertionError: the policy breaks the contract of `ReschedulingPolicy`.
    """
    for pool, streams in _pools():
        check_moves(policy, pool, streams)
    for pool, _ in _pools():
        alone = replace(pool, workers=pool.workers[:1])
        assert not policy.choose(alone, _no_streams), "a lone worker has no destination"


def check_moves(
    policy: ReschedulingPolicy, pool: PoolState, streams: Mapping[str, Sequence[StreamView]]
) -> Sequence[ChosenMove]:
    """Check the moves that a policy chooses in a pool, and return them.

    Args:
        streams: the streams of each worker, by its id.

    Raises:
        AssertionError: the policy breaks the contract of `ReschedulingPolicy.choose`.
    """
    workers = {worker.worker_id: worker for worker in pool.workers}
    offered = {(id_, one.stream_id): one for id_, all_ in streams.items() for one in all_}

    def choose() -> Sequence[ChosenMove]:
        return policy.choose(pool, lambda worker_id: streams.get(worker_id, ()))

    moves = choose()
    assert moves == choose(), "the same pool must give the same moves"
    assert policy.reschedules or not moves, "a policy that never reschedules must not move"
    ends = [end for move in moves for end in (move.source, move.sink)]
    assert len(set(ends)) == len(ends), "a worker takes part in at most one move"
    for move in moves:
        source, sink = workers[move.source], workers[move.sink]
        stream = offered.get((move.source, move.stream_id))
        assert stream is not None, "the source must run the stream"
        assert stream.may_move, "a stream must rest after a move"
        assert not source.moving, "a worker takes part in one move at a time"
        assert not sink.moving, "a worker takes part in one move at a time"
        assert can_exchange(source, sink), "the destination must be able to take the blocks"
        assert fits(stream, sink), "the destination must have capacity"
        assert move.gain > move.threshold >= 0.0, "the gain must exceed the threshold"
        assert move.explanation, "a move needs a reason for the operator"
    return moves


def _no_streams(worker_id: str) -> Sequence[StreamView]:
    raise AssertionError(f"the streams of {worker_id} cannot move anywhere")


def _pools() -> Iterator[tuple[PoolState, dict[str, Sequence[StreamView]]]]:
    """Yield pools with idle, busy, full, leaving and different workers."""
    # running, waiting, free blocks, tokens of the head of its queue
    states = ((0, 0, 100, 0), (4, 0, 60, 0), (8, 0, 4, 0), (8, 3, 0, 500), (16, 0, 20, 0))
    speeds = (WorkerSpeed(0.02, 1e-4, 1e-4, 0.01, 1e-4, 2e-5), WorkerSpeed())
    heads = (None, CapacityNeed(1, 700, 700), CapacityNeed(1, 2000, 2000))
    for speed, head, leaving, moving, urgent in product(
        speeds, heads, (None, 1), (None, 2), (0, 1)
    ):
        workers, streams = [], dict[str, Sequence[StreamView]]()
        for number, (running, waiting, free, tokens) in enumerate(states * 2):
            load = WorkerLoad(running, waiting, free, 100, 0.1 * running, 0.6, ("ngram",))
            load = structs.replace(
                load, max_sequences=16, speed=speed, head_tokens=tokens, urgent=urgent
            )
            flags = number == leaving, number != 5, number == moving
            name = f"w-{number}"
            usage = WorkerUsage(load, running + waiting, running)
            workers.append(WorkerState(name, usage, "a" if number % 4 else "b", *flags))
            streams[name] = [_stream(name, one, running, urgent) for one in range(running)]
        yield PoolState(tuple(workers), lambda _source, _sink: 1e9, head), streams


def _stream(worker: str, number: int, running: int, urgent: int) -> StreamView:
    service = _URGENT if urgent and not number else ServiceLevel()
    request = RequestView(100, 1000, 0.8, service=service)
    moved_s = 1.0 if number == 1 else math.inf
    tokens = 1200 // running + number
    return StreamView(f"{worker}/{number}", tokens, 300.0, 6144, request, moved_s=moved_s)
