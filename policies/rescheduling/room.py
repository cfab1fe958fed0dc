"""Making room for the next request in the queue by moving streams away from one worker.

All workers together may have enough free memory for a prompt that fits on none of them
(fragmentation). The policy then chooses the streams of one worker that release the missing memory
with the fewest bytes to copy. Requests in the queue keep their order, so the freed memory
accumulates until the request at the head fits.
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
    head = pool.head
    if head is None:
        return []
    lacking = {
        one.worker_id: missing_tokens(one.usage, head)
        for one in pool.workers
        if one.open and not one.leaving and head.prompt_tokens <= one.total_tokens
    }
    if not all(lacking.values()):  # the request does not wait for memory
        return []
    idle = [one for one in pool.workers if not one.moving]
    able = [one for one in idle if one.worker_id in lacking and _has_sequences(one, head)]
    nearest = nsmallest(
        _MOST_COMPARED, able, key=lambda one: (lacking[one.worker_id], one.worker_id)
    )
    found = [
        (num_bytes, move)
        for source in nearest
        for num_bytes, move in _clearing(source, lacking[source.worker_id], pool, idle, streams_of)
    ]
    return [min(found, key=lambda one: one[0])[1]] if found else []


def undecided(pool: PoolState, moves: Sequence[ChosenMove]) -> list[WorkerState]:
    """Return the workers that may take part in further moves."""
    busy = {end for move in moves for end in (move.source, move.sink)}
    return [one for one in pool.workers if not one.moving and one.worker_id not in busy]


def _has_sequences(worker: WorkerState, head: CapacityNeed) -> bool:
    load = worker.load
    limit = load.max_sequences
    return not limit or load.running + load.waiting + head.sequences <= limit


def _clearing(
    source: WorkerState,
    missing: int,
    pool: PoolState,
    workers: Sequence[WorkerState],
    streams_of: StreamsOf,
) -> list[tuple[int, ChosenMove]]:
    """Return the bytes to move until a worker has room, and the first move, if they pay."""
    streams = [one for one in streams_of(source.worker_id) if one.may_move]
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
    left_tokens = fmean([one.left_tokens for one in streams])
    rate = release_rate(source.used_tokens, left_tokens, source.load.speed.tpot_s)
    if not rate:
        return []
    gain_s, threshold_s = missing / rate, COST_FACTOR * sum(cost_s for _, _, cost_s in placed)
    if gain_s <= threshold_s:
        return []
    stream, sink, _ = placed[0]
    words = f"{missing} tokens are missing for the next request, {gain_s:.2f} s of releases"
    move = ChosenMove(
        stream.stream_id,
        source.worker_id,
        sink.worker_id,
        MoveReason.MAKE_ROOM,
        gain_s,
        threshold_s,
        words,
    )
    return [(sum(one.tokens * one.token_bytes for one, _, _ in placed), move)]


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
