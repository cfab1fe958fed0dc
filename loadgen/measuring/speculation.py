"""What the server reported about speculation: its decisions, and how many drafts were accepted.

Read from `metrics.speculative_decoding` of each answer, or, for several prompts, from that of each
of `metrics.prompts`. The counts have vLLM's names, so those of a vLLM are read, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from itertools import zip_longest
from statistics import fmean
from typing import Any

from draftgate.loadgen.types import Record


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """The report for one prompt. A value is None, 0 or empty where the server reports none.

    Attributes:
        max_draft_tokens: the longest draft of a step: k.
        price: the expected tokens that a draft slot had to promise at its worker.
        steps: verifications.
        drafted, accepted: tokens.
        histogram: how many steps accepted 0, 1, 2, ... tokens.
    """

    policy: str | None
    mode: str | None
    proposer: str | None
    max_draft_tokens: int | None
    worker_id: str | None
    price: float | None
    steps: int
    drafted: int
    accepted: int
    histogram: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class SpeculationTotals:
    """The reports of a run, counted; at least one."""

    reports: Sequence[SpeculationReport]

    def count(self, name: str) -> Counter[Any]:
        """Return how often each value of a field of the reports occurs."""
        return Counter(v for r in self.reports if (v := getattr(r, name)) is not None)

    def sum(self, name: str) -> int:
        """Return the sum of `steps`, `drafted` or `accepted`."""
        return sum(getattr(report, name) for report in self.reports)

    @property
    def histogram(self) -> tuple[int, ...]:
        """How many steps accepted 0, 1, 2, ... tokens."""
        return tuple(map(sum, zip_longest(*(r.histogram for r in self.reports), fillvalue=0)))

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens; None if none were drafted."""
        drafted = self.sum("drafted")
        return self.sum("accepted") / drafted if drafted else None

    @property
    def accepted_per_step(self) -> float | None:
        """Accepted draft tokens over verifications; None if there were none."""
        steps = self.sum("steps")
        return self.sum("accepted") / steps if steps else None

    @property
    def mean_price(self) -> float | None:
        """Mean price of a draft slot; None if the server reported none."""
        prices = [report.price for report in self.reports if report.price is not None]
        return fmean(prices) if prices else None

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, most frequent choices first, and the shares."""
        return {
            "prompts": len(self.reports),
            "policies": dict(self.count("policy").most_common()),
            "modes": dict(self.count("mode").most_common()),
            "proposers": dict(self.count("proposer").most_common()),
            "max_draft_tokens": {
                str(k): n for k, n in sorted(self.count("max_draft_tokens").items())
            },
            "workers": dict(sorted(self.count("worker_id").items())),
            "mean_price": self.mean_price,
            "num_spec_steps": self.sum("steps"),
            "num_drafted_tokens": self.sum("drafted"),
            "num_accepted_tokens": self.sum("accepted"),
            "acceptance_histogram": list(self.histogram),
            "acceptance": self.acceptance,
            "accepted_per_step": self.accepted_per_step,
        }


def total_speculation(records: Iterable[Record]) -> SpeculationTotals | None:
    """Count the reports of all records, failed ones included; None if the server sent none."""
    reports = [report for record in records for report in speculation_reports(record)]
    return SpeculationTotals(reports) if reports else None


def speculation_reports(record: Record) -> Iterator[SpeculationReport]:
    """Yield the reports for a record's prompts, in their order."""
    for request in record.http_records:
        metrics = request.metrics or {}
        prompts = metrics.get("prompts")
        for prompt in prompts if isinstance(prompts, list) else [metrics]:
            report = prompt.get("speculative_decoding") if isinstance(prompt, dict) else None
            if isinstance(report, dict):
                yield _parse(report | {"worker_id": prompt.get("worker_id")})


def _parse(report: dict[str, Any]) -> SpeculationReport:
    histogram = report.get("acceptance_histogram")
    counts = histogram if isinstance(histogram, list) else []
    return SpeculationReport(
        policy=_value(report, "policy", str),
        mode=_value(report, "mode", str),
        proposer=_value(report, "proposer", str),
        max_draft_tokens=_value(report, "max_draft_tokens", int),
        worker_id=_value(report, "worker_id", str),
        price=_value(report, "price", float),
        steps=_value(report, "num_spec_steps", int) or 0,
        drafted=_value(report, "num_drafted_tokens", int) or 0,
        accepted=_value(report, "num_accepted_tokens", int) or 0,
        histogram=tuple(n if isinstance(n, int) and n >= 0 else 0 for n in counts),
    )


def _value(report: dict[str, Any], name: str, kind: type) -> Any:
    """Return a field of that type; None if it has another type, or is negative."""
    value = report.get(name)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, int | float) and value < 0):
        return None
    return value
