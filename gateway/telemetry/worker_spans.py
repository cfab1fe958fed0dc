"""The worker's spans of a request, made from what its deltas tell: `Delta.phases`, the last delta.

Below `dispatch`, for each choice: `worker.queue`, `prefill`, `decode`. They are made when the first
token comes, with the instants the worker noted; `decode` ends with the choice, or with `dispatch`
if that ends before. A worker that goes on with what another began has a `dispatch` of its own. What
another node has made spans of itself, below the `peer.generate` span that continues this one, has
none here.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from typing import Final

from draftgate.backends.types import Delta, GenerationRequest, Phases
from draftgate.gateway.telemetry.outcomes import outcome_attributes
from draftgate.gateway.telemetry.tracing import Span

MOST_CHOICES: Final = 8
"""Choices of a request that have spans; `draftgate.traced_choices` says so where there are more."""

MOST_CHUNKS: Final = 32
"""Prefill chunks that have an event, the first ones: 16k tokens in steps of 512. The attribute
`draftgate.prefill.chunks` counts all. (The SDK's own limit is 128 events.)"""


@contextmanager
def dispatch_span(parent: Span) -> Iterator[WorkerSpans | None]:
    """Cover what a worker does for a request with a `dispatch` span, below which its spans come.

    None where nobody reads them.
    """
    with parent.child("dispatch") as span:
        if not span.recording:
            yield None
            return
        hops = WorkerSpans(span)
        try:
            yield hops
        finally:
            hops.end()


class WorkerSpans:
    """The spans below one `dispatch` span, which is recorded."""

    def __init__(self, dispatch: Span) -> None:
        """Begin without a choice."""
        self._dispatch = dispatch
        self._decodes: dict[int, Span] = {}
        self._traced = 0  # choices

    def carried(self, request: GenerationRequest) -> GenerationRequest:
        """Return a request that takes the trace along, for a worker on another machine."""
        return replace(request, trace_context=tuple(self._dispatch.propagation().items()))

    def observe(self, delta: Delta) -> None:
        """Take note of a delta as it passes: spans begin and end with what it tells."""
        if delta.phases is not None:
            self.begun(delta.choice, delta.phases)
        if delta.finish_reason is not None:
            self.finished(delta, time.monotonic())

    def begun(self, choice: int, phases: Phases) -> None:
        """Make the spans of a choice whose first token is there, on this worker."""
        if self._traced == MOST_CHOICES:
            self._dispatch.set({"draftgate.traced_choices": MOST_CHOICES})
            return
        self._traced += 1
        if phases.recorded:
            return
        which = {"draftgate.choice": choice}
        self._dispatch.child("worker.queue", which, phases.queued_s).end(phases.scheduled_s)
        self._prefill(choice, phases)
        self._decodes[choice] = self._dispatch.child("decode", which, phases.first_token_s)

    def finished(self, delta: Delta, at_s: float) -> None:
        """End the `decode` of a choice with its last delta."""
        span = self._decodes.get(delta.choice)
        if span is None:
            return
        if delta.outcome is not None:
            span.set(outcome_attributes(delta.outcome))
        self._end(delta.choice, at_s)

    def end(self) -> None:
        """End what still runs, now: the request ends."""
        for choice in list(self._decodes):
            self._end(choice, None)

    def _prefill(self, choice: int, phases: Phases) -> None:
        chunks = phases.chunks
        attributes = {
            "draftgate.choice": choice,
            "draftgate.prefill.chunks": len(chunks),
            "draftgate.prefill.tokens": sum(tokens for _, tokens in chunks),
        }
        span = self._dispatch.child("prefill", attributes, phases.scheduled_s)
        for at_s, tokens in chunks[:MOST_CHUNKS]:
            span.event("prefill_chunk", {"draftgate.tokens": tokens}, at_s)
        span.end(phases.first_token_s)

    def _end(self, choice: int, at_s: float | None) -> None:
        span = self._decodes.pop(choice, None)
        if span is not None:
            span.end(at_s)
