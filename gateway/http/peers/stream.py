"""A request that another node sent: admitted and decided about there, run here."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterator
from contextlib import aclosing, contextmanager
from dataclasses import replace
from typing import Final

from draftgate.backends.remote_worker import Submit
from draftgate.backends.types import Delta, Pace
from draftgate.gateway.dispatch.placement import INLINE_TOKENS
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.node import Node
from draftgate.gateway.offload import offload
from draftgate.gateway.telemetry.tracing import NO_SPAN, Span
from draftgate.gateway.telemetry.worker_spans import WorkerSpans
from draftgate.policies.capacity import CapacityNeed

SPAN: Final = "peer.generate"
"""The SERVER span of such a request; below it are the worker's."""


class PeerStream:
    """One request on one of this node's workers, from its coming to its last delta."""

    def __init__(self, node: Node, worker: FleetWorker, submitted: Submit, worker_id: str) -> None:
        """Take a request.

        Args:
            worker_id: what the worker knows it by. By its own id it may be there twice, when it
                comes again over a new connection before the end of the old one is known.
        """
        self._node = node
        self._worker = worker
        self._sent_as = submitted.request.request_id
        self._lease_number = submitted.lease_number
        self._request = replace(submitted.request, request_id=worker_id)
        self._pace = Pace.FULL
        self._runs = False
        self._speaks = False

    def set_pace(self, pace: Pace) -> None:
        """Let the worker go on with it so far, as soon as it has it."""
        self._pace = pace
        if self._runs:
            self._worker.generating.pace(self._request.request_id, pace)

    async def run(self, deliver: Callable[[Delta], Awaitable[None]]) -> None:
        """Run it, delivering what comes; a cancel frees what it has within one step.

        Raises:
            Unavailable: this node takes no requests now.
            RequestRejected: it can never run here, whatever its node thought.
            BackendFailed: the worker broke.
        """
        with self._node.dispatcher.counted(), self._span() as span, self._seat():
            await self._check()
            spans = WorkerSpans(span) if span.recording else None
            try:
                async with aclosing(self._worker.run(self._request, self._lease_number)) as deltas:
                    self._runs = True
                    if self._pace is not Pace.FULL:
                        self.set_pace(self._pace)
                    async for delta in deltas:
                        await deliver(self._noted(delta, spans))
            finally:
                if spans is not None:
                    spans.end()

    async def _check(self) -> None:
        """Hold it against the worker's bounds: it comes over a network, from another version."""
        check, request = self._worker.generating.check, self._request
        if request.grammar is None and len(request.prompt_ids) <= INLINE_TOKENS:
            check(request)
        else:
            await offload(check, request)

    def _span(self) -> Span:
        """Return the span that continues the trace of its node, if there is one."""
        if not self._request.trace_context:
            return NO_SPAN
        attributes = {
            "draftgate.worker_id": self._worker.worker_id,
            "draftgate.request_id": self._sent_as,
        }
        return self._node.tracing.server(SPAN, dict(self._request.trace_context), attributes)

    @contextmanager
    def _seat(self) -> Iterator[None]:
        """Count it in among what this node itself sends to the worker."""
        request, queue = self._request, self._node.dispatcher.queue
        need = CapacityNeed(
            len(request.choices),
            len(request.prompt_ids),
            request.most_tokens,
            request.service.tpot_s,
        )
        self._worker.reserve(request.request_id, need)
        try:
            yield
        finally:
            self._worker.release(request.request_id)
            queue.pump()

    def _noted(self, delta: Delta, spans: WorkerSpans | None) -> Delta:
        """Take note of a delta as it passes; return it with whether spans were made of it."""
        if not self._speaks:
            self._speaks = True
            self._worker.started(self._request.request_id)
            self._node.dispatcher.queue.pump()
        if spans is None:
            return delta
        spans.observe(delta)
        if delta.phases is None:
            return delta
        return delta._replace(phases=delta.phases._replace(recorded=True))
