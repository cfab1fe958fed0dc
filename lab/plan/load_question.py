"""The answer of `draftgate plan mix` for a trace or a workload.

The integer program knows mean rates, and the simulation has real arrivals and the production
scheduler. The search varies the factor of over-provisioning: it grows while the share of requests
within the targets is missed, and is then bisected. An interrupted search returns what it knows.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain, count
from typing import Any, Final

from draftgate.lab.plan.machines import (
    AUTO,
    OFF,
    Rentable,
    check_speculation_flag,
    simulate_machines,
)
from draftgate.lab.plan.simulated import summary_of
from draftgate.lab.plan.solver import silent_solver
from draftgate.lab.plan.sources import Requests
from draftgate.lab.planning.best_deployment import Report
from draftgate.lab.planning.histogram import Bucket, PlannedLength
from draftgate.lab.planning.load_mix import LoadPlanner, Offer
from draftgate.lab.planning.mix import Mix
from draftgate.lab.planning.throughput import Targets
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.types import Record, Slo

ATTEMPTS: Final = 8
"""Largest number of simulations. Five times the factor of bursts are reached in the first five."""

_GROWTH: Final = 1.4
"""Growth of the factor while the share is missed. Growth by less takes more simulations."""

RESOLUTION: Final = 1.05
"""Ratio of a factor that suffices to one that does not, at which the search ends."""


@dataclass(frozen=True)
class LoadQuestion:
    """Which machines serve a load.

    Attributes:
        requests: the load, in a form that several simulations can use (`Requests.kept`).
        rate_rps: mean rate of the load.
        slo: targets of the requests, which `requests` have too.
        share: share of the requests that must meet both targets.
        types: types of machines by name.
        limits: number of machines that can be rented, by name.
        speculation: `off` or `auto`.
        proposer: what machines draft with.
        attempts: largest number of simulated mixes.
        report: receives each simulated mix.
        progress: receives the mix that is simulated, and how many of its requests have ended.
    """

    requests: Requests
    rate_rps: float
    slo: Slo
    share: float
    types: Mapping[str, Rentable]
    limits: Mapping[str, int]
    speculation: str = AUTO
    proposer: str = "ngram"
    attempts: int = ATTEMPTS
    report: Callable[[Attempt], None] = lambda _attempt: None
    progress: Report = lambda _what, _done, _of: None

    def __post_init__(self) -> None:
        """Check the settings.

        Raises:
            ValueError: a value is out of range, or a limit is for an unknown type.
        """
        check_speculation_flag(self.speculation)
        if unknown := self.limits.keys() - self.types.keys():
            raise ValueError(f"--limit {min(unknown)}: --profiles has no such profile")

    @cached_property
    def targets(self) -> Targets:
        """The targets, infinite where there is none."""
        limits_s = {"ttft_s": self.slo.ttft_s, "tpot_s": self.slo.tpot_s}
        given = {name: limit_s for name, limit_s in limits_s.items() if limit_s is not None}
        return Targets(**given, share=self.share)

    @cached_property
    def lengths(self) -> Sequence[PlannedLength]:
        """The lengths of the requests."""
        return self.requests.lengths()

    @cached_property
    def planner(self) -> LoadPlanner:
        """The predicted throughputs."""
        offers = {
            name: Offer(one.machine(), one.price, self.limits.get(name), self._drafts(one))
            for name, one in self.types.items()
        }
        return LoadPlanner.from_requests(self.lengths, offers, self.targets)

    def bursts(self) -> float:
        """Return the factor for the bursts of the load."""
        return self.planner.bursts(self.lengths, self.targets)

    def mix_at(self, factor: float, only: str | None = None) -> Mix:
        """Return the cheapest mix for a multiple of the rate."""
        with silent_solver():
            return self.planner.mix(factor * self.rate_rps, only)

    def mix_of(self, name: str, count: int) -> Mix:
        """Return a number of machines of one type."""
        counts = {**dict.fromkeys(self.types, 0), name: count}
        return Mix(counts, count * self.types[name].price)

    def simulate(self, mix: Mix) -> Sequence[Record]:
        """Return the records of the load on a mix, until the share is certainly missed."""
        most_missed = int((1.0 - self.share) * len(self.lengths) + 1e-9)
        step, ended = f"simulating {mix} with speculation {self.speculation}", count(1)
        self.progress(step, 0, len(self.lengths))
        return simulate_machines(
            mix.counts,
            self.requests,
            self.speculation,
            self.proposer,
            most_missed,
            lambda _record: self.progress(step, next(ended), len(self.lengths)),
        )

    def answer(self) -> tuple[dict[str, Any], Sequence[Record]]:
        """Return the plan as `plan/1`, and the simulated requests of its machines.

        There are no simulated requests if the plan is infeasible. With `auto`, the plan is the one
        without speculation if that is cheaper, because the searches simulate different mixes.

        Raises:
            KeyboardInterrupt: the search was interrupted before it had a mix.
        """
        found = self.solve()
        if self.speculation == OFF or found[0]["interrupted"]:
            return found
        try:
            without = replace(self, speculation=OFF).solve()
        except KeyboardInterrupt:
            return {**found[0], "interrupted": True}, found[1]
        plan, records = without if is_better(without[0], found[0]) else found
        return {**plan, "interrupted": without[0]["interrupted"]}, records

    def solve(self) -> tuple[dict[str, Any], Sequence[Record]]:
        """Return the plan and the simulated requests with `speculation`, even if it costs more."""
        factor = self.bursts()
        first = self.mix_at(factor)
        plan: dict[str, Any] = {
            "format": "plan/1",
            "question": "mix",
            "feasible": first.feasible,
            "cost_per_hour": None,
            "counts": dict(first.counts),
            "machines": [],
            "infeasible_buckets": [
                _lengths(self.planner.buckets[one]) for one in first.infeasible_buckets
            ],
            "simulated": None,
            "rate_rps": self.rate_rps,
            "speculation": self.speculation,
            "targets": {
                "ttft_s": self.slo.ttft_s,
                "tpot_s": self.slo.tpot_s,
                "share": self.share,
            },
            "prices_per_hour": {name: one.price for name, one in self.types.items()},
            "interrupted": False,
        }
        if not first.feasible:
            return plan, ()
        attempts, interrupted = self._simulated(factor)
        chosen = best_attempt(attempts, self.share) if attempts else Attempt(factor, first, ())
        plan |= {
            "cost_per_hour": chosen.mix.cost_per_hour,
            "counts": dict(chosen.mix.counts),
            "machines": self._machines(chosen.mix),
            "simulated": summary_of(chosen.records) if chosen.records else None,
            "bursts": factor,
            "over_provisioning": chosen.factor,
            "attempts": [one.as_dict() for one in attempts],
            "single_types": {} if interrupted else self._each_alone(chosen.factor, attempts),
            "interrupted": interrupted,
        }
        return plan, chosen.records

    def _simulated(self, factor: float) -> tuple[Sequence[Attempt], bool]:
        """Return the simulated mixes, and whether an interruption ended the search."""
        tried: list[Attempt] = []
        mixes = search_mix(self.mix_at, self.simulate, self.share, factor, self.attempts)
        try:
            for attempt in chain(mixes, self._single_types(tried)):
                tried.append(attempt)
                self.report(attempt)
        except KeyboardInterrupt:
            return tried, True
        return tried, False

    def _each_alone(
        self, factor: float | None, attempts: Sequence[Attempt]
    ) -> dict[str, dict[str, Any]]:
        """Return the number and the price of the machines of each type alone."""
        found = {
            name: self._alone(name, attempts) or self.mix_at(factor or self.bursts(), name)
            for name in self.types
        }
        return {
            name: {
                "count": one.counts[name] if one.feasible else None,
                "cost_per_hour": one.cost_per_hour if one.feasible else None,
            }
            for name, one in found.items()
        }

    def _single_types(self, attempts: Sequence[Attempt]) -> Iterator[Attempt]:
        """Simulate machines of one type that cost less than the best attempt.

        The program is cautious about several machines that share their queue, so fewer machines of
        one type than it needs may suffice.

        Args:
            attempts: all attempts so far, to which the caller appends those of this function.
        """
        for name, one in self.types.items():
            if not self.mix_at(1.0, name).feasible:
                continue
            while (chosen := best_attempt(attempts, self.share)).attainment >= self.share:
                most = math.ceil(chosen.mix.cost_per_hour / one.price - 1e-9) - 1
                machines = min(most, self.limits.get(name, most))
                mix = self.mix_of(name, machines)
                if machines < 1 or any(one.mix.counts == mix.counts for one in attempts):
                    break
                attempt = Attempt(None, mix, self.simulate(mix))
                yield attempt
                if attempt.attainment < self.share:
                    break

    def _alone(self, name: str, attempts: Sequence[Attempt]) -> Mix | None:
        """Return the fewest machines of one type that met the share in a simulation, if any."""
        met = [
            one.mix
            for one in attempts
            if one.attainment >= self.share
            and not any(count for other, count in one.mix.counts.items() if other != name)
        ]
        return min(met, key=lambda mix: mix.counts[name], default=None)

    def _drafts(self, one: Rentable) -> Any:
        if self.speculation == OFF:
            return lambda _bucket: ()
        return lambda bucket: one.drafts(bucket.class_name, bucket.output_range[0], self.share)

    def _machines(self, mix: Mix) -> list[dict[str, Any]]:
        return [
            {"profile": name, "role": "any", "count": count, "speculation": self.speculation}
            for name, count in mix.counts.items()
            if count
        ]


def is_better(plan: Mapping[str, Any], other: Mapping[str, Any]) -> bool:
    """Return whether a plan costs less than another one, or alone meets its share."""
    if not plan["feasible"] or not other["feasible"]:
        return bool(plan["feasible"])
    if plan["simulated"] is None:  # an interruption came first
        return False
    met, other_met = (
        one["simulated"]["attainment"] >= one["targets"]["share"] for one in (plan, other)
    )
    if met != other_met:
        return bool(met)
    return bool(plan["cost_per_hour"] < other["cost_per_hour"] - 1e-9)


def _lengths(bucket: Bucket) -> dict[str, Any]:
    return {
        "class": bucket.class_name,
        "prompt_tokens": list(bucket.prompt_range),
        "output_tokens": list(bucket.output_range),
    }


@dataclass(frozen=True, slots=True)
class Attempt:
    """A simulated mix.

    Attributes:
        factor: over-provisioning, as a multiple of the mean rate, or None for machines that the
            program did not choose.
        records: outcomes of the simulated requests.
    """

    factor: float | None
    mix: Mix
    records: Sequence[Record]

    @property
    def attainment(self) -> float:
        """Share of the requests that met both targets."""
        return sum(map(meets_slo, self.records)) / len(self.records)

    def as_dict(self) -> dict[str, Any]:
        """Return the attempt for JSON."""
        return {
            "over_provisioning": self.factor,
            "cost_per_hour": self.mix.cost_per_hour,
            "counts": dict(self.mix.counts),
            "attainment": self.attainment,
        }


def search_mix(
    mix_at: Callable[[float], Mix],
    simulate: Callable[[Mix], Sequence[Record]],
    share: float,
    factor: float,
    attempts: int = ATTEMPTS,
) -> Iterator[Attempt]:
    """Simulate mixes until one meets the share and a smaller factor gives none that does.

    The plan is the `best_attempt` of all yielded attempts.

    Args:
        mix_at: the cheapest mix for a factor, which must be feasible for the first factor.
        factor: the first factor, at least 1.
        attempts: largest number of simulations.
    """
    tried: list[Attempt] = []
    missed, met = 0.0, math.inf
    while len(tried) < attempts:
        mix = mix_at(factor)
        if not mix.feasible:
            break
        known = [one for one in tried if one.mix.counts == mix.counts]
        attempt = known[0] if known else Attempt(factor, mix, simulate(mix))
        if not known:
            tried.append(attempt)
            yield attempt
        if attempt.attainment >= share:
            met = factor
        else:
            missed = factor
        if met / max(missed, 1.0) <= RESOLUTION:
            break
        if met < math.inf:
            factor = math.sqrt(met * max(missed, 1.0))
        else:
            factor *= _GROWTH


def best_attempt(attempts: Sequence[Attempt], share: float) -> Attempt:
    """Return the cheapest attempt that meets the share, or the one that comes nearest."""
    met = [one for one in attempts if one.attainment >= share]
    if met:
        return min(met, key=lambda one: one.mix.cost_per_hour)
    return max(attempts, key=lambda one: one.attainment)
