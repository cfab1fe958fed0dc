"""One prompt of a job, which runs on one worker after another until its output is complete.

The prompt waits in the queue, holds a worker (`hold`), and passes the deltas of that worker to
the sink of its run, in the call that delivers them. If it loses the worker, it continues on another
one: `PromptOutput` has the tokens of its choices, and builds the request for the rest. The prompt
then returns to the queue with its old ticket, and gets a new worker, lease and speculation plan.
The sink sees one stream.

Everything except the deltas happens in the task that awaits `wait`.
`policies.resilience.failover` decides when to give up. A prompt that moves continues on the worker
that `moves` has reserved.
"""

from __future__ import annotations

import asyncio
import math
from collections.abc import Callable
from enum import Enum, auto
from itertools import count
from typing import Final, Protocol

from draftgate.backends.errors import AdapterFailed, BackendFailed, StreamMoved
from draftgate.backends.types import Delta, GenerationRequest, Pace
from draftgate.gateway.dispatch.decisions import MoveRecord
from draftgate.gateway.dispatch.hold import Hold, Parts
from draftgate.gateway.dispatch.leases import NoCapacity, lease_tokens
from draftgate.gateway.dispatch.output import PromptOutput
from draftgate.gateway.dispatch.placement import need_of
from draftgate.gateway.dispatch.recovery import add_loss, cause_of, resume_of, wait_for
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.dispatch.run import NotResumed, Run
from draftgate.gateway.dispatch.span_attributes import describe_claim
from draftgate.gateway.errors import OutputCut, QueueTimeout
from draftgate.gateway.fleet import FleetWorker
from draftgate.policies.moves import MoveEnd
from draftgate.policies.resilience.failover import (
    Cause,
    GivenUp,
    Loss,
    given_up,
    is_suspect,
    spares_worker,
)
from draftgate.policies.routing.types import RouteView

_ONLY_ONE_LEFT: Final = (
    "the request may have made several workers fail, and only one worker is left; try again when "
    "other workers have restarted"
)

_MAY_PASS: Final = frozenset({GivenUp.NO_WORKER, GivenUp.LAST_WORKER})


class Mover(Protocol):
    """What moves running prompts to other workers (`moves.Moves`)."""

    def add(self, prompt: Prompt) -> None:
        """Watch a prompt that runs."""
        ...

    def is_moving(self, prompt: Prompt) -> bool:
        """Return whether a move of a prompt is under way."""
        ...

    def remove(self, prompt: Prompt) -> asyncio.Task[None] | None:
        """Forget a prompt, cancel its move, and return the task of the move, if any."""
        ...


class PromptState(Enum):
    """The states of a prompt.

    WAITS -> SEATED -> RUNS -> ENDED
    SEATED or RUNS -> WAITS, after the loss of a worker or a refusal of the store
    """

    WAITS = auto()  # it has no worker
    SEATED = auto()  # it holds the capacity of a worker, which does not have the request yet
    RUNS = auto()  # the worker has the request, and the prompt may move to another worker
    ENDED = auto()


WAITS, SEATED, RUNS, ENDED = PromptState


