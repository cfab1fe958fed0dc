"""Failover, which continues a prompt on another worker after the loss of its own.

`PartialOutput` holds the tokens that the choices have produced, and builds the request for the
rest. The prompt returns to the queue with its old ticket, and gets a new worker, lease and
speculation plan. The reader of its deltas sees one stream. `policies.resilience.failover` decides
when to give up. A prompt that moves continues on the worker that `moves` has reserved.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass
from functools import partial
from typing import Final

from draftgate.backends.errors import (
    AdapterFailed,
    BackendFailed,
    StreamMoved,
    WorkerLeft,
    WorkerStalled,
)
from draftgate.backends.types import Delta, FinishReason, GenerationRequest
from draftgate.gateway.dispatch.attempt import Attempt, Parts
from draftgate.gateway.dispatch.decisions import MoveRecord
from draftgate.gateway.dispatch.leases import NoCapacity, lease_tokens
from draftgate.gateway.dispatch.moves import Moves
from draftgate.gateway.dispatch.partial_output import PartialOutput
from draftgate.gateway.dispatch.placement import Placement, need_of
from draftgate.gateway.dispatch.queue import Waiting
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.dispatch.run import Resume, Run
from draftgate.gateway.dispatch.span_attributes import describe_claim
from draftgate.gateway.dispatch.stream import Stream
from draftgate.gateway.dispatch.suspects import Suspects
from draftgate.gateway.errors import OutputCut, QueueTimeout
from draftgate.gateway.fleet import Fleet
from draftgate.policies.moves import MoveEnd
from draftgate.policies.resilience.failover import (
    Cause,
    GivenUp,
    Loss,
    given_up,
    is_suspect,
    spares_worker,
)
from draftgate.policies.values import replace

RECOVERY_S: Final = 15.0
"""The longest wait of a prompt while no worker is available, in seconds.

