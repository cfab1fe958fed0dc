"""An attempt: a prompt on the worker whose turn it was, decided about, leased, and watched."""

from __future__ import annotations

from collections.abc import AsyncGenerator, AsyncIterator, Callable
from contextlib import aclosing, asynccontextmanager

from backends.types import Delta, GenerationRequest, Pace
from gateway.dispatch.admission import AdmissionController
from gateway.dispatch.leases import Leases
from gateway.dispatch.placement import Placement, Placer
from gateway.dispatch.queue import CentralQueue
from gateway.dispatch.routing import Routed
from gateway.dispatch.run import Run
from gateway.dispatch.watchdog import Reading, Watchdog
from gateway.state.store import Offer
from gateway.telemetry.hops import WorkerHops, dispatched
from gateway.telemetry.outcomes import describe_decision, describe_reservation, describe_route
from policies.routing import RouteView


class Attempt:
    """A prompt that runs on a worker.

    Whoever reads `deltas` says so: `waits` before each one, `observe` behind it.

    Attributes:
        placed: the worker, and the decision about the request there.
        deltas: what it says.
        waits: says that the next delta is waited for.
    """

    def __init__(
        self,
        run: Run,
        placed: Placement,
        deltas: AsyncGenerator[Delta, None],
        reading: Reading,
        hops: WorkerHops | None,
        placer: Placer,
        on_first: Callable[[], None],
    ) -> None:
        self.placed = placed
        self.deltas = deltas
        self.waits = reading.waits
        self._reading = reading
        self._hops = hops
        self._entry = run.entry
        self._placer = placer
        self._on_first: Callable[[], None] | None = on_first

    def observe(self, delta: Delta) -> None:
        """Take note of a delta as it passes: for watchdog, queue, trace, account and forecasts."""
        reading = self._reading
        reading.reader = None
        reading.deltas += 1
        if delta.phases is not None:
            reading.decodes = True
        if self._on_first is not None:
            self._on_first()
            self._on_first = None
        if self._hops is not None:
            self._hops.observe(delta)
        entry = self._entry
        entry.output_tokens += len(delta.token_ids)
        if delta.outcome is not None:
            entry.ended += 1
            self._placer.learn(self.placed, delta.outcome)


class Attempts:
    """Makes attempts on the workers of a fleet."""

    def __init__(
        self,
        queue: CentralQueue,
        admission: AdmissionController,
        placer: Placer,
        leases: Leases,
        watchdog: Watchdog,
    ) -> None:
        """Use these."""
        self._queue = queue
        self._admission = admission
        self._placer = placer
        self._leases = leases
        self._watchdog = watchdog

    @asynccontextmanager
    async def on(
        self, routed: Routed, run: Run, index: int, request: GenerationRequest
    ) -> AsyncIterator[Attempt]:
        """Run a prompt on the worker that was reserved for it (`CentralQueue.turn`).

        Leaving the context cancels what still runs there, and gives the place up.

        Args:
            request: the prompt's, or what is left of it.

        Raises:
            BackendFailed: the worker broke, or stalled: on entering, or where deltas are read.
        """
        worker = routed.worker

        def first() -> None:
            worker.started(request.request_id)
            self._admission.answered(run.entry)
            self._queue.pump()

        try:
            with run.span.child("route") as route:
                describe_route(route, routed)
            placed = self._decide(routed, run, index, request)
            with self._watchdog.watching(worker, run) as reading:
                async with self._leased(run, placed) as (deltas, hops):
                    if run.pace is not Pace.FULL:
                        worker.generating.pace(request.request_id, run.pace)
                    reading.waits()
                    yield Attempt(run, placed, deltas, reading, hops, self._placer, first)
        finally:
            worker.release(request.request_id)
            self._queue.pump()

    def route_view(self, run: Run, index: int, request: GenerationRequest) -> RouteView:
        """Return what a routing policy may know of a prompt, or of what is left of it."""
        return self._placer.route_view(run.job, index, request, run.entry.expected_tokens)

    def _decide(
        self, routed: Routed, run: Run, index: int, request: GenerationRequest
    ) -> Placement:
        """Decide how far a prompt may speculate on the worker that has room for it."""
        with run.span.child("decide") as span:
            placed = self._placer.place(run.job, index, request, routed)
            describe_decision(span, placed.view, placed.load)
        run.place(index, placed)
        return placed

    @asynccontextmanager
    async def _leased(
        self, run: Run, placed: Placement
    ) -> AsyncIterator[tuple[AsyncGenerator[Delta, None], WorkerHops | None]]:
        """Run a request under a lease on its worker's capacity.

        Without one it runs, too: the queue has found room on this worker, with its seats and memory
        as they are, and nobody else can send it anything.
        """
        request, worker = placed.request, placed.worker
        try:
            with run.span.child("reserve") as span:
                here = Offer(worker.worker_id, worker.epoch)
                found = await self._leases.take(request.request_id, request.most_tokens, (here,))
                describe_reservation(span, found)
            with dispatched(run.span) as hops:
                if hops is not None:
                    request = hops.carried(request)
                async with aclosing(worker.generating.generate(request)) as deltas:
                    if found.lease is not None:
                        worker.sent(found.lease.number)
                    yield deltas, hops
        finally:
            await self._leases.give_back(request.request_id)
