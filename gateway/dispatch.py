"""Dispatch: the path of a job from its admission to its last delta.

Size it, admit it (quotas, deadline), let each prompt wait its turn, decide there how far it may
speculate, lease capacity, run, release.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager, contextmanager
from typing import Any, Final

from backends.types import Delta, GenerationRequest
from gateway.admission import AdmissionController, Ask, Entry
from gateway.decisions import Decisions
from gateway.fleet import Fleet, FleetWorker
from gateway.job import Job
from gateway.lifecycle import Lifecycle
from gateway.placement import Placement, Placer
from gateway.queue import CentralQueue
from gateway.state.store import Store
from gateway.telemetry.hops import dispatched
from gateway.telemetry.logs import log
from gateway.telemetry.outcomes import (
    admission_attributes,
    describe_decision,
    describe_route,
)
from gateway.telemetry.tracing import NO_SPAN, Span
from policies.room import Need
from policies.types import Pace

LEASE_S: Final = 30.0
"""A lease outlives this many seconds of silence from the node that holds it."""

HEARTBEAT_S: Final = 1.0

PROMPTS_AT_ONCE: Final = 64
"""Prompts of one request that wait or run at a time, as many as a default batch holds: a request of
thousands must fill neither the queue nor, while they are placed, the event loop."""


class Run:
    """A job that was admitted.

    Attributes:
        requests: one for each prompt, sized.
        entry: its admission.
        placements: where each went; None while it waits.
        deltas: of all choices: choice c of prompt p is numbered `p * n + c`. They end with
            `BackendFailed` if a worker broke.
    """

    deltas: AsyncGenerator[Delta, None]

    def __init__(
        self,
        job: Job,
        requests: Sequence[GenerationRequest],
        entry: Entry,
        span: Span,
        on_placed: Callable[[Placement], None],
    ) -> None:
        """Begin with nothing placed."""
        self.job = job
        self.requests = requests
        self.entry = entry
        self.span = span
        self.placements: list[Placement | None] = [None] * len(self.requests)
        self._on_placed = on_placed

    @property
    def placed(self) -> list[Placement]:
        """Where its prompts went; each has its place once it has a delta.

        Raises:
            RuntimeError: one still waits.
        """
        found = [placement for placement in self.placements if placement is not None]
        if len(found) < len(self.placements):
            raise RuntimeError("a prompt still waits for a worker")
        return found

    @property
    def unread_tokens(self) -> int:
        """Tokens that were generated and nobody has read."""
        return sum(
            placed.worker.generating.unread_tokens(placed.request.request_id)
            for placed in self.placements
            if placed is not None
        )

    def set_pace(self, pace: Pace) -> None:
        """Let the workers go on like this with what was placed."""
        for placed in self.placements:
            if placed is not None:
                placed.worker.generating.pace(placed.request.request_id, pace)

    def place(self, index: int, placement: Placement) -> None:
        """Note where a prompt goes."""
        self.placements[index] = placement
        self._on_placed(placement)


class Dispatcher:
    """Runs jobs on this node's workers and knows how many are in flight."""

    def __init__(
        self,
        fleet: Fleet,
        store: Store,
        lifecycle: Lifecycle,
        decisions: Decisions,
        placer: Placer,
        queue: CentralQueue,
        admission: AdmissionController,
    ) -> None:
        """Serve a fleet; it need not have started yet."""
        self.queue = queue
        self.admission = admission
        self._decisions = decisions
        self._fleet = fleet
        self._placer = placer
        self._store = store
        self._lifecycle = lifecycle
        self._leases: set[str] = set()
        self._lost: set[str] = set()  # workers that broke, as far as the heartbeat has told
        self._in_flight = 0
        self._idle = asyncio.Event()
        self._idle.set()

    @property
    def in_flight(self) -> int:
        """Client requests that came and have not ended."""
        return self._in_flight

    @contextmanager
    def counted(self) -> Iterator[None]:
        """Count a client request as in flight, from its arrival to its last byte.

        Raises:
            Unavailable: the node takes none now.
        """
        self._lifecycle.note_failure(self._fleet.failure)
        self._lifecycle.require_ready()
        self._in_flight += 1
        self._idle.clear()
        try:
            yield
        finally:
            self._in_flight -= 1
            if self._in_flight == 0:
                self._idle.set()

    async def drained(self) -> None:
        """Return once nothing is in flight."""
        await self._idle.wait()

    @asynccontextmanager
    async def run(
        self,
        job: Job,
        span: Span = NO_SPAN,
        on_placed: Callable[[Placement], None] = lambda _placed: None,
    ) -> AsyncIterator[Run]:
        """Admit a job on entering; leaving the context cancels what still runs of it.

        Args:
            span: whose children its stages become.
            on_placed: is told where each prompt goes, once it has had its turn.

        Raises:
            InvalidRequest, RequestRejected: it can never run here.
            Overloaded, QuotaExceeded: not now; the error says when.
            BackendFailed: no worker is left.
        """
        with span.child("admit") as admit:
            requests = await self._placer.size(job)
            entry = self.admission.admit(_ask(job, requests))
            if admit.recording:
                admit.set(admission_attributes(entry))
        try:
            run = Run(job, requests, entry, span, on_placed)
            run.deltas = self._one(run, 0) if len(requests) == 1 else self._merged(run)
            async with aclosing(run.deltas):
                yield run
        finally:
            self.admission.settle(entry)

    # --- one prompt ---------------------------------------------------------------------------

    async def _one(self, run: Run, index: int) -> AsyncGenerator[Delta, None]:
        """Let a prompt have its turn, decide about it, run it, and learn from what comes."""
        entry = run.entry
        waiting = self.admission.waiting(entry, index)
        with run.span.child("queue"):
            worker = await self.queue.turn(waiting)
        try:
            with run.span.child("route") as route:
                describe_route(route, worker, self._fleet.serving)
            entry.prompt_tokens += waiting.need.prompt_tokens
            placed = self._decide(run, index, worker)
            unstarted = True
            with dispatched(run.span) as hops:
                async with self._leased(placed) as deltas:
                    async for delta in deltas:
                        if unstarted:
                            unstarted = False
                            worker.started(waiting.request_id)
                            self.admission.answered(entry)
                            self.queue.pump()
                        if hops is not None:
                            hops.observe(delta)
                        entry.output_tokens += len(delta.token_ids)
                        if delta.outcome is not None:
                            entry.ended += 1
                            self._placer.learn(placed, delta.outcome)
                        yield delta
        finally:
            worker.release(waiting.request_id)
            self.queue.pump()

    def _decide(self, run: Run, index: int, worker: FleetWorker) -> Placement:
        """Decide how far a prompt may speculate on the worker that has room for it."""
        with run.span.child("decide") as span:
            placed = self._placer.place(run.job, index, run.requests[index], worker)
            describe_decision(span, placed.view, placed.load)
        run.place(index, placed)
        return placed

    @asynccontextmanager
    async def _leased(self, placed: Placement) -> AsyncIterator[AsyncGenerator[Delta, None]]:
        """Run a request under a lease on its worker's capacity."""
        lease, worker = placed.request.request_id, placed.worker
        self._leases.add(lease)
        try:
            await self._store.reserve(worker.worker_id, lease, placed.request.most_tokens, LEASE_S)
            async with aclosing(worker.generating.generate(placed.request)) as deltas:
                yield deltas
        finally:
            self._leases.discard(lease)
            await self._store.release(lease)

    # --- several prompts ----------------------------------------------------------------------

    async def _merged(self, run: Run) -> AsyncGenerator[Delta, None]:
        """Run several prompts, at most `PROMPTS_AT_ONCE` at a time, in their order."""
        lanes = min(len(run.requests), PROMPTS_AT_ONCE)
        # The queue is short: what waits for a slow reader waits, merged, in the backend's streams.
        news: asyncio.Queue[Delta | Exception | None] = asyncio.Queue(lanes)
        indices = iter(range(len(run.requests)))

        async def lane() -> None:
            for index in indices:
                await self._pump(run, index, news)

        tasks = [asyncio.create_task(lane()) for _ in range(lanes)]
        try:
            running = len(run.requests)
            while running:
                one = await news.get()
                if isinstance(one, Exception):
                    raise one
                if one is None:
                    running -= 1
                else:
                    yield one
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, return_exceptions=True)

    async def _pump(
        self, run: Run, index: int, news: asyncio.Queue[Delta | Exception | None]
    ) -> None:
        """Run one prompt into the queue; end with None, or with the exception it ended with."""
        first_choice = index * run.job.n
        try:
            async with aclosing(self._one(run, index)) as deltas:
                async for delta in deltas:
                    await news.put(delta._replace(choice=first_choice + delta.choice))
        except Exception as error:  # noqa: BLE001 - handed to the reader, who raises it
            await news.put(error)
        else:
            await news.put(None)

    # --- the heartbeat ------------------------------------------------------------------------

    async def heartbeat(self) -> None:
        """Publish the workers' loads, renew leases, write decisions, until cancelled.

        Survives errors.
        """
        while True:
            try:
                await self._beat()
                await self.write_decisions()
            except Exception as error:  # noqa: BLE001 - a heartbeat that stops looks like death
                log(logging.ERROR, "heartbeat failed", error=error)
            await asyncio.sleep(HEARTBEAT_S)

    async def write_decisions(self) -> None:
        """Write what was decided to the file, if there is one. Survives errors."""
        if not self._decisions.unwritten:
            return
        try:
            await asyncio.to_thread(self._decisions.write)
        except OSError as error:
            log(logging.ERROR, "decisions cannot be written", error=error)

    async def _beat(self) -> None:
        self.queue.pump()  # memory becomes free without an end that this node sees
        for worker in self._fleet.workers:
            worker_id, failure = worker.worker_id, worker.backend.failure
            if failure is None:
                if worker_id in self._lost:  # an upstream
                    self._lost.discard(worker_id)
                    log(logging.INFO, "worker is back", worker=worker_id)
                await self._store.publish(worker_id, worker.backend.load())
            elif worker_id not in self._lost:
                self._lost.add(worker_id)
                where: dict[str, Any] = {}
                if worker.forwards:
                    where["url"] = worker.backend.card.root
                log(logging.ERROR, "worker failed", worker=worker_id, reason=failure, **where)
                await self._store.withdraw(worker_id)
        await self._store.renew(tuple(self._leases), LEASE_S)


def _ask(job: Job, requests: Sequence[GenerationRequest]) -> Ask:
    """Return a job as admission and queue look at it."""
    tpot_s = job.service.tpot_s
    needs = tuple(
        Need(request.n, len(request.prompt_ids), request.most_tokens, tpot_s)
        for request in requests
    )
    return Ask(
        job.request_id,
        needs,
        max(request.sampling.max_tokens for request in requests),
        job.service,
        job.tenant,
        job.share,
        job.fingerprint,
        job.retries,
    )
