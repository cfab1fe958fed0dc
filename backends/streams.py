"""The event-loop side of a backend, which delivers the deltas of each step to their sinks.

A worker delivers one batch of deltas per step. The sink of each request takes its deltas in the
call that delivers them, so that no task switches between the worker and the client's connection.

A sink whose reader is slow keeps the deltas in an `UnreadDeltas`, which merges those of a choice.
So a slow reader gets fewer and larger chunks, and the request's own output limits the memory.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Iterable
from itertools import islice
from typing import Final

from draftgate.backends.base import DeltaSink
from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import Delta, GenerationRequest

MOST_AT_ONCE: Final = 64
"""Maximum deltas that are delivered in one callback of the event loop, which no callback may hold
for longer than 5 ms. A delta of text takes 7 to 11 us of a slow core, and the last delta of a
stream several times as much (AMD EPYC Zen 3, 2026-11-23)."""


class DeltaSinks:
    """The sinks of a backend's open requests, for use on the event loop's thread."""

    def __init__(self, on_end: Callable[[str, bool], None]) -> None:
        """Start without requests.

        Args:
            on_end: called once for each request that ends without `fail`, with its id and whether
                the worker still produces deltas, because the request was cancelled.
        """
        self._on_end = on_end
        self._open: dict[str, DeltaSink] = {}
        self._unfinished: dict[str, int] = {}  # number of choices, by request
        self._late: deque[tuple[str, Delta]] = deque()  # for the next callbacks

    def open(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Deliver the deltas of a request to a sink, until `request.choices` have finished.

        Submit the request to the worker afterwards.

        Raises:
            ValueError: a request of that id is open.
        """
        request_id = request.request_id
        if request_id in self._open:
            raise ValueError(f"request {request_id!r} is already running")
        self._open[request_id] = sink
        self._unfinished[request_id] = len(request.choices)

    def deliver(self, batch: Iterable[tuple[str, Delta]]) -> None:
        """Deliver the deltas of a step, and drop the deltas of requests that are not open.

        The rest of a large batch is delivered in further callbacks.
        """
        if self._late:
            self._late += batch
            return
        left = iter(batch)
        for request_id, delta in islice(left, MOST_AT_ONCE):
            self._put(request_id, delta)
        self._late += left
        if self._late:
            asyncio.get_running_loop().call_soon(self._deliver_late)

    def fail(
        self,
        message: str,
        kind: type[BackendFailed] = BackendFailed,
        request_id: str | None = None,
    ) -> None:
        """End a request, or every open request, with an error of this kind."""
        while self._late:
            self._put(*self._late.popleft())
        for open_id in tuple(self._open) if request_id is None else (request_id,):
            sink = self._open.pop(open_id, None)
            if sink is not None:
                del self._unfinished[open_id]
                sink.fail(kind(message))

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it is open."""
        self._close(request_id, cancelled=True)

    def __len__(self) -> int:
        return len(self._open)

    def __contains__(self, request_id: str) -> bool:
        return request_id in self._open

    def _put(self, request_id: str, delta: Delta) -> None:
        sink = self._open.get(request_id)
        if sink is None:
            return
        if delta.finish_reason is not None:
            self._unfinished[request_id] -= 1
            if not self._unfinished[request_id]:
                self._close(request_id, cancelled=False)
        try:
            sink.put(delta)
        except Exception as error:  # noqa: BLE001 - the owner of the sink gets the error
            self.cancel(request_id)
            sink.fail(error)

    def _deliver_late(self) -> None:
        for _ in range(min(MOST_AT_ONCE, len(self._late))):
            self._put(*self._late.popleft())
        if self._late:
            asyncio.get_running_loop().call_soon(self._deliver_late)

    def _close(self, request_id: str, *, cancelled: bool) -> None:
        if self._open.pop(request_id, None) is not None:
            del self._unfinished[request_id]
            self._on_end(request_id, cancelled)


class UnreadDeltas:
    """Deltas that wait for a reader, merged by choice."""

    def __init__(self) -> None:
        self._waiting: dict[int, list[Delta]] = {}  # by choice, in order of their wait

    def __bool__(self) -> bool:
        return bool(self._waiting)

    def put(self, delta: Delta) -> None:
        """Add a delta."""
        self._waiting.setdefault(delta.choice, []).append(delta)

    def pop(self) -> Delta:
        """Return a delta, merged from all deltas of the choice that waits longest."""
        deltas = self._waiting.pop(next(iter(self._waiting)))
        return deltas[0] if len(deltas) == 1 else _merged(deltas)

    @property
    def tokens(self) -> int:
        """Number of tokens that wait."""
        # Counted on demand, because deltas arrive far more often.
        return sum(len(delta.token_ids) for of in self._waiting.values() for delta in of)


def _merged(deltas: list[Delta]) -> Delta:
    """Merge consecutive deltas of one choice."""
    return deltas[-1]._replace(
        token_ids=tuple(token for delta in deltas for token in delta.token_ids),
        text="".join(delta.text for delta in deltas),
        logprobs=tuple(entry for delta in deltas for entry in delta.logprobs),
        steps=tuple(step for delta in deltas for step in delta.steps),
        drafts=tuple(draft for delta in deltas for draft in delta.drafts),
        # Only the first delta can have these two.
        phases=deltas[0].phases,
        prompt_logprobs=deltas[0].prompt_logprobs,
    )
