"""The requests of questions that took several: how each kind did, and what it took of the time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import (
    Distribution,
    distribution,
    errors,
    intact,
    latency_s,
    ttft_s,
)
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.types import Record

HOP_FORMULAS: Final = {
    "TTFT": "first text (of embeddings: the answer) - the end of the hop before it (of the"
    " first: scheduled)",
    "latency": "end of the hop - the end of the hop before it",
    "of the deadline": "latency of the hop / the question's deadline, or without one / its latency",
    "as announced": "intact hops within the TTFT and TPOT that their headers announced",
}


@dataclass(frozen=True, slots=True)
class Hop:
    """The requests of one name; distributions are over intact ones.

    Attributes:
        announced_met: how many were intact and as fast as their headers asked.
        share: of the question's deadline, or of its latency where it had none.
        errors: how many failed, by cause.
        facts: by name, how many of how many were so.
    """

    name: str
    requests: int
    intact: int
    announced_met: int
    ttft_s: Distribution | None
    latency_s: Distribution | None
    share: Distribution | None
    errors: dict[str, int]
    facts: dict[str, tuple[int, int]]


def hops(records: Iterable[Record]) -> list[Hop]:
    """Return the kinds of hops in the order of the first question that had them; none if none."""
    by_name: dict[str, list[tuple[Record, Record]]] = {}
    for record in records:
        for hop in record.hops:
            by_name.setdefault(hop.planned.request.hop, []).append((record, hop))
    return [_hop(name, pairs) for name, pairs in by_name.items()]


def hops_as_dict(taken: Iterable[Hop]) -> dict[str, Any]:
    """Return what the summary says of hops, by name."""
    return {hop.name: _as_dict(hop) for hop in taken}


def _hop(name: str, pairs: Sequence[tuple[Record, Record]]) -> Hop:
    """Return the figures of hops, each beside the record of its question."""
    requests = [hop for _, hop in pairs]
    whole = intact(requests)
    first_texts_s = (ttft_s(hop) for hop in whole)
    held, told = Counter[str](), Counter[str]()
    for hop in requests:
        for fact, holds in hop.planned.request.facts:
            told[fact] += 1
            held[fact] += holds
    return Hop(
        name,
        len(requests),
        len(whole),
        sum(map(meets_slo, requests)),
        distribution(value for value in first_texts_s if value is not None),
        distribution(map(latency_s, whole)),
        distribution(_shares(pairs)),
        errors(requests),
        {fact: (held[fact], told[fact]) for fact in told},
    )


def _shares(pairs: Iterable[tuple[Record, Record]]) -> list[float]:
    whole_s = [
        (latency_s(hop), record.planned.request.slo.latency_s or latency_s(record))
        for record, hop in pairs
        if hop.verdict == Verdict.OK
    ]
    return [taken_s / all_s for taken_s, all_s in whole_s if all_s > 0]


def _as_dict(hop: Hop) -> dict[str, Any]:
    figures = {"ttft_s": hop.ttft_s, "latency_s": hop.latency_s, "share": hop.share}
    return {
        "requests": hop.requests,
        "intact": hop.intact,
        "announced_met": hop.announced_met,
        "errors": hop.errors,
        **{key: None if found is None else found.as_dict() for key, found in figures.items()},
        "facts": {name: list(counts) for name, counts in hop.facts.items()},
    }
