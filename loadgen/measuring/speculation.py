"""Summarizes the speculation that the server reported: its decisions and accepted drafts.

The reports are in `metrics.speculative_decoding` of each response, or for several prompts in each
of `metrics.prompts`. The counts have vLLM's names, so reports of a vLLM server are supported.
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
    """The report for one prompt. A value that the server does not report is None, 0 or empty.

    Attributes:
        max_draft_tokens: k, the longest draft of a step.
        price: the expected accepted tokens that a draft slot needed to be worth its time.
        steps: the number of verifications.
        drafted, accepted: numbers of tokens.
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
    """The counted reports of a run, at least one."""

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
        """Accepted over drafted tokens, or None without drafted tokens."""
        drafted = self.sum("drafted")
        return self.sum("accepted") / drafted if drafted else None

    @property
    def accepted_per_step(self) -> float | None:
        """Accepted draft tokens over verifications, or None without verifications."""
        steps = self.sum("steps")
        return self.sum("accepted") / steps if steps else None

    @property
    def mean_price(self) -> float | None:
        """Mean price of a draft slot, or None if the server reported no price."""
        prices = [report.price for report in self.reports if report.price is not None]
        return fmean(prices) if prices else None

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, most frequent values first, and the shares."""
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
    """Return the totals of all records, including failed requests, or None without reports."""
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
    """Return a field of that type, or None if the field has another type or is negative."""
    value = report.get(name)
    if kind is float and isinstance(value, int):
        value = float(value)
    if not isinstance(value, kind) or (isinstance(value, int | float) and value < 0):
        return None
    return value
