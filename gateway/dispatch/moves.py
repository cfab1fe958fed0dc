"""Moves of running streams to other workers.

Streams move from a worker that is leaving, and by the rescheduling policy (`rescheduling`). A
stream whose phases are apart moves after its first token (`handover`).

The gateway that owns a stream moves it. The stream runs on its source while its KV blocks are
copied to the destination. In an exact numerics class, the destination then begins before the source
stops. It gets the last tokens of the source as drafts, and must accept them (`splice`). Finally,
the gateway cuts the stream of the source, and the prompt continues with the *successor*, the
hold of the destination (`prompt`). `policies.moves` decides which stream moves next and when its
source stops. A stream whose move fails stays on its source until the source stops.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Iterable, Mapping
from contextvars import Context
from functools import partial
from typing import Final

from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.transfer import TransferEnd
from draftgate.backends.types import GenerationRequest
from draftgate.gateway.dispatch.handover import chosen_handover, hand_over, take_reserved
from draftgate.gateway.dispatch.hold import Hold, Parts
from draftgate.gateway.dispatch.kv_pulls import can_supply
from draftgate.gateway.dispatch.leases import NoCapacity, lease_tokens
from draftgate.gateway.dispatch.migration import Migration
from draftgate.gateway.dispatch.overlap import Overlap, boundary, computes_same_tokens
from draftgate.gateway.dispatch.placement import need_of
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.rescheduling import Rescheduler
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.errors import QueueTimeout
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.logs import log
from draftgate.policies.moves import (
    MOST_MOVES,
    MOVE_S,
    RETRY_S,
    ROOM_S,
    VERIFIED_TOKENS,
    Missing,
    MoveEnd,
    MoveReason,
    MoveStep,
    MoveView,
    next_move,
    next_step,
)
from draftgate.policies.rescheduling.types import ChosenMove

CHECK_INTERVAL_S: Final = 0.1
"""Interval of the search for workers that are leaving, which equals the interval of the reports of
workers on other nodes."""

_CONTINUES: Final = frozenset({MoveStep.COPY, MoveStep.WAIT})

_FAILURES: Final = frozenset({MoveEnd.BEHIND, MoveEnd.REJECTED, MoveEnd.LATE, MoveEnd.FAILED})


class Moves:
    """The moves of a node's streams.

    Use the object only on the thread of the event loop.

    Attributes:
        enabled: whether streams may move.
    """

    def __init__(self, fleet: Fleet, parts: Parts, rescheduler: Rescheduler) -> None:
        """Start without streams.

        Args:
            rescheduler: chooses the moves from workers that are not leaving.
        """
        self._fleet = fleet
        self._parts = parts
        self.enabled = True
        self._rescheduler = rescheduler
        self._now_s = parts.queue.now_s
        self._streams: dict[FleetWorker, dict[Prompt, None]] = {}
        self._moving: dict[Prompt, asyncio.Task[None]] = {}
        self._chosen: dict[Prompt, ChosenMove] = {}  # those that the policy has chosen
        self._timer: asyncio.TimerHandle | None = None

    def add(self, stream: Prompt) -> None:
        """Watch a stream until `remove`.

        If another worker is reserved for its output, the stream moves there.
        """
        self._streams.setdefault(stream.worker, {})[stream] = None
        if self._timer is None:
            self._schedule()
        if stream.hold.routed.decode is not None:
            self._start(stream, chosen_handover(stream))

    @property
    def reschedules(self) -> bool:
        """Whether streams move between workers that keep running."""
        return self.enabled and self._rescheduler.reschedules

    @property
    def streams(self) -> Mapping[FleetWorker, Iterable[Prompt]]:
        """The streams by worker, in the order in which they arrived there."""
        return self._streams

    def is_moving(self, stream: Prompt) -> bool:
        """Return whether a move of a stream is under way."""
        return stream in self._moving or stream.successor is not None

    def remove(self, stream: Prompt) -> asyncio.Task[None] | None:
        """Forget a stream that leaves its worker, and cancel its move.

        Returns:
            The task of the move, which the caller awaits, or None without a move.
        """
        worker = stream.worker
        streams = self._streams[worker]
        del streams[stream]
        if not streams:
            del self._streams[worker]
        move = self._moving.pop(stream, None)
        if move is not None:
            move.cancel()
        return move

    def _check(self) -> None:
        self._timer = None
        try:
            self._begin_moves()
            self._reschedule()
        finally:
            self._schedule()

    def _schedule(self) -> None:
        if self.enabled and self._streams and self._timer is None:
            loop = asyncio.get_running_loop()
            # An empty context keeps request ids out of the log lines.
            self._timer = loop.call_later(CHECK_INTERVAL_S, self._check, context=Context())

    def _begin_moves(self) -> None:
        """Begin as many moves as may copy blocks at the same time."""
        leaving = [worker for worker in self._streams if worker.leaving]
        if not leaving or self._fleet.ending:
            return
        sinks = {worker: self._sinks(worker) for worker in leaving}
        streams = [
            stream
            for worker in leaving
            if sinks[worker]
            for stream in self._streams[worker]
            if self._may_move(stream)
        ]
        while sum(not (one.copied or one.hands_over) for one in self._moving) < MOST_MOVES:
            views = [self._view(stream, sinks[stream.worker][0]) for stream in streams]
            chosen = next_move(views)
            if chosen is None:
                return
            self._start(streams.pop(chosen), None)

    def _reschedule(self) -> None:
        """Begin the moves that the rescheduling policy chooses."""
        if not self._rescheduler.is_due or self._fleet.ending:
            return
        under_way = self._chosen.values()
        moving = {end for chosen in under_way for end in (chosen.source, chosen.sink)}
        room = any(chosen.reason is MoveReason.MAKE_ROOM for chosen in under_way)
        planned = self._rescheduler.choose(self._streams, self._may_move, moving, makes_room=room)
        for stream, chosen in planned:  # no worker takes part in two of them
            self._start(stream, chosen)

    def _start(self, stream: Prompt, chosen: ChosenMove | None) -> None:
        stream.hands_over = chosen is not None and chosen.reason is MoveReason.PHASES
        if chosen is not None and not stream.hands_over:
            self._chosen[stream] = chosen
        move = self._move(stream, chosen)
        self._moving[stream] = asyncio.create_task(move, name="move a stream")

    def _sinks(self, source: FleetWorker) -> list[FleetWorker]:
        """Return the workers that can take the blocks of a worker."""
        return [worker for worker in self._fleet.open if can_supply(source, worker)]

    def _may_move(self, stream: Prompt) -> bool:
        """Return whether a stream decodes and is not moving yet."""
        decodes, retries = stream.hold.decodes, stream.retry_s <= self._now_s()
        return decodes and retries and not self.is_moving(stream)

    def _view(self, stream: Prompt, sink: FleetWorker) -> MoveView:
        """Return the policy's view of a stream that could move to a worker like `sink`."""
        request, source = stream.run.requests[stream.index], stream.worker
        form, lengths = source.kv_format, stream.output.lengths
        assert form is not None
        return MoveView(
            stream.tokens,
            request.sampling.max_tokens - min(lengths, default=0),
            len(lengths),
            form.token_bytes,
            form.block_tokens,
            self._parts.kv.pulls.bytes_per_s(source, sink),
            source.backend.load().speed,
            stream.failures,
        )

    async def _move(self, stream: Prompt, chosen: ChosenMove | None) -> None:
        """Move a stream, or leave it on its worker."""
        move = Migration(stream, chosen, self._parts.placer, self._now_s)
        end = MoveEnd.ENDED
        try:
            most_s = None if move.hands_over else MOVE_S  # a prompt may take any time
            async with asyncio.timeout(most_s), self._rescheduler.slots(chosen) as free:
                end = await self._try_move(stream, move) if free else MoveEnd.TAKEN
        except TimeoutError:
            end = MoveEnd.LATE
        except BackendFailed:
            end = MoveEnd.FAILED
        except Exception as error:  # noqa: BLE001 - the stream stays, whatever happened
            end = MoveEnd.FAILED
            log(logging.ERROR, "a move failed", error=error)
        finally:
            self._moving.pop(stream, None)
            self._chosen.pop(stream, None)
            stream.copied = stream.hands_over = False
            # The prompt may cancel this task before it returns, although it continues as planned.
            if not move.handed_over:
                stream.retry_s = self._now_s() + RETRY_S
                stream.failures += end in _FAILURES
                move.end(end)
        self._begin_moves()

    async def _try_move(self, stream: Prompt, move: Migration) -> MoveEnd:
        """Reserve a destination, copy the blocks, and hand the stream over.

        Returns:
            `MoveEnd.MOVED` if the prompt continues with the destination.
        """
        if move.hands_over:
            request, routed = take_reserved(stream)
        else:
            request = stream.rest()
            routed = await self._room(stream, request, move.chosen)
        if routed is None:
            return MoveEnd.NO_ROOM
        successor = Hold(self._parts, stream, request, routed)
        try:
            await successor.prepare()
        except NoCapacity:
            self._parts.queue.claims.end(request.request_id)
            return MoveEnd.NO_ROOM
        try:
            move.sink = successor.worker.worker_id
            if move.hands_over:
                return await hand_over(self._parts.kv, stream, successor, move)
            end = await self._copy(stream, successor.worker, move)
            if end is not MoveEnd.MOVED:
                return end
            stream.copied = True
            self._begin_moves()
            if not stream.is_read_slowly and await boundary(stream.hold):
                if computes_same_tokens(stream, successor):
                    with Overlap(stream, successor, move) as overlap:
                        if await overlap.source_tokens(VERIFIED_TOKENS):
                            return await overlap.switch(VERIFIED_TOKENS)
                else:
                    move.note_delta()
            move.hand_over(successor)
            return end
        finally:
            if stream.successor is not successor:
                successor.close()

    async def _room(
        self, stream: Prompt, request: GenerationRequest, chosen: ChosenMove | None
    ) -> Routed | None:
        """Reserve a worker that can take the blocks of a stream, or return None without room."""
        source = stream.worker
        if chosen is not None:  # a stream that need not move must not make requests wait
            sinks = (one for one in self._fleet.open if one.worker_id == chosen.sink)
            sink = next(sinks, None)
            need, queue = need_of(request), self._parts.queue
            return None if sink is None else queue.reserve_on(sink, request.request_id, need)
        avoid = {one.worker_id for one in self._fleet.workers if not can_supply(source, one)}
        tokens = lease_tokens(request, stream.run.expected_tokens)
        need = need_of(request)
        waiting = stream.waiting.for_rest(request.request_id, need, frozenset(avoid), tokens)
        waiting.has_blocks = True
        view = partial(self._parts.route_view, stream.run, stream.index, request)
        try:
            async with asyncio.timeout(ROOM_S):
                routed = await self._parts.queue.turn(waiting, view)
        except (TimeoutError, QueueTimeout, BackendFailed):
            return None
        if can_supply(source, routed.worker):
            return routed
        routed.worker.release(request.request_id)  # the last suitable worker has left meanwhile
        self._parts.queue.claims.end(request.request_id)
        self._parts.queue.dispatch_waiting(routed.worker)
        return None

    async def _copy(self, stream: Prompt, sink: FleetWorker, move: Migration) -> MoveEnd:
        """Copy blocks until the source may stop, and return `MoveEnd.MOVED` in this case."""
        kv, run, source = self._parts.kv, stream.run, stream.worker
        missing: Missing | None = None
        preempted = False
        held: dict[int, int] = {}  # leading blocks of each choice
        while (step := next_step(move.stages, missing, preempted=preempted)) in _CONTINUES:
            if step is MoveStep.WAIT:
                if stream.is_read_slowly or not await boundary(stream.hold):
                    return MoveEnd.MOVED  # the client waits for nothing, or for this move
            else:
                request = stream.output.rest("")
                fetches = await kv.copy(run, request, source, sink)
                move.add_stage(fetches)
                ends = {fetch.end for fetch in fetches}
                if TransferEnd.FULL in ends:
                    return MoveEnd.NO_ROOM
                if TransferEnd.FAILED in ends or sink not in self._fleet.open:
                    return MoveEnd.FAILED
                held = {
                    choice.choice: fetch.known_blocks + fetch.blocks
                    for choice, fetch in zip(request.choices, fetches, strict=True)
                }
                # The blocks of a sequence that runs cannot be missing.
                preempted = TransferEnd.MISSING in ends
            if stream.output.is_complete:
                return MoveEnd.ENDED
            missing = _missing(stream, held)
        return MoveEnd.MOVED if step is MoveStep.STOP else MoveEnd.BEHIND


def _missing(stream: Prompt, held_blocks: Mapping[int, int]) -> Missing:
    """Return the missing part of the choice of which a destination lacks most.

    Args:
        held_blocks: leading blocks that it holds, by choice.
    """
    source, prompt = stream.worker, len(stream.run.requests[stream.index].prompt_ids)
    form, output = source.kv_format, stream.output
    assert form is not None
    lengths = zip(output.open_choices, output.lengths, strict=True)
    contexts = {choice: prompt + length for choice, length in lengths}
    tokens, context = max(
        (context - held_blocks[choice] * form.block_tokens, context)
        for choice, context in contexts.items()
    )
    return Missing(tokens, context, form.block_tokens, source.backend.load().speed)
