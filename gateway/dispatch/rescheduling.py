"""The choice of moves of this node's streams between workers that keep running.

Every gateway calls the policy with the loads of all workers and with its own streams, so the
gateways need no leader. The slots of workers in the store ensure that only one gateway at a time
moves a stream to or from a worker.
"""

from __future__ import annotations

import secrets
from collections.abc import AsyncIterator, Callable, Collection, Iterable, Mapping
from contextlib import asynccontextmanager
from typing import Final

from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.dispatch.leases import lease_tokens
from draftgate.gateway.dispatch.prompt import Prompt
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.state.commands import FreeSlots, HoldSlots
from draftgate.gateway.state.store import Store
from draftgate.policies.moves import MOST_FAILURES, MOVE_S, MoveReason
from draftgate.policies.protocols import ReschedulingPolicy
from draftgate.policies.rescheduling.types import (
    ChosenMove,
    PoolState,
    StreamView,
    WorkerState,
)
from draftgate.policies.speculation.weights import due_in_s
from draftgate.policies.types import Role
from draftgate.policies.values import replace

INTERVAL_S: Final = 0.2
"""Interval between two calls of the policy, about ten decode steps of a large model. Llumnix calls
its policy every 0.05 to 0.5 s, by its version. (Chosen, not tuned, 2026-11-23.)"""


class Rescheduler:
    """A caller of the rescheduling policy.

    Use the object only on the thread of the event loop.
    """

    def __init__(
        self, policy: ReschedulingPolicy, fleet: Fleet, queue: CentralQueue, store: Store
    ) -> None:
        """Serve a fleet, which may start later.

        Args:
            queue: the queue whose first request may need room.
            store: has the slots of the workers.
        """
        self._policy = policy
        self._fleet = fleet
        self._store = store
        self._queue = queue
        self._pulls: KvPulls = queue.router.pulls
        self._next_s = 0.0

    @property
    def reschedules(self) -> bool:
        """Whether the policy ever moves a stream."""
        return self._policy.reschedules

    @property
    def is_due(self) -> bool:
        """Whether to call the policy now. A pool of one worker never calls it."""
        several = self._policy.reschedules and len(self._fleet.workers) > 1
        return several and self._queue.now_s() >= self._next_s

    def choose(
        self,
        streams: Mapping[FleetWorker, Iterable[Prompt]],
        may_move: Callable[[Prompt], bool],
        moving: Collection[str],
        *,
        makes_room: bool,
    ) -> list[tuple[Prompt, ChosenMove]]:
        """Return the next moves with their streams, most important first.

        Args:
            streams: the streams of this node by worker.
            may_move: returns whether a stream may move now.
            moving: ids of workers that take part in a move.
            makes_room: whether a move that makes room is under way, so that another one would
                waste its memory.
        """
        self._next_s = self._queue.now_s() + INTERVAL_S
        workers = {worker.worker_id: worker for worker in self._fleet.serving}
        offered = dict[str, Prompt]()
        open_ = set(self._fleet.open)
        if self._queue.router.separates:
            open_ = {one for one in open_ if one.role is not Role.PREFILL}

        def streams_of(worker_id: str) -> list[StreamView]:
            worker, found = workers[worker_id], []
            if worker.leaving:  # its streams move without the policy
                return []
            for stream in streams.get(worker, ()):
                # A stream of a slow reader needs no better place. The policy may choose any worker,
                # so all of them must have the adapter of the stream.
                stays = stream.is_read_slowly or stream.failures >= MOST_FAILURES
                adapter = stream.run.requests[stream.index].adapter
                if adapter and not all(one.offers(adapter) for one in open_):
                    stays = True
                if not stays and may_move(stream):
                    view = self._stream_view(stream, worker)
                    offered[view.stream_id] = stream
                    found.append(view)
            return found

        states = [
            WorkerState(
                worker_id,
                worker.usage,
                worker.kv_format,
                worker.leaving,
                worker in open_,
                worker_id in moving,
                worker.leased_tokens,
            )
            for worker_id, worker in workers.items()
        ]

        def link(source: str, sink: str) -> float:
            return self._pulls.bytes_per_s(workers[source], workers[sink])

        head = None if makes_room else self._queue.head
        chosen = self._policy.choose(PoolState(tuple(states), link, head), streams_of)
        named = (replace(one, policy=self._policy.name) for one in chosen)
        return [(offered[one.stream_id], one) for one in named]

    @asynccontextmanager
    async def slots(self, chosen: ChosenMove | None) -> AsyncIterator[bool]:
        """Hold the slots of both workers of a move, and yield whether they were free.

        Args:
            chosen: the move, or None if the source is leaving. Such a move needs no slots, and a
                handover does not either.
        """
        if chosen is None or chosen.reason is MoveReason.PHASES:
            yield True
            return
        move_id, ends = secrets.token_hex(8), (chosen.source, chosen.sink)
        free = await self._store.call(HoldSlots(move_id, ends, MOVE_S))
        try:
            yield free
        finally:
            if free:
                await self._store.call(FreeSlots(move_id, ends))

    def _stream_view(self, stream: Prompt, worker: FleetWorker) -> StreamView:
        request, lengths = stream.run.requests[stream.index], stream.output.lengths
        form, run, now_s = worker.kv_format, stream.run, self._queue.now_s()
        assert form is not None  # only its blocks can move
        longest = max(lengths, default=0)
        # The rest is expected to be as long as a whole output, as if lengths were exponential.
        left = min(run.expected_tokens, request.sampling.max_tokens - longest)
        laxity_s, tpot_s = None, request.service.tpot_s
        if run.answered_s is not None and tpot_s is not None:
            laxity_s = due_in_s(tpot_s, now_s - run.answered_s, longest)
        return StreamView(
            request.request_id,
            stream.tokens,
            max(left, 1.0),
            form.token_bytes,
            stream.hold.decision.request,
            len(lengths),
            laxity_s,
            now_s - stream.moved_s,
            stream.moves,
            lease_tokens(request, run.expected_tokens, lengths),
        )
