"""`least_time`: move a stream if this saves all streams together twice the time that it costs.

    gain   = own + others + memory
    own    = weight x (steps x step_s + near x step_sequence_s x other sequences), source less
             destination
    others = near x step_sequence_s x other sequences, source less destination
    steps  = left / tokens
    tokens = 1 + sum over slots of (survival - price)
    near   = steps within `HORIZON_S`
    memory = waits for memory on both workers before the move, less those after it
    wait   = sequences that wait x missing tokens / tokens released per second
    cost   = transfer + gap

A stream moves if gain > 2 x cost x 2^(moves so far). All quantities are seconds. `left` is the
expected rest of the output. `tokens` is the number of tokens per step with the stream's own drafts,
at the price on each worker, less what the drafts cost others. The price on the destination is its
price after the stream has joined. So a stream may move because its drafts pay more elsewhere. A
difference between the speeds of two workers lasts for all steps. Arrivals and ends soon even out a
difference between their loads.

The cost model is that of `routing.least_cost`. Every move lowers the predicted time of all streams,
so a pool without arrivals comes to rest.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from heapq import nlargest
from typing import Final

from msgspec import structs

from draftgate.policies.free_memory import release_rate
from draftgate.policies.moves import MoveReason
from draftgate.policies.rescheduling.room import COST_FACTOR, make_room, next_with_room, undecided
from draftgate.policies.rescheduling.types import (
    ChosenMove,
    LinkBandwidth,
    PoolState,
    StreamsOf,
    StreamView,
    WorkerState,
    can_exchange,
    fits,
    move_cost_s,
    with_stream,
)
from draftgate.policies.routing.prediction import acceptance_chance, draft_gain
from draftgate.policies.speculation.cluster_price import price_rise
from draftgate.policies.speculation.weights import weight
from draftgate.policies.types import WorkerLoad

_HYSTERESIS: Final = 2.0
"""Factor of the least gain for each earlier move of the stream. A stream that two noisy loads send
back and forth therefore soon stays. (Chosen, not tuned, 2026-11-23.)"""

HORIZON_S: Final = 5.0
"""Time in seconds for which the present load of a worker lasts. Afterwards, arrivals and ends have
evened out the loads of the pool. Without this limit, many moves of long outputs do not save any
time: on 16 simulated workers with 8 requests/s, 330 of 2,500 requests moved, and the mean TPOT
became 4% longer. With it, 99 moved, and it became 2% longer. (Simulated,
seed 0, 2026-11-24.)"""

MOST_PAIRS: Final = 4
"""Pairs of workers that one call compares, as many as the moves of a gateway. (Chosen, not tuned,
2026-11-23.)"""

_MOST_COMPARED: Final = 16
"""Streams of a worker whose gain is predicted, those with the most expected work per byte. (Chosen,
not tuned, 2026-11-23.)"""


class LeastTime:
    """Pairs the workers on which a sequence costs most and least, and moves one stream of each."""

    name = "least_time"
    reschedules = True

    def choose(self, pool: PoolState, streams_of: StreamsOf) -> Sequence[ChosenMove]:
        moves = make_room(pool, streams_of)
        if moves:  # other moves could take the memory that they free
            return moves
        for source, sink in _pairs(undecided(pool), next_with_room(pool)):
            streams = [one for one in streams_of(source.worker_id) if one.may_move]
            best = nlargest(_MOST_COMPARED, streams, key=_work_per_byte)
            found = [
                _move(stream, source, sink, pool.link) for stream in best if fits(stream, sink)
            ]
            worth = [move for move in found if move.gain > move.threshold]
            if worth:
                moves.append(max(worth, key=lambda move: move.gain - move.threshold))
        return moves


def _pairs(
    workers: Sequence[WorkerState], kept: str | None
) -> Iterator[tuple[WorkerState, WorkerState]]:
    """Yield pairs of a source and a destination, by their pressure.

    Args:
        kept: id of a worker that takes only the streams of workers that are leaving.
    """
    known = [one for one in workers if one.load.speed.step_s > 0.0]
    ranked = sorted(known, key=lambda one: (one.leaving, _pressure(one), one.worker_id))
    sinks = list(ranked)
    for source in list(reversed(ranked))[:MOST_PAIRS]:
        able = (one for one in sinks if source.leaving or one.worker_id != kept)
        sink = next((one for one in able if can_exchange(source, one)), None)
        if sink is None or not (source.leaving or _pressure(source) > _pressure(sink)):
            continue
        sinks.remove(sink)
        if source in sinks:
            sinks.remove(source)
        yield source, sink


def _pressure(worker: WorkerState) -> float:
    """Return the seconds of a step that one sequence takes from itself and from all others.

    The result rises with the used memory, and further with tokens that wait for memory. It only
    ranks the workers. The gain of a move is predicted for each stream.
    """
    load, speed = worker.load, worker.load.speed
    step_s = speed.step_s + 2.0 * max(load.running - 1, 0) * speed.step_sequence_s
    demand = worker.used_tokens + load.head_tokens
    return step_s * (1.0 + demand / max(worker.total_tokens, 1))


def _work_per_byte(stream: StreamView) -> float:
    return _weight(stream) * stream.left_tokens / max(stream.tokens * stream.token_bytes, 1)


def _weight(stream: StreamView) -> float:
    return weight(stream.laxity_s, stream.request.service)


def _move(
    stream: StreamView, source: WorkerState, sink: WorkerState, link: LinkBandwidth
) -> ChosenMove:
    """Return the move of a stream with its predicted gain."""
    after_source, after_sink = with_stream(source, stream, -1), with_stream(sink, stream, 1)
    joining = float(stream.sequences)
    sink_price = sink.load.price + price_rise(sink.load, joining)
    # An idle worker would otherwise keep the acceptance of its last requests forever.
    acceptance = (source.load.acceptance + sink.load.acceptance) / 2.0
    tokens = (
        _tokens(stream, source.load, source.load.price, acceptance),
        _tokens(stream, sink.load, sink_price, acceptance),
    )
    steps = stream.left_tokens / tokens[0], stream.left_tokens / tokens[1]
    near = (
        min(steps[0], HORIZON_S / _step_s(source)),
        min(steps[1], HORIZON_S / _step_s(after_sink)),
    )
    others_s = near[0] * source.load.speed.step_sequence_s * after_source.load.running
    others_s -= near[1] * sink.load.speed.step_sequence_s * sink.load.running
    own_s = steps[0] * source.load.speed.step_s - steps[1] * sink.load.speed.step_s + others_s
    own_s, others_s = _weight(stream) * own_s, joining * others_s
    left = stream.left_tokens
    memory_s = wait_s(source, left) + wait_s(sink, left)
    memory_s -= wait_s(after_source, left) + wait_s(after_sink, left)
    cost_s = move_cost_s(stream, source, sink, link)
    gain_s = own_s + others_s + memory_s
    words = f"{own_s:.3f} s own, {others_s:.3f} s of others, {memory_s:.3f} s of memory"
    return ChosenMove(
        stream.stream_id,
        source.worker_id,
        sink.worker_id,
        MoveReason.DRAIN if source.leaving else MoveReason.FASTER,
        float("inf") if source.leaving else gain_s,
        COST_FACTOR * cost_s * _HYSTERESIS**stream.moves,
        f"saves {gain_s:.3f} s ({words}) for {cost_s:.3f} s",
    )


def _tokens(stream: StreamView, load: WorkerLoad, price: float, acceptance: float) -> float:
    """Return the tokens of a step with the stream's drafts, less their cost to others."""
    chance = acceptance_chance(stream.request, structs.replace(load, acceptance=acceptance))
    return draft_gain(stream.request, price, chance)[1]


def _step_s(worker: WorkerState) -> float:
    speed = worker.load.speed
    return speed.step_s + max(worker.load.running - 1, 0) * speed.step_sequence_s


def wait_s(worker: WorkerState, left_tokens: float) -> float:
    """Return the seconds that sequences of a worker lose because its memory is short.

    The memory must hold the used tokens, the first sequence of the queue, and what the running
    sequences add until the first of them ends. With random lengths, that is `left_tokens` in total.
    If the memory is too small, every sequence in the queue waits, and at least one that is
    preempted, until the missing tokens are released.
    """
    needed = worker.used_tokens + worker.load.head_tokens + left_tokens
    missing = needed - worker.total_tokens
    rate = release_rate(worker.used_tokens, left_tokens, worker.load.speed.tpot_s)
    if missing <= 0.0 or rate <= 0.0:
        return 0.0
    return max(worker.load.waiting, 1) * missing / rate