class Prompt:
    """A prompt of a job.

    Attributes:
        state: its state.
        output: the output so far.
        waiting: its first place in the queue.
        hold: the present worker, or the last one between two workers.
        successor: the hold with which a prompt that moves continues.
        copied: whether the present move of the prompt has copied its blocks.
        hands_over: whether its present move hands the output over to another worker.
        failures, moves: number of its moves that failed, and of those that succeeded without the
            handovers.
        moved_s: time of its last move or handover.
        retry_s: earliest time of its next move.
    """

    hold: Hold
    successor: Hold | None = None
    copied = hands_over = False
    failures = moves = 0
    retry_s = 0.0
    moved_s = -math.inf
    state: PromptState = WAITS
    _woken = False
    _lost: Hold | None = None  # the last hold that it has lost
    _error: BackendFailed  # the reason of that loss
    _end_of_move: Callable[[MoveEnd], None] | None = None  # of a move that got the prompt
    _news: asyncio.Future[None] | None = None  # of the task that awaits `wait`

    def __init__(
        self, parts: Parts, mover: Mover, run: Run, index: int, holds: dict[int, Hold]
    ) -> None:
        """Create a prompt, which waits for a worker from the first `wait` on.

        Args:
            index: index of the prompt in its job.
            holds: gets each hold of the prompt that sends its request, by its index.
        """
        self.run = run
        self.index = index
        self.output = PromptOutput(run.requests[index])
        self._holds = holds
        self.waiting = self._place = parts.admission.waiting(run, index)
        self._parts = parts
        self._mover = mover
        self._request = run.requests[index]  # what the next worker gets
        self._numbers = count(1)
        self._losses: list[Loss] = []
        self._avoid: set[str] = set()

    @property
    def worker(self) -> FleetWorker:
        """The worker of the present hold."""
        return self.hold.worker

    @property
    def tokens(self) -> int:
        """Number of tokens of prompt and output, of all choices that run."""
        return len(self.run.requests[self.index].prompt_ids) + sum(self.output.lengths)

    @property
    def is_read_slowly(self) -> bool:
        """Whether the client reads slowly, so that the gateway has not read all deltas."""
        return self.run.pace is not Pace.FULL

    def rest(self) -> GenerationRequest:
        """Return the request for the rest of the output, with a new id."""
        request_id = self.run.requests[self.index].request_id
        return self.output.rest(f"{request_id}.{next(self._numbers)}")

    def hand_over(self, successor: Hold, end_of_move: Callable[[MoveEnd], None]) -> None:
        """Continue with a prepared hold, without further deltas of the present one.

        Args:
            end_of_move: called once, with the first new token of the destination or earlier.
        """
        self.successor, self._end_of_move = successor, end_of_move
        successor.on_delta = self._observe_first
        self.hold.fail(StreamMoved("the stream moved to another worker"))

    def _observe_first(self, delta: Delta) -> None:
        """End the move with the first new token of the destination."""
        if delta.token_ids or delta.finish_reason is not None:
            self._end_move(MoveEnd.MOVED)

    def _end_move(self, end: MoveEnd) -> None:
        """Report the end of a move that got the prompt, once."""
        end_of_move, self._end_of_move = self._end_of_move, None
        if end_of_move is not None:
            end_of_move(end)

    def begin(self) -> None:
        """Record a hold that sends the request. The first one charges the prompt."""
        run, hold = self.run, self.hold
        self._holds[self.index] = hold
        if self._lost is None:
            run.prompt_tokens += len(hold.request.prompt_ids)
            if run.hop is not None:
                run.hop.start()
            run.watch(hold.decision)

    def put(self, delta: Delta) -> None:
        """Pass a delta of the present worker to the sink of the run."""
        if self.index:
            delta = delta._replace(choice=self.index * self.run.job.n + delta.choice)
        self.run.sink(delta)
        if self.output.is_complete:
            # The deltas that a moved prompt takes over may be its last ones (`SEATED`).
            if self.state is RUNS and not self._mover.is_moving(self):
                self._mover.remove(self)
                self.hold.close()
                self._settle()
            self._notify()

    def fail(self, error: Exception) -> None:
        """Notice that the present hold has this error."""
        self._notify()

    def wake(self) -> None:
        """Let `wait` return."""
        self._woken = True
        self._notify()

    def _notify(self) -> None:
        """Let the task that awaits `wait` look at the hold and the output."""
        news, self._news = self._news, None
        if news is not None and not news.done():
            news.set_result(None)

    async def wait(self) -> bool:
        """Run until all choices have ended, or until `wake` is called, as `Run.wait` does."""
        while self._woken or self.state is not ENDED:
            try:
                if self._woken:
                    self._woken = False
                    return True
                if self.state is WAITS:
                    # The straight path awaits nothing until the worker has the request.
                    self.hold = self._seat() or await self._turn()
                    self.state = SEATED
                elif self.state is SEATED:
                    self._tokens_before = self.output.tokens
                    if not self.hold.start_now():
                        await self.hold.start()
                    self.state = RUNS
                    self._mover.add(self)
                    if self._lost is not None:
                        self._record_resume(self._lost, self.hold)
                elif isinstance(self.hold.error, OutputCut):
                    raise self.hold.error  # although all choices may have ended
                elif self.output.is_complete:
                    await self._end()
                elif self.hold.error is not None:
                    raise self.hold.error
                else:
                    self._news = asyncio.get_running_loop().create_future()
                    await self._news
            except BaseException as error:  # noqa: BLE001 - raised unless the prompt continues
                await self._stop(error)
        return False

    async def aclose(self) -> None:
        """Cancel the prompt, unless it has ended."""
        await self._end(GeneratorExit())

    def _seat(self) -> Hold | None:
        """Return the successor, or the hold of a worker with capacity, or None without one."""
        parts = self._parts
        self._since_s = parts.queue.now_s()
        hold, self.successor = self.successor, None
        if hold is not None:
            hold.extend()
            return hold
        if self.run.span.recording or self._must_spare():
            return None
        routed = parts.queue.seat(self._place, self._view)
        return routed and Hold(parts, self, self._request, routed)

    async def _stop(self, error: BaseException) -> None:
        """Release the worker after an error.

        The prompt ends if its output is complete, and otherwise continues if it may.

        Raises:
            BaseException: the error, or another one that follows from it.
        """
        try:
            if self.state in (WAITS, ENDED):
                raise error  # there was no worker to lose
            error = await self._leave(error, WAITS) or error
            if isinstance(error, NoCapacity):
                if self._lost is None:
                    self._parts.queue.back_off()
                self._place.wait_again(self._since_s)
            elif not isinstance(error, BackendFailed):
                raise error
            elif self.output.is_complete:
                await self._end()
            else:
                await self._lose(error)
        except BaseException as final:
            await self._end(final)
            raise

    async def _leave(self, error: BaseException | None, after: PromptState) -> BaseException | None:
        """Release the worker, and return the error, or a cancellation meanwhile."""
        ran, self.state = self.state is RUNS, after
        move = self._mover.remove(self) if ran else None
        if move is not None:
            try:
                await asyncio.wait({move})
            except asyncio.CancelledError as cancelled:
                error = cancelled
        self.hold.close(error)
        return error

    async def _end(self, error: BaseException | None = None) -> None:
        """End the prompt, and release all that it holds."""
        if self.state is ENDED:
            return
        try:
            if self.state is not WAITS:
                await self._leave(error, ENDED)
        finally:
            self._settle()

    def _settle(self) -> None:
        """Record the end."""
        self.state = ENDED
        self.run.output_tokens += self.output.tokens
        self._end_move(MoveEnd.ENDED)
        if self.successor is not None:
            self.successor.close()

    async def _lose(self, error: BackendFailed) -> None:
        """Prepare the continuation on another worker.

        Raises:
            BackendFailed: the prompt cannot continue.
        """
        lost, output = self.hold, self.output
        self._lost, self._error = lost, error
        output.lose_worker()
        cause = cause_of(error)
        if cause is Cause.MOVED:
            return  # with the successor
        self._end_move(MoveEnd.FAILED)
        self._avoid.add(lost.worker.worker_id)
        new_tokens = output.tokens - self._tokens_before
        add_loss(self._losses, lost.worker.worker_id, cause, new_tokens)
        await self._check(lost, error)
        self._request = request = self.rest()
        tokens = lease_tokens(request, self.run.expected_tokens)
        avoid = frozenset(self._avoid)
        self._place = self._place.for_rest(request.request_id, need_of(request), avoid, tokens)

    def _record_resume(self, lost: Hold, hold: Hold) -> None:
        """Record that the prompt continues on another worker."""
        run, resume = self.run, resume_of(self.index, lost, hold, self._error)
        run.resumes.append(resume)
        run.watch(resume)
        if resume.cause is not Cause.MOVED:  # a move records itself
            record = MoveRecord(resume.source, resume.sink, resume.cause.value, MoveEnd.MOVED)
            self._parts.placer.record_move(run.job, self.index, lost.decision, record)

    def _view(self) -> RouteView:
        """Return the routing policy's view of the prompt, or of its rest."""
        return self._parts.route_view(self.run, self.index, self._request)

    async def _turn(self) -> Hold:
        """Wait for a worker and return its hold, but not of the last one for a suspect.

        Other workers may be lost while a suspect waits for its turn.

        Raises:
            QueueTimeout, BackendFailed: no worker had capacity in time, no worker is left, or no
                second worker became available. A prompt that has lost a worker always ends with
                `BackendFailed`.
        """
        parts, request_id = self._parts, self._request.request_id
        while True:
            routed = await self._wait()
            if not self._must_spare():
                return Hold(parts, self, self._request, routed)
            routed.release(request_id)
            parts.queue.claims.end(request_id)
            parts.queue.dispatch_waiting()
            if not await wait_for(parts.fleet, lambda: not self._must_spare()):
                lost = self._lost is not None
                cause = cause_of(self._error) if lost else Cause.FAILED
                self.run.watch(NotResumed(cause, GivenUp.LAST_WORKER))
                raise BackendFailed(_ONLY_ONE_LEFT) from (self._error if lost else None)

    def _must_spare(self) -> bool:
        """Return whether the prompt may break the last worker, so that it must not run now."""
        suspects, fingerprint = self._parts.suspects, self.run.job.fingerprint
        suspect = is_suspect(self._losses) or fingerprint in suspects
        return suspect and spares_worker(len(self._parts.fleet.open), suspect=True)

    async def _wait(self) -> Routed:
        """Wait until a worker has capacity, and reserve the capacity."""
        fleet, queue, place = self._parts.fleet, self._parts.queue, self._place
        # A new request that still finds no worker (`Dispatcher.run`) fails at once. Any other
        # request waits for a worker.
        adapter, lost = self._request.adapter, self._lost is not None
        waits = lost or bool(fleet.serving_with(adapter))
        since_s = place.since_s
        if since_s is None:
            place.since_s = queue.now_s()
        try:
            with self.run.span.child("queue") as span:
                while True:
                    try:
                        routed = await queue.turn(place, self._view)
                        describe_claim(span, queue.claims.worker_of(place.request_id))
                        return routed
                    except (QueueTimeout, BackendFailed) as error:
                        waits = waits and isinstance(error, BackendFailed)
                        if waits and await wait_for(
                            fleet, lambda: bool(fleet.serving_with(adapter))
                        ):
                            continue
                        if not lost:
                            raise
                        self.run.watch(NotResumed(cause_of(self._error), GivenUp.NO_WORKER))
                        raise BackendFailed(f"{self._error}; afterwards: {error}") from error
        finally:
            place.since_s = since_s

    async def _check(self, lost: Hold, error: BackendFailed) -> None:
        """Wait until the prompt may continue after the loss of a worker.

        Raises:
            BackendFailed: the prompt cannot continue.
        """
        parts, losses = self._parts, self._losses
        why = self._given_up(lost, error)
        if why is None or (
            why in _MAY_PASS
            and await wait_for(parts.fleet, lambda: self._given_up(lost, error) is None)
        ):
            return
        self.run.watch(NotResumed(cause_of(error), why))
        if is_suspect(losses):
            parts.suspects.add(self.run.job.fingerprint)
        if len(losses) < 2:
            raise error
        several = f"the request lost {len(losses)} workers; the last error was: {error}"
        raise BackendFailed(several) from error

    def _given_up(self, lost: Hold, error: BackendFailed) -> GivenUp | None:
        """Return why the prompt cannot continue now, or None if it can continue."""
        fleet = self._parts.fleet
        able = fleet.serving_with(lost.request.adapter)
        if not able or fleet.ending:
            return GivenUp.NO_WORKER
        avoids_all = all(one.worker_id in self._avoid for one in able)
        if avoids_all and isinstance(error, AdapterFailed):
            return GivenUp.UNABLE
        if self.output.tokens and not lost.worker.backend.card.capabilities.resume:
            return GivenUp.UNABLE
        return given_up(self._losses, self._parts.most_resumes, len(fleet.open))
