"""From deliveries in virtual time to loadgen's records, so that its figures and reports apply."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from itertools import repeat
from typing import Any, overload

from msgspec import to_builtins

from draftgate.backends.sim.worker import Deliveries
from draftgate.backends.types import Delta
from draftgate.gateway.cli.simulate.prompts import without_text
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.http.answer import speculation_reply
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import PlannedRequest, Record, TextChunk


class Chunks(Sequence[TextChunk]):
    """Chunks as a record has them, in a tenth of the memory: a simulation has millions."""

    __slots__ = ("_came",)

    def __init__(self, came: Deliveries) -> None:
        self._came = came

    def __len__(self) -> int:
        return len(self._came.at_s)

    def __iter__(self) -> Iterator[TextChunk]:
        return map(TextChunk, self._came.at_s, self._came.tokens, repeat(0))

    @overload
    def __getitem__(self, place: int) -> TextChunk: ...
    @overload
    def __getitem__(self, place: slice) -> Sequence[TextChunk]: ...
    def __getitem__(self, place: int | slice) -> TextChunk | Sequence[TextChunk]:
        if isinstance(place, slice):
            return [self[each] for each in range(*place.indices(len(self)))]
        return TextChunk(self._came.at_s[place], self._came.tokens[place], 0)


def record_of(planned: PlannedRequest, placed: Placement, last: Delta, came: Deliveries) -> Record:
    """Return the record of an answer that came whole."""
    assert planned.at_s is not None
    prompt, output = len(placed.request.prompt_ids), sum(came.tokens)
    return Record(
        PlannedRequest(planned.index, planned.at_s, without_text(planned.request)),
        planned.at_s,
        planned.at_s,
        came.at_s[-1],
        Verdict.OK,
        chunks=Chunks(came),
        finish_reasons=(str(last.finish_reason),),
        usage={
            "prompt_tokens": prompt,
            "completion_tokens": output,
            "prompt_tokens_details": {"cached_tokens": last.cached_tokens},
        },
        metrics=_metrics(placed, last) | _queued(planned.at_s, came),
        status=200,
    )


def refusal_of(planned: PlannedRequest, status: int, detail: str) -> Record:
    """Return the record of a request that was refused when it came."""
    assert planned.at_s is not None
    kept = PlannedRequest(planned.index, planned.at_s, without_text(planned.request))
    at_s = planned.at_s
    return Record(kept, at_s, at_s, at_s, Verdict.HTTP_STATUS, detail=detail, status=status)


def _metrics(placed: Placement, last: Delta) -> dict[str, Any]:
    assert last.outcome is not None
    told: dict[str, Any] = to_builtins(speculation_reply(placed, last.outcome))
    told.pop("reason")  # a sentence for each of 100,000 requests, and nobody asks for it
    return {"worker_id": placed.worker.worker_id, "speculative_decoding": told}


def _queued(at_s: float, came: Deliveries) -> dict[str, float]:
    """Return the scheduling delay: from arrival to the first step that it was in."""
    return {} if came.scheduled_s is None else {"queue_s": came.scheduled_s - at_s}
