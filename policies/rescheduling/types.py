"""The inputs and results of a rescheduling policy."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Final

from msgspec import structs

from draftgate.policies.capacity import CapacityNeed, WorkerUsage, has_capacity
from draftgate.policies.moves import MoveReason, MoveView, predict_move
from draftgate.policies.types import RequestView, WorkerLoad
from draftgate.policies.values import immutable, replace

LEAST_INTERVAL_S: Final = 2.0
"""Time in seconds between two moves of a stream. Loads are up to a heartbeat old, so a stream that
moved on an old load must not move back on the next one. (Chosen, not tuned, 2026-11-23.)"""

LinkBandwidth = Callable[[str, str], float]
"""The expected bandwidth from one worker to another in bytes per second, by their ids."""


@immutable
class WorkerState:
    """A worker of the pool.

    Attributes:
        usage: its load, with the requests of all gateways, and what this gateway knows of them.
        kv_format: format of its KV blocks. Workers exchange blocks if their formats are equal and
            not None.
        leaving: whether the worker stops soon, so that every stream should leave it.
        open: whether the worker accepts streams.
        moving: whether a move to or from the worker is under way.
        leased_tokens: tokens of all leases of the worker in the store. A worker with leases takes
            no stream whose lease does not fit into its memory.
    """

    worker_id: str
    usage: WorkerUsage
    kv_format: object
    leaving: bool = False
    open: bool = True
    moving: bool = False
    leased_tokens: int = 0

    @property
    def load(self) -> WorkerLoad:
        """The load of the worker."""
        return self.usage.load

    @property
    def total_tokens(self) -> int:
        """The tokens that the KV memory of the worker holds."""
        return self.load.kv_total_tokens

    @property
    def free_tokens(self) -> int:
        """The tokens for which the worker has free KV memory, after the moves under way."""
        return self.load.kv_free_tokens - self.usage.arriving_tokens

    @property
    def used_tokens(self) -> int:
        """The tokens in the KV memory of the worker, and those that arrive."""
        return self.total_tokens - self.free_tokens


@immutable
class StreamView:
    """A stream that decodes and may move.

    Attributes:
        tokens: tokens of prompt and output in KV memory, of all choices.
        left_tokens: expected number of tokens that a choice will still generate, more than 0.
        token_bytes: KV bytes of a token.
        sequences: number of choices that run.
        request: its limits, targets and record of drafts, as of its placement.
        laxity_s: seconds until its next token is due, or None without a TPOT target.
        moved_s: seconds since its last move, or infinity.
        moves: number of its moves so far.
        lease_tokens: tokens that its lease reserves.
    """

    stream_id: str
    tokens: int
    left_tokens: float
    token_bytes: int
    request: RequestView
    sequences: int = 1
    laxity_s: float | None = None
    moved_s: float = math.inf
    moves: int = 0
    lease_tokens: int = 0

    @property
    def may_move(self) -> bool:
        """Whether the last move of the stream was long enough ago."""
        return self.moved_s >= LEAST_INTERVAL_S


StreamsOf = Callable[[str], Sequence[StreamView]]
"""The streams of this gateway on a worker that may move, by the worker's id. The views are built by
this call, so a policy calls it only for workers that streams should leave."""


@immutable
class PoolState:
    """The workers of a pool.

    Attributes:
        workers: the workers, without repetition.
        link: the bandwidth between two of them.
        head: the next request in the gateway's queue, for which no worker has capacity, or None.
    """

    workers: tuple[WorkerState, ...]
    link: LinkBandwidth
    head: CapacityNeed | None = None


@immutable
class ChosenMove:
    """A move that a policy has chosen.

    Attributes:
        stream_id: the stream.
        source, sink: ids of the workers.
        reason: the reason for the move.
        gain: predicted gain, in seconds, or for `MoveReason.BALANCE` in steps of freeness.
        threshold: gain that `gain` must exceed.
        explanation: the decision in words, with its figures.
        policy: name of the policy, which the gateway sets.
    """

    stream_id: str
    source: str
    sink: str
    reason: MoveReason
    gain: float
    threshold: float
    explanation: str
    policy: str = ""


def can_exchange(source: WorkerState, sink: WorkerState) -> bool:
    """Return whether streams may move from one worker to another."""
    same = source.kv_format is not None and source.kv_format == sink.kv_format
    return same and sink.open and not sink.leaving and source.worker_id != sink.worker_id


def fits(stream: StreamView, sink: WorkerState) -> bool:
    """Return whether a worker has capacity for a stream in addition to its waiting sequences.

    The gateway and its store reserve the capacity of a move by the same rules. A block for each
    choice stays free, because the stream continues to grow.
    """
    load = sink.load
    if load.max_sequences:
        sequences = load.running + load.waiting + stream.sequences
        if sequences > load.max_sequences:
            return False
    if sink.leased_tokens and sink.leased_tokens + stream.lease_tokens > sink.total_tokens:
        return False
    tpot_s = stream.request.service.tpot_s
    tokens = stream.tokens + stream.sequences * load.kv_block_tokens
    need = CapacityNeed(stream.sequences, tokens, tokens, tpot_s)
    return tokens <= sink.usage.free_tokens and has_capacity(sink.usage, need)


def with_stream(worker: WorkerState, stream: StreamView, sign: int) -> WorkerState:
    """Return a worker after a stream has joined it (`sign` is 1) or left it (-1)."""
    load, sequences = worker.load, sign * stream.sequences
    blocks = sign * -(-stream.tokens // load.kv_block_tokens)
    urgent = sequences if stream.request.service.priority < 0 else 0
    after = structs.replace(
        load,
        running=max(load.running + sequences, 0),
        kv_blocks_free=min(max(load.kv_blocks_free - blocks, 0), load.kv_blocks_total),
        urgent=max(load.urgent + urgent, 0),
    )
    usage = replace(worker.usage, load=after)
    leased = max(worker.leased_tokens + sign * stream.lease_tokens, 0)
    return replace(worker, usage=usage, leased_tokens=leased)


def move_cost_s(
    stream: StreamView, source: WorkerState, sink: WorkerState, link: LinkBandwidth
) -> float:
    """Return the predicted seconds of the transfer and of the gap of a move."""
    speed = replace(sink.load.speed, tpot_s=source.load.speed.tpot_s)
    view = MoveView(
        tokens=stream.tokens,
        left_tokens=stream.request.max_tokens,
        choices=stream.sequences,
        token_bytes=stream.token_bytes,
        block_tokens=source.load.kv_block_tokens,
        bytes_per_s=link(source.worker_id, sink.worker_id),
        speed=speed,
    )
    forecast = predict_move(view)
    return forecast.copy_s + forecast.gap_s


class NoMoves:
    """Moves no stream. Streams still move from a worker that is leaving (`policies.moves`)."""

    name = "off"
    reschedules = False

    def choose(self, pool: PoolState, streams_of: StreamsOf) -> Sequence[ChosenMove]:
        return ()
