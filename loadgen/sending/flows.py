"""A user's question from the records of the requests that answered it. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.types import SINGLE, PlannedRequest, Record, Single


def whole(planned: PlannedRequest, hops: Sequence[Record]) -> Record:
    """Return what became of a question, as its user saw it; the plain one's only record as it is.

    Text, usage and metrics are the last request's, held against what the user was promised and
    timed from the instant at which the user asked. One failed request fails the question, though a
    flow may have found a way around it: the answer is not the one that was asked for. Records keep
    no flow, which may hold an index and much else.

    Args:
        hops: of its requests, in order; at least one.
    """
    if isinstance(planned.flow, Single):
        return hops[0]
    first, last = hops[0], hops[-1]
    fault = next((hop for hop in hops if hop.verdict != Verdict.OK), None)
    asked = replace(last.planned.request, slo=planned.request.slo, hop="", facts=())
    return replace(
        last,
        planned=replace(planned, request=asked, flow=SINGLE),
        scheduled_s=first.scheduled_s,
        sent_s=first.sent_s,
        connect_s=first.connect_s,
        verdict=Verdict.OK.value if fault is None else fault.verdict,
        detail="" if fault is None else f"{fault.planned.request.hop}: {fault.detail}",
        vectors=(),
        hops=tuple(replace(hop, vectors=()) for hop in hops),
    )
