"""Making room for the next request in the queue by moving streams away from one worker.

All workers together may have enough free memory for a prompt that fits on none of them
(fragmentation). The policy then chooses the streams of one worker that release the missing memory
at the least cost. Requests in the queue keep their order, so the freed memory accumulates until the
request at the head fits.

The gain is the wait that the moves save: the time until the first worker would have released enough
memory without them. It is the same for all choices, so each move lowers the least cost of the
remaining ones, and moves never go back and forth.
"""

from __future__ import annotations

from collections.abc import Sequence
from heapq import nsmallest
from statistics import fmean
from typing import Final

from draftgate.policies.capacity import CapacityNeed, missing_tokens
from draftgate.policies.free_memory import release_rate
from draftgate.policies.moves import MoveReason
from draftgate.policies.rescheduling.types import (
    ChosenMove,
    PoolState,
    StreamsOf,
    StreamView,
    WorkerState,
    can_exchange,
    fits,
    move_cost_s,
    with_stream,
)
from draftgate.policies.values import replace

COST_FACTOR: Final = 2.0
"""A move must save at least this many times its cost, because predictions have errors. The design
requires 2."""

_MOST_COMPARED: Final = 4
"""Workers whose streams are compared, those that lack the least memory. (Chosen, not tuned,
2026-11-23.)"""


def make_room(pool: PoolState, streams_of: StreamsOf) -> list[ChosenMove]:
    """Return a move that makes room for the request at the head of the queue, if one pays.

    A worker may have to give several streams away. Later calls choose the further moves.
    """
    head, lacking = pool.head, _lacking(pool)
    if head is None or not lacking:
        return []
    idle = [one for one in pool.workers if not one.moving]
    able = [one for one in idle if one.worker_id in lacking and _has_sequences(one, head)]
    nearest = nsmallest(
        _MOST_COMPARED, able, key=lambda one: (lacking[one.worker_id], one.worker_id)
    )
    streams = {
        one.worker_id: [s for s in streams_of(one.worker_id) if s.may_move] for one in nearest
    }
    wait_s = min(
        (_wait_s(one, lacking[one.worker_id], streams[one.worker_id]) for one in nearest),
        default=0.0,
    )
    found = [
        move
        for source in nearest
        for move in _clearing(
            source, lacking[source.worker_id], streams[source.worker_id], pool, idle
        )
    ]
    best = min(found, key=lambda one: one.threshold, default=None)
    if best is None or wait_s <= best.threshold:
        return []
    return [replace(best, gain=wait_s)]


def _lacking(pool: PoolState) -> dict[str, int]:
    """Return the tokens that each worker lacks for the request, by its id.

    The result is empty if no request waits for memory.
    """
    head = pool.head
    if head is None:
        return {}
    lacking = {
        one.worker_id: missing_tokens(one.usage, head)
        for one in pool.workers
        if one.open and not one.leaving and head.prompt_tokens <= one.total_tokens
    }
    return lacking if all(lacking.values()) else {}


def next_with_room(pool: PoolState) -> str | None:
    """Return the worker that lacks the least memory for the waiting request, by its id, or None.

    Other moves must not take its memory. Otherwise the request, and all requests after it, would
    wait for longer.
    """
    lacking = _lacking(pool)
    return min(lacking, key=lambda one: (lacking[one], one), default=None)


def undecided(pool: PoolState) -> list[WorkerState]:
    """Return the workers that take part in no move yet."""
    return [one for one in pool.workers if not one.moving]


def _has_sequences(worker: WorkerState, head: CapacityNeed) -> bool:
    load = worker.load
    limit = load.max_sequences
    return not limit or load.running + load.waiting + head.sequences <= limit


def _wait_s(worker: WorkerState, missing: int, streams: Sequence[StreamView]) -> float:
    """Return the seconds until a worker has released the missing memory, or 0 if unknown."""
    left_tokens = fmean([one.left_tokens for one in streams]) if streams else 0.0
    rate = release_rate(worker.used_tokens, left_tokens, worker.load.speed.tpot_s)
    return missing / rate if rate else 0.0


def _clearing(
    source: WorkerState,
    missing: int,
    streams: Sequence[StreamView],
    pool: PoolState,
    workers: Sequence[WorkerState],
) -> list[ChosenMove]:
    """Return the first move until a worker has room, if its streams suffice.

    The threshold of the move is that of all moves until then.
    """
    sinks = {one.worker_id: one for one in workers if can_exchange(source, one)}
    placed = list[tuple[StreamView, WorkerState, float]]()
    for stream in _victims(streams, missing):
        able = [one for one in sinks.values() if fits(stream, one)]
        if not able:
            return []
        sink = max(able, key=lambda one: (one.free_tokens, one.worker_id))
        placed.append((stream, sink, move_cost_s(stream, source, sink, pool.link)))
        sinks[sink.worker_id] = with_stream(sink, stream, 1)
    if not placed:
        return []
    stream, sink, _ = placed[0]
    cost_s = sum(cost_s for _, _, cost_s in placed)
    words = f"{missing} tokens are missing for the next request, which moves free in {cost_s:.2f} s"
    move = ChosenMove(
        stream.stream_id,
        source.worker_id,
        sink.worker_id,
        MoveReason.MAKE_ROOM,
        0.0,  # until the wait is known
        COST_FACTOR * cost_s,
        words,
    )
    return [move]


def _victims(streams: Sequence[StreamView], missing: int) -> list[StreamView]:
    """Return few and short streams that release the missing tokens, or none if all do not suffice.

    The last stream is the shortest that suffices, and the others are the longest.
    """
    left = sorted(streams, key=lambda one: (one.tokens, one.stream_id))
    if sum(one.tokens for one in left) < missing:
        return []
    chosen = list[StreamView]()
    while missing > 0:
        enough = next((place for place, one in enumerate(left) if one.tokens >= missing), -1)
        chosen.append(left.pop(enough))
        missing -= chosen[-1].tokens
    return chosen
