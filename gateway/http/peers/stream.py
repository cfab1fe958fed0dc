"""A request of another node on one of this node's workers.

The other node has admitted the request and decided about speculation. This node only runs it.
"""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Callable
from typing import Final

from draftgate.backends.remote_worker import Submit
from draftgate.backends.streams import UnreadDeltas
from draftgate.backends.types import Delta, Pace
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.placement import INLINE_TOKENS, need_of
from draftgate.gateway.dispatch.worker_spans import WorkerSpans
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.offload import offload
from draftgate.gateway.tracing import NO_SPAN, Span, Tracing
from draftgate.policies.values import replace

SPAN: Final = "peer.generate"
"""Name of the SERVER span, whose children are the worker's spans."""


class PeerStream:
    """One request, from its arrival to its last delta."""

    _deliver: Callable[[Delta], bool]
    _unfinished: int  # number of choices whose last delta has not arrived
    _spans: WorkerSpans | None = None
    _error: Exception | None = None

    def __init__(
        self,
        tracing: Tracing,
        dispatcher: Dispatcher,
        worker: FleetWorker,
        submitted: Submit,
        worker_id: str,
    ) -> None:
        """Accept a request.

        Args:
            dispatcher: the dispatcher of the worker's model.
            worker_id: the id of the request on the worker. It differs from the request's own id,
                which may still be in use if the other node sends the request again over a new
                connection.
        """
        self._tracing = tracing
        self._dispatcher = dispatcher
        self._worker = worker
        self._sent_as = submitted.request.request_id
        self._lease_number = submitted.lease_number
        self._request = replace(submitted.request, request_id=worker_id)
        self._pace = Pace.FULL
        self._tpot_s = 0.0
        self._runs = False
        self._has_output = False
        self._unread = UnreadDeltas()
        self._news = asyncio.Event()

    def set_pace(self, pace: Pace, tpot_s: float = 0.0) -> None:
        """Set the pace of the request on the worker, once it runs."""
        self._pace, self._tpot_s = pace, tpot_s
        if self._runs:
            self._worker.generating.set_pace(self._request.request_id, pace, tpot_s)

    async def run(
        self, deliver: Callable[[Delta], bool], space: Callable[[], Awaitable[None]]
    ) -> None:
        """Run the request and deliver its deltas.

        A cancel frees the capacity of the request within one step.

        Args:
            deliver: delivers a delta, or returns False while the connection has no space.
            space: waits until the connection has space.

        Raises:
            Unavailable: this node accepts no requests at present.
            RequestRejected: the request can never run on this worker.
            BackendFailed: the worker failed.
        """
        worker, request = self._worker, self._request
        self._deliver = deliver
        with self._dispatcher.counted(), self._span() as span:
            # The request competes for capacity with this node's own requests.
            worker.reserve(request.request_id, need_of(request))
            try:
                await self._check()
                self._spans = WorkerSpans(span) if span.recording else None
                self._unfinished = len(request.choices)
                worker.submit(request, self, self._lease_number)
                try:
                    self._runs = True
                    if self._pace is not Pace.FULL:
                        self.set_pace(self._pace, self._tpot_s)
                    await self._deliver_unread(space)
                finally:
                    worker.generating.cancel(request.request_id)
                    if self._spans is not None:
                        self._spans.end()
            finally:
                worker.release(request.request_id)
                self._dispatcher.queue.dispatch_waiting()

    def put(self, delta: Delta) -> None:
        """Deliver a delta of the worker, or keep it while the connection has no space."""
        delta = self._observed(delta)
        self._unfinished -= delta.finish_reason is not None
        if self._unread or not self._deliver(delta):
            self._unread.put(delta)
            self._news.set()
        elif not self._unfinished:
            self._news.set()

    def fail(self, error: Exception) -> None:
        """Let `run` raise an error after the deltas before it."""
        self._error = error
        self._news.set()

    async def _deliver_unread(self, space: Callable[[], Awaitable[None]]) -> None:
        """Deliver the deltas that wait for space, until the request has ended."""
        while True:
            while self._unread:
                await space()
                self._deliver(self._unread.pop())
            if not self._unfinished:
                return
            if self._error is not None:
                raise self._error
            self._news.clear()
            await self._news.wait()

    async def _check(self) -> None:
        """Check the request again, because it may come from another version."""
        check, request = self._worker.generating.check, self._request
        if request.grammar is None and len(request.prompt_ids) <= INLINE_TOKENS:
            check(request)
        else:
            await offload(check, request)

    def _span(self) -> Span:
        """Return a span in the trace of the other node, or `NO_SPAN` without a trace."""
        if not self._request.trace_context:
            return NO_SPAN
        attributes = {
            "draftgate.worker_id": self._worker.worker_id,
            "draftgate.request_id": self._sent_as,
        }
        return self._tracing.server(SPAN, dict(self._request.trace_context), attributes)

    def _observed(self, delta: Delta) -> Delta:
        """Return the delta, marked if this node records its phases as spans."""
        if not self._has_output:
            self._has_output = True
            self._worker.started(self._request.request_id)
            self._dispatcher.queue.dispatch_waiting()
        if self._spans is None:
            return delta
        self._spans.observe(delta)
        if delta.phases is None:
            return delta
        return delta._replace(phases=delta.phases._replace(recorded=True))
