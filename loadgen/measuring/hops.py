"""Summarizes the hops of flows by name: their outcomes and their share of the user's time."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

from draftgate.loadgen.measuring.metrics import (
    Distribution,
    distribution,
    errors,
    intact,
    latency_s,
    ttft_s,
)
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.types import Record, Slo

HOP_FORMULAS: Final = {
    "TTFT": "first text (for embeddings: response) - end of the previous hop (for the"
    " first: scheduled)",
    "latency": "end of the hop - end of the previous hop",
    "of the deadline": "latency of the hop / deadline of the flow (or its latency)",
    "as announced": "intact hops within the TTFT and TPOT that their headers announced",
}


@dataclass(frozen=True, slots=True)
class HopSummary:
    """The hops of one name. Distributions are over intact hops.

    Attributes:
        announced_met: how many hops were intact and as fast as their headers announced, or None
            if none announced a target.
        share: the hop's share of the flow's deadline, or of its latency without a deadline.
        errors: how many hops failed, by cause.
        facts: for each name, how often the fact was true and how often it was known.
    """

    name: str
    requests: int
    intact: int
    announced_met: int | None
    ttft_s: Distribution | None
    latency_s: Distribution | None
    share: Distribution | None
    errors: dict[str, int]
    facts: dict[str, tuple[int, int]]

    def as_dict(self) -> dict[str, Any]:
        """Return the hop's part of the summary."""
        times = {"ttft_s": self.ttft_s, "latency_s": self.latency_s, "share": self.share}
        return {
            "requests": self.requests,
            "intact": self.intact,
            "announced_met": self.announced_met,
            "errors": self.errors,
            **{key: None if found is None else found.as_dict() for key, found in times.items()},
            "facts": {name: list(counts) for name, counts in self.facts.items()},
        }


def summarize_hops(records: Iterable[Record]) -> list[HopSummary]:
    """Return the hops by name, in the order of the first flow, or nothing without hops."""
    by_name: dict[str, list[tuple[Record, Record]]] = {}
    for record in records:
        for hop in record.hops:
            by_name.setdefault(hop.planned.request.hop, []).append((record, hop))
    return [_summarize(name, pairs) for name, pairs in by_name.items()]


def _summarize(name: str, pairs: Sequence[tuple[Record, Record]]) -> HopSummary:
    """Return the summary of hops, each given with the record of its flow."""
    hops = [hop for _, hop in pairs]
    whole = intact(hops)
    first_texts_s = (ttft_s(hop) for hop in whole)
    true, known = Counter[str](), Counter[str]()
    for hop in hops:
        for fact, holds in hop.planned.request.facts:
            known[fact] += 1
            true[fact] += holds
    return HopSummary(
        name,
        len(hops),
        len(whole),
        sum(map(meets_slo, hops)) if any(h.planned.request.slo != Slo() for h in hops) else None,
        distribution(value for value in first_texts_s if value is not None),
        distribution(map(latency_s, whole)),
        distribution(_shares(pairs)),
        errors(hops),
        {fact: (true[fact], known[fact]) for fact in known},
    )


def _shares(pairs: Iterable[tuple[Record, Record]]) -> list[float]:
    times_s = [
        (latency_s(hop), flow.planned.request.slo.latency_s or latency_s(flow))
        for flow, hop in pairs
        if intact([hop])
    ]
    return [hop_s / flow_s for hop_s, flow_s in times_s if flow_s > 0]
