"""Failover: a prompt that loses its worker goes on with another one, where it had come to.

`PartialOutput` holds what its choices have produced so far, from which the request for the rest is
made. The prompt waits in the queue with the place that it had, and is decided about, leased and run
again. The output so far stays, so the reader of the deltas sees one stream.
`policies.resilience.failover` decides when to give up.
"""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable
from dataclasses import dataclass, replace
from functools import partial
from itertools import count
from typing import Final

from draftgate.backends.errors import BackendFailed, WorkerLeft, WorkerStalled
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, GenerationRequest, ResumedChoice
from draftgate.gateway.dispatch.admission import AdmissionController
from draftgate.gateway.dispatch.attempt import Attempts
from draftgate.gateway.dispatch.leases import NoCapacity
from draftgate.gateway.dispatch.placement import Placement, need_of
from draftgate.gateway.dispatch.queue import CentralQueue, Waiting
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.dispatch.run import Resume, Run
from draftgate.gateway.errors import QueueTimeout
from draftgate.gateway.fleet import Fleet
from draftgate.policies.resilience.failover import Cause, GivenUp, Loss, given_up

COMEBACK_S: Final = 15.0
"""Who has lost its worker waits so long for another one where none may be asked: a link that broke
is opened again after 5 s at the latest, and a process is started anew within some more. (Chosen,
2026-11-22.)"""

LOOK_S: Final = 0.1
"""Between two looks meanwhile: unnoticed in a stream that has stopped for longer."""

_MAY_PASS: Final = frozenset({GivenUp.NO_WORKER, GivenUp.LAST_WORKER})


class PartialOutput:
    """What the choices of a prompt have said so far, whichever worker said it."""

    def __init__(self, request: GenerationRequest) -> None:
        """Begin with what the request begins with."""
        self._request = request
        self._open = {choice.choice: compact(choice.output_ids) for choice in request.choices}
        self._ended_tokens = 0

    @property
    def is_complete(self) -> bool:
        """Whether every choice has ended."""
        return not self._open

    @property
    def tokens(self) -> int:
        """Tokens of output, of all choices."""
        return self._ended_tokens + sum(map(len, self._open.values()))

    def add(self, delta: Delta) -> None:
        """Add what a worker said; every delta must pass here, in order."""
        if delta.finish_reason is None:
            self._open[delta.choice].extend(delta.token_ids)
        else:
            self._ended_tokens += len(self._open.pop(delta.choice)) + len(delta.token_ids)

    def rest(self, request_id: str) -> GenerationRequest:
        """Return the request for what is left; there is something.

        Args:
            request_id: its own: what was begun under another one may still be there somewhere.
        """
        begun = tuple(ResumedChoice(choice, tuple(ids)) for choice, ids in self._open.items())
        untouched = len(begun) == self._request.n and not any(one.output_ids for one in begun)
        resumed = () if untouched else begun
        return replace(self._request, request_id=request_id, resumed=resumed)


@dataclass(frozen=True, slots=True)
class _Lost:
    """The worker that a prompt has just lost, and how."""

    placed: Placement
    error: BackendFailed

    @property
    def cause(self) -> Cause:
        if isinstance(self.error, WorkerLeft):
            return Cause.LEFT
        return Cause.STALLED if isinstance(self.error, WorkerStalled) else Cause.FAILED


