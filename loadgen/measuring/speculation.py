"""What the server decided about speculation, and what came of it, where it tells.

Read from `metrics.speculative_decoding` of each answer, or with several prompts from that of each
of `metrics.prompts`. The counts have vLLM's names, so they are read from a vLLM, too.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from itertools import zip_longest
from statistics import fmean
from typing import Any

from draftgate.loadgen.types import Record


@dataclass(frozen=True, slots=True)
class SpeculationReport:
    """The decision for one prompt; None or empty where the server is silent.

    Attributes:
        max_draft_tokens: the most tokens to draft in a step: k.
        price: expected tokens that a draft slot had to promise then, at its worker.
        steps: verifications.
        drafted, accepted: tokens.
        histogram: steps that accepted 0, 1, 2, ... tokens.
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


@dataclass(slots=True)
class SpeculationTotals:
    """Decisions of a run, counted.

    Attributes:
        prompts: how many decisions were told.
        policies, modes, proposers, max_draft_tokens, workers: how often each was chosen.
        prices: one for each decision that told it.
        steps, drafted, accepted, histogram: sums.
    """

    prompts: int = 0
    policies: Counter[str] = field(default_factory=Counter)
    modes: Counter[str] = field(default_factory=Counter)
    proposers: Counter[str] = field(default_factory=Counter)
    max_draft_tokens: Counter[int] = field(default_factory=Counter)
    workers: Counter[str] = field(default_factory=Counter)
    prices: list[float] = field(default_factory=list)
    steps: int = 0
    drafted: int = 0
    accepted: int = 0
    histogram: tuple[int, ...] = ()

    @property
    def acceptance(self) -> float | None:
        """Accepted over drafted tokens; None if none were drafted."""
        return self.accepted / self.drafted if self.drafted else None

    @property
    def accepted_per_step(self) -> float | None:
        """Accepted draft tokens over verifications; None if there were none."""
        return self.accepted / self.steps if self.steps else None

    @property
    def mean_price(self) -> float | None:
        """Mean price of a draft slot; None if the server told none."""
        return fmean(self.prices) if self.prices else None

    def add(self, decision: SpeculationReport) -> None:
        """Count one more."""
        self.prompts += 1
        for counter, value in (
            (self.policies, decision.policy),
            (self.modes, decision.mode),
            (self.proposers, decision.proposer),
            (self.workers, decision.worker_id),
        ):
            if value is not None:
                counter[value] += 1
        if decision.max_draft_tokens is not None:
            self.max_draft_tokens[decision.max_draft_tokens] += 1
        if decision.price is not None:
            self.prices.append(decision.price)
        self.steps += decision.steps
        self.drafted += decision.drafted
        self.accepted += decision.accepted
        both = zip_longest(self.histogram, decision.histogram, fillvalue=0)
        self.histogram = tuple(a + b for a, b in both)

    def as_dict(self) -> dict[str, Any]:
        """Return the counts, most frequent choices first, and the shares."""
        return {
            "prompts": self.prompts,
            "policies": dict(self.policies.most_common()),
            "modes": dict(self.modes.most_common()),
            "proposers": dict(self.proposers.most_common()),
            "max_draft_tokens": {str(k): n for k, n in sorted(self.max_draft_tokens.items())},
            "workers": dict(sorted(self.workers.items())),
            "mean_price": self.mean_price,
            "num_spec_steps": self.steps,
            "num_drafted_tokens": self.drafted,
            "num_accepted_tokens": self.accepted,
            "acceptance_histogram": list(self.histogram),
            "acceptance": self.acceptance,
            "accepted_per_step": self.accepted_per_step,
        }


def total_speculation(records: Iterable[Record]) -> SpeculationTotals | None:
    """Count the decisions for all records, failed ones too; None if the server told of none."""
    counted = SpeculationTotals()
    for record in records:
        for decision in speculation_reports(record):
            counted.add(decision)
    return counted if counted.prompts else None


def speculation_reports(record: Record) -> Iterator[SpeculationReport]:
    """Yield the decisions for a record's prompts, in their order; nothing where none are told."""
    for request in record.requests:
        metrics = request.metrics or {}
        prompts = metrics.get("prompts")
        for told in prompts if isinstance(prompts, list) else [metrics]:
            report = told.get("speculative_decoding") if isinstance(told, dict) else None
            if isinstance(report, dict):
                yield _decision(report, told.get("worker_id"))


def _decision(report: dict[str, Any], worker_id: Any) -> SpeculationReport:
    histogram = report.get("acceptance_histogram")
    return SpeculationReport(
        policy=_text(report.get("policy")),
        mode=_text(report.get("mode")),
        proposer=_text(report.get("proposer")),
        max_draft_tokens=_number(report.get("max_draft_tokens")),
        worker_id=_text(worker_id),
        price=_amount(report.get("price")),
        steps=_number(report.get("num_spec_steps")) or 0,
        drafted=_number(report.get("num_drafted_tokens")) or 0,
        accepted=_number(report.get("num_accepted_tokens")) or 0,
        histogram=tuple(_number(n) or 0 for n in histogram) if isinstance(histogram, list) else (),
    )


def _text(value: Any) -> str | None:
    return value if isinstance(value, str) else None


def _number(value: Any) -> int | None:
    return value if isinstance(value, int) and value >= 0 else None


def _amount(value: Any) -> float | None:
    return float(value) if isinstance(value, int | float) and value >= 0 else None
