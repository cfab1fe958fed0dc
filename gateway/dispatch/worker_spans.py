"""The spans `worker.queue`, `prefill` and `decode` of each choice on its worker.

The spans are children of the `dispatch` span and use the times that the worker recorded. The first
token of a choice carries these times (`Delta.phases`), so its arrival creates all three spans. The
span `decode` ends with the choice, or with `dispatch` if that ends first. A worker that resumes a
request has its own `dispatch` span.

A worker on another node has already created its spans there, as children of `peer.generate`. This
node then creates none (`Phases.recorded`).
"""

from __future__ import annotations

from typing import Final

from yarl import URL

from draftgate.backends.types import Delta, GenerationRequest, Phases
from draftgate.gateway.dispatch.span_attributes import outcome_attributes, revision_attributes
from draftgate.gateway.tracing import Attributes, AttributeValue, Span
from draftgate.policies.values import replace

MOST_CHOICES: Final = 8
"""Maximum choices with spans per request. With more, `draftgate.traced_choices` is set."""

MOST_CHUNKS: Final = 32
"""Maximum prefill chunks with an event, which cover 16k tokens in steps of 512. The attribute
`draftgate.prefill.chunks` counts all chunks. (The SDK's own limit is 128 events.)"""


def open_dispatch(
    parent: Span, worker_id: str, server: str | None, placed: Attributes | None = None
) -> Span:
    """Start a `dispatch` span, which is a CLIENT span with the address of another server.

    Args:
        server: URL of the server, or None for a worker of this process.
        placed: further attributes.
    """
    if not parent.recording:
        return parent.child("dispatch")
    found: dict[str, AttributeValue] = {"draftgate.worker_id": worker_id, **(placed or {})}
    if server is not None:
        url = URL(server)
        found |= {"server.address": url.host or "", "server.port": url.port or 0}
    return parent.child("dispatch", found, client=server is not None)


class WorkerSpans:
    """The child spans of one recorded `dispatch` span."""

    def __init__(self, dispatch: Span) -> None:
        self._dispatch = dispatch
        self._decodes: dict[int, Span] = {}  # running spans, by choice
        self._traced_choices = 0

    def carried(self, request: GenerationRequest) -> GenerationRequest:
        """Return the request with the trace's headers, for a worker on another machine."""
        return replace(request, trace_context=tuple(self._dispatch.propagation().items()))

    def observe(self, delta: Delta) -> None:
        """Start and end spans for a delta.

        The caller must pass every delta.
        """
        if delta.phases is not None:
            self._begin(delta.choice, delta.phases)
        if delta.finish_reason is not None:
            decode = self._decodes.pop(delta.choice, None)
            if decode is not None:
                if delta.outcome is not None:
                    decode.set(outcome_attributes(delta.outcome))
                    for revision in delta.outcome.revisions:
                        decode.event("revision", revision_attributes(revision), revision.at_s)
                decode.end()

    def end(self) -> None:
        """End all running spans."""
        for decode in self._decodes.values():
            decode.end()
        self._decodes.clear()

    def _begin(self, choice: int, phases: Phases) -> None:
        if self._traced_choices == MOST_CHOICES:
            self._dispatch.set({"draftgate.traced_choices": MOST_CHOICES})
            return
        self._traced_choices += 1
        if phases.recorded:
            return
        which = {"draftgate.choice": choice}
        self._dispatch.child("worker.queue", which, phases.queued_s).end(phases.scheduled_s)
        self._prefill(choice, phases)
        self._decodes[choice] = self._dispatch.child("decode", which, phases.first_token_s)

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