class Failover:
    """Leads prompts through as many workers as it takes."""

    def __init__(
        self,
        fleet: Fleet,
        queue: CentralQueue,
        admission: AdmissionController,
        attempts: Attempts,
        most_resumes: int,
    ) -> None:
        """Use these; the fleet need not have started yet.

        Args:
            most_resumes: how often a prompt may go on elsewhere.
        """
        self._fleet = fleet
        self._queue = queue
        self._admission = admission
        self._attempts = attempts
        self._most_resumes = most_resumes

    async def deltas(self, run: Run, index: int) -> AsyncGenerator[Delta, None]:
        """Yield the deltas of one of a job's prompts, until all of its choices have ended.

        Raises:
            QueueTimeout: it waited too long for its first turn.
            BackendFailed: it has lost its worker, or there was none, and does not go on.
        """
        request, waiting = run.requests[index], self._admission.waiting(run.entry, index)
        said, losses, avoid = PartialOutput(request), list[Loss](), set[str]()
        lost: _Lost | None = None
        for number in count(1):
            since_s = self._queue.now_s()
            routed = await self._turn(run, index, request, waiting, lost)
            before = said.tokens
            try:
                async with self._attempts.on(routed, run, index, request) as attempt:
                    if lost is not None:
                        _tell(run, index, lost, attempt.placed)
                    async for delta in attempt.deltas:
                        attempt.observe(delta)
                        said.add(delta)
                        yield delta
                        attempt.waits()
                if not said.is_complete:
                    raise BackendFailed("the worker ended the stream too early")
                return
            except NoCapacity:
                self._queue.hold()
                waiting = waiting.on(since_s)
                continue
            except BackendFailed as error:
                if said.is_complete:
                    return
                lost = _Lost(_placed(run, index), error)
                avoid.add(lost.placed.worker.worker_id)
                if lost.cause is not Cause.LEFT:
                    losses.append(Loss(lost.placed.worker.worker_id, said.tokens - before))
                await self._check(run, lost, losses, said)
            request = said.rest(f"{run.requests[index].request_id}.{number}")
            waiting = waiting.again(request.request_id, need_of(request), frozenset(avoid))

    async def _turn(
        self,
        run: Run,
        index: int,
        request: GenerationRequest,
        waiting: Waiting,
        lost: _Lost | None,
    ) -> Routed:
        """Wait until a worker has room for a prompt; it is reserved there then.

        Raises:
            QueueTimeout, BackendFailed: none had, or none is left. One that lost its worker ends
                with that loss in any case.
        """
        with run.span.child("queue"):
            view = partial(self._attempts.route_view, run, index, request)
            while True:
                try:
                    return await self._queue.turn(waiting, view)
                except (QueueTimeout, BackendFailed) as error:
                    if lost is None:
                        raise
                    waits = isinstance(error, BackendFailed)
                    if waits and await self._comeback(lambda: bool(self._fleet.serving)):
                        continue
                    run.watch.given_up(lost.cause, GivenUp.NO_WORKER)
                    raise BackendFailed(f"{lost.error}; then {error}") from error

    async def _check(self, run: Run, lost: _Lost, losses: list[Loss], said: PartialOutput) -> None:
        """Return once a prompt that has lost its worker may go on.

        Raises:
            BackendFailed: it may not.
        """
        why = self._given_up(lost, losses, said)
        if why in _MAY_PASS and await self._comeback(
            lambda: self._given_up(lost, losses, said) is None
        ):
            return
        if why is None:
            return
        run.watch.given_up(lost.cause, why)
        if len(losses) < 2:
            raise lost.error
        several = f"the request lost {len(losses)} workers, the last one to this: {lost.error}"
        raise BackendFailed(several) from lost.error

    def _given_up(self, lost: _Lost, losses: list[Loss], said: PartialOutput) -> GivenUp | None:
        """Return why a prompt does not go on now; None if it does."""
        if not self._fleet.serving or self._fleet.ending:
            return GivenUp.NO_WORKER
        if said.tokens and not lost.placed.worker.backend.card.capabilities.resume:
            return GivenUp.UNABLE
        return given_up(losses, self._most_resumes, len(self._fleet.open))

    async def _comeback(self, ready: Callable[[], bool]) -> bool:
        """Wait a while until it is so, if workers may come; return whether it is."""
        for _ in range(round(COMEBACK_S / LOOK_S)):
            if ready() or not self._fleet.may_grow:
                break
            await asyncio.sleep(LOOK_S)
        return ready()


def _tell(run: Run, index: int, lost: _Lost, placed: Placement) -> None:
    """Tell that a prompt goes on with another worker."""
    run.resume(Resume(index, lost.placed, placed, lost.cause, str(lost.error)))


def _placed(run: Run, index: int) -> Placement:
    """Return where a prompt was placed last; it has had its turn."""
    placed = run.placements[index]
    assert placed is not None
    return placed