A broken link is reopened within 5 s, and a process restarts a few seconds later. (Chosen, not
tuned, 2026-11-22.)"""

CHECK_INTERVAL_S: Final = 0.1
"""Interval of checks during that wait, which is too short to notice in a stopped stream."""

_CUT_OFF: Final = "the worker ended the stream before its choices had ended"

_ONLY_ONE_LEFT: Final = (
    "the request may have made several workers fail, and only one worker is left; try again when "
    "other workers have restarted"
)

_MAY_PASS: Final = frozenset({GivenUp.NO_WORKER, GivenUp.LAST_WORKER})


@dataclass(frozen=True, slots=True)
class _Lost:
    """The placement that a prompt has just lost, and the error."""

    placed: Placement
    error: BackendFailed

    @property
    def cause(self) -> Cause:
        if isinstance(self.error, StreamMoved):
            return Cause.MOVED
        if isinstance(self.error, WorkerLeft):
            return Cause.LEFT
        if isinstance(self.error, AdapterFailed):
            return Cause.ADAPTER
        return Cause.STALLED if isinstance(self.error, WorkerStalled) else Cause.FAILED


class Failover:
    """A runner of prompts, which uses several workers if necessary."""

    def __init__(self, fleet: Fleet, parts: Parts, moves: Moves, most_resumes: int) -> None:
        """Serve a fleet, which may start later.

        Args:
            moves: the moves of the prompts that run.
            most_resumes: maximum number of times that a prompt may resume on another worker.
        """
        self._fleet = fleet
        self._parts = parts
        self._queue = parts.queue
        self._moves = moves
        self._most_resumes = most_resumes
        self._suspects = Suspects(parts.queue.now_s)

    async def until_served(self) -> None:
        """Wait while a pool has no worker, but only as long as a prompt that has lost its worker.

        Other gateways have the same workers, so clients would not get a response there either.
        """
        if self._fleet.discovers and not self._fleet.serving:
            await self._wait_for(lambda: bool(self._fleet.serving))

    async def deltas(self, run: Run, index: int) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of a prompt until all of its choices have ended.

        Raises:
            QueueTimeout: the prompt waited too long for its first worker.
            BackendFailed: the prompt has no worker and cannot continue.
            OutputCut: the grammar of the prompt allows no continuation of an incomplete output.
        """
        stream = Stream(run, index, self._parts.admission.waiting(run.entry, index))
        request, waiting, output = run.requests[index], stream.waiting, stream.output
        losses, avoid = list[Loss](), set[str]()
        lost: _Lost | None = None
        try:
            while True:
                since_s = self._queue.now_s()
                attempt = stream.take_successor()
                if attempt is None:
                    routed = await self._safe_turn(run, index, request, waiting, lost, losses)
                    attempt = Attempt(self._parts, run, index, request, routed, output)
                before = output.tokens
                try:
                    async with attempt as deltas, self._moves.watching(stream, attempt):
                        if lost is not None:
                            self._record_resume(run, index, lost, attempt.placed)
                        reading = attempt.reading
                        reading.waiting = True
                        async for delta in deltas:
                            attempt.observe(delta)
                            if delta.finish_reason is FinishReason.ABORT:
                                # Every worker would end the output here, so none can continue it.
                                raise OutputCut(output.tokens)
                            yield output.counted(delta)
                            stream.check_moved()
                            reading.waiting = True
                    if not output.is_complete:
                        raise BackendFailed(_CUT_OFF)
                    return
                except NoCapacity:
                    if lost is None:
                        self._queue.back_off()
                    waiting.wait_again(since_s)
                    continue
                except BackendFailed as error:
                    if output.is_complete:
                        return
                    lost = _Lost(_placed(run, index), error)
                    output.lose_worker()
                if lost.cause is Cause.MOVED:
                    continue  # with the successor
                stream.end_move(MoveEnd.FAILED)
                avoid.add(lost.placed.worker.worker_id)
                _add_loss(losses, lost, output.tokens - before)
                await self._check(run, lost, losses, output, avoid)
                request = stream.rest()
                tokens = lease_tokens(request, run.entry.expected_tokens)
                need = need_of(request)
                waiting = waiting.for_rest(request.request_id, need, frozenset(avoid), tokens)
        finally:
            run.entry.output_tokens += output.tokens
            await stream.close()

    def _record_resume(self, run: Run, index: int, lost: _Lost, placed: Placement) -> None:
        """Record that a prompt continues on another worker."""
        run.resume(Resume(index, lost.placed, placed, lost.cause, str(lost.error)))
        if lost.cause is not Cause.MOVED:  # a move records itself
            ends = lost.placed.worker.worker_id, placed.worker.worker_id
            record = MoveRecord(*ends, lost.cause.value, MoveEnd.MOVED)
            self._parts.placer.record_move(run.job, index, lost.placed, record)

    async def _safe_turn(
        self,
        run: Run,
        index: int,
        request: GenerationRequest,
        waiting: Waiting,
        lost: _Lost | None,
        losses: list[Loss],
    ) -> Routed:
        """Reserve a worker as `_turn` does, but not the last one for a suspect.

        Other workers may be lost while a suspect waits for its turn.

        Raises:
            QueueTimeout, BackendFailed: as for `_turn`, or no second worker became available.
        """
        while True:
            routed = await self._turn(run, index, request, waiting, lost)
            if not self._must_spare(run, losses):
                return routed
            routed.release(request.request_id)
            await self._queue.claims.end(request.request_id)
            self._queue.dispatch_waiting()
            if not await self._wait_for(lambda: not self._must_spare(run, losses)):
                cause = Cause.FAILED if lost is None else lost.cause
                run.watch.given_up(cause, GivenUp.LAST_WORKER)
                raise BackendFailed(_ONLY_ONE_LEFT) from (lost.error if lost else None)

    def _must_spare(self, run: Run, losses: list[Loss]) -> bool:
        """Return whether a prompt may break the last worker, so that it must not run now."""
        suspect = is_suspect(losses) or run.job.fingerprint in self._suspects
        return spares_worker(len(self._fleet.open), suspect=suspect)

    async def _turn(
        self,
        run: Run,
        index: int,
        request: GenerationRequest,
        waiting: Waiting,
        lost: _Lost | None,
    ) -> Routed:
        """Wait until a worker has capacity for a prompt, and reserve the capacity.

        Raises:
            QueueTimeout, BackendFailed: no worker had capacity in time, or no worker is left. A
                prompt that has lost a worker always ends with `BackendFailed`.
        """
        # A new request that still finds no worker (`until_served`) fails at once. Any other request
        # waits for a worker.
        adapter = request.adapter
        waits = lost is not None or bool(self._fleet.serving_with(adapter))
        since_s = waiting.since_s
        if since_s is None:
            waiting.since_s = self._queue.now_s()
        with run.span.child("queue") as span:
            view = partial(self._parts.route_view, run, index, request)
            while True:
                try:
                    routed = await self._queue.turn(waiting, view)
                    describe_claim(span, self._queue.claims.worker_of(request.request_id))
                    return routed
                except (QueueTimeout, BackendFailed) as error:
                    waits = waits and isinstance(error, BackendFailed)
                    if waits and await self._wait_for(
                        lambda: bool(self._fleet.serving_with(adapter))
                    ):
                        continue
                    if lost is None:
                        raise
                    run.watch.given_up(lost.cause, GivenUp.NO_WORKER)
                    raise BackendFailed(f"{lost.error}; afterwards: {error}") from error
                finally:
                    waiting.since_s = since_s

    async def _check(
        self, run: Run, lost: _Lost, losses: list[Loss], output: PartialOutput, avoid: set[str]
    ) -> None:
        """Wait until a prompt that has lost its worker may continue.

        Raises:
            BackendFailed: the prompt cannot continue.
        """
        given_up = partial(self._given_up, lost, losses, output, avoid)
        why = given_up()
        if why in _MAY_PASS and await self._wait_for(lambda: given_up() is None):
            return
        if why is None:
            return
        run.watch.given_up(lost.cause, why)
        if is_suspect(losses):
            self._suspects.add(run.job.fingerprint)
        if len(losses) < 2:
            raise lost.error
        several = f"the request lost {len(losses)} workers; the last error was: {lost.error}"
        raise BackendFailed(several) from lost.error

    def _given_up(
        self, lost: _Lost, losses: list[Loss], output: PartialOutput, avoid: set[str]
    ) -> GivenUp | None:
        """Return why a prompt cannot continue now, or None if the prompt can continue."""
        placed = lost.placed
        able = self._fleet.serving_with(placed.request.adapter)
        if not able or self._fleet.ending:
            return GivenUp.NO_WORKER
        if lost.cause is Cause.ADAPTER and all(one.worker_id in avoid for one in able):
            return GivenUp.UNABLE
        if output.tokens and not placed.worker.backend.card.capabilities.resume:
            return GivenUp.UNABLE
        return given_up(losses, self._most_resumes, len(self._fleet.open))

    async def _wait_for(self, ready: Callable[[], bool]) -> bool:
        """Wait for a condition while workers may join.

        Returns:
            Whether the condition became true in time.
        """
        for _ in range(round(RECOVERY_S / CHECK_INTERVAL_S)):
            if ready() or not self._fleet.may_grow:
                break
            await asyncio.sleep(CHECK_INTERVAL_S)
        return ready()


def _add_loss(losses: list[Loss], lost: _Lost, new_tokens: int) -> None:
    """Add a loss, or the tokens of a worker that is not to blame to the loss before."""
    if lost.cause not in {Cause.LEFT, Cause.ADAPTER}:
        losses.append(Loss(lost.placed.worker.worker_id, new_tokens))
    elif losses:
        losses[-1] = replace(losses[-1], new_tokens=losses[-1].new_tokens + new_tokens)


def _placed(run: Run, index: int) -> Placement:
    """Return the latest placement of a prompt that has been placed."""
    placed = run.placements[index]
    assert placed is not None
    return placed
