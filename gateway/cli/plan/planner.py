"""The search for a deployment, with bounds, simulations and the form of the plan."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, Final

from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.gateway.cli.plan.goodput import CHECKED, Simulation
from draftgate.gateway.cli.plan.machine_types import MachineTypes
from draftgate.gateway.cli.plan.machines import OFF
from draftgate.gateway.cli.plan.sources import Source, lengths_of, source_of
from draftgate.gateway.cli.simulate.experiment import NEVER_LATE
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.search.types import SearchGoal
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import LoadRun, Slo
from draftgate.policies.planning.bounds import Bounds, Lengths
from draftgate.policies.planning.deployments import (
    Candidate,
    Deployment,
    Layout,
    Measured,
    Search,
    bound_rps,
    find_best,
    find_least,
    ranked,
    refined,
)
from draftgate.policies.planning.throughput import Targets

MOST_REQUESTS: Final = 6000
"""Most simulated requests per deployment. An interval of 5% needs 2,000 to 8,000 requests near the
root. Chosen, not tuned, 2026-11-24."""

ROUGH_PRECISION: Final = 0.25
ROUGH_REQUESTS: Final = 1500
"""Precision and most simulated requests per deployment of the first, rough search. Chosen, not
tuned, 2026-11-24."""

MORE: Final = 3
"""How many units a plan may have more than the goodput of one unit predicts."""


def link_of(gbps: float | None) -> KvLink:
    """Return the link of an option in Gbit/s, or the default link for None."""
    return LOCAL_LINK if gbps is None else KvLink(gbps * 1e9 / 8, LOCAL_LINK.latency_s)


def targets_of(ttft_ms: float | None, tpot_ms: float | None, share: float) -> Targets:
    """Return the targets of the options.

    Raises:
        ValueError: no target is given, or the share is not between 0 and 1.
    """
    if ttft_ms is None and tpot_ms is None:
        raise ValueError("a plan needs --slo-ttft-ms or --slo-tpot-ms")
    if not 0.0 < share < 1.0:
        raise ValueError(f"--share must be between 0 and 1, not {share}")
    slo = Slo.of_ms(ttft_ms, tpot_ms)
    return Targets(slo.ttft_s or math.inf, slo.tpot_s or math.inf, share)


@dataclass(frozen=True, slots=True)
class Planner:
    """Finds deployments of machines for a workload.

    Attributes:
        bounds: bounds of one machine of each type.
        goal: share, precision and warm-up of each search for a rate.
    """

    machines: MachineTypes
    simulation: Simulation
    bounds: Mapping[str, Bounds]
    goal: SearchGoal

    @classmethod
    def of(
        cls,
        machines: MachineTypes,
        source: Source,
        targets: Targets,
        *,
        link: KvLink,
        phases: Mapping[Layout, str],
        precision: float,
        seed: int,
    ) -> Planner:
        """Return a planner for the mean lengths of a source.

        Args:
            link: link between the machines.
            phases: the phases policy of each layout.
        """
        lengths = Lengths.of(lengths_of(source), targets.share)
        goal = SearchGoal(
            start_rps=1.0,
            limit_s=_finite(targets.ttft_s),
            answer_s=_finite(lengths.output_tokens * targets.tpot_s),
            share=targets.share,
            precision=precision,
            most_requests=MOST_REQUESTS,
            seed=seed,
        )
        simulation = Simulation(source, machines.files, phases, link)
        return cls(machines, simulation, machines.bounds(lengths, targets), goal)

    def candidate(self, deployment: Deployment, weight: float) -> Candidate:
        """Return a deployment with its bound."""
        return Candidate(deployment, bound_rps(deployment, self.bounds), weight)

    def search(self, candidates: Iterable[Candidate], most: int) -> Search:
        """Simulate the candidates that may be the best, first roughly and then precisely.

        Args:
            most: most candidates to simulate.
        """
        possible = ranked(one for one in candidates if one.bound_rps > 0.0)
        if self.goal.precision >= ROUGH_PRECISION:
            return find_best(possible, self.measure, most)
        rough = replace(self.goal, precision=ROUGH_PRECISION, most_requests=ROUGH_REQUESTS)
        found = find_best(possible, partial(self.measure, goal=rough), most)
        return refined(found, self.measure)

    def search_least(self, candidates: Iterable[Candidate], rate_rps: float, most: int) -> Search:
        """Simulate candidates in the order of their weights until one serves a rate.

        Args:
            most: most candidates to simulate.
        """
        return find_least(candidates, rate_rps, lambda one: self.holds(one, rate_rps), most)

    def measure(
        self, candidate: Candidate, beat_rps: float = 0.0, goal: SearchGoal | None = None
    ) -> Measured:
        """Return the goodput of a candidate (`Simulation.measure`).

        Args:
            goal: another goal than that of the planner.
        """
        with without_full_gc():
            return self.simulation.measure(candidate, goal or self.goal, beat_rps)

    def holds(self, candidate: Candidate, rate_rps: float) -> bool:
        """Return whether a deployment serves a rate, by one simulation."""
        with without_full_gc():
            return self.simulation.holds(candidate.deployment, self.goal, rate_rps)

    def check(self, deployment: Deployment, rate_rps: float) -> dict[str, Any]:
        """Simulate a deployment at a rate, and return the `summary/1`."""
        requests = self.simulation.source.requests(rate_rps, self.goal.seed, CHECKED)
        with without_full_gc():
            records = self.simulation.records(deployment, requests, self.goal.seed)
        run = LoadRun(
            {"model": str(deployment), "url": "simulated", "seed": self.goal.seed},
            records,
            max(record.end_s for record in records),
            CHECKED / rate_rps,
            NEVER_LATE,
        )
        return summarize(run)

    def enough(self, unit: Measured, rate_rps: float) -> tuple[Deployment, dict[str, Any]]:
        """Return as many copies of a unit as serve a rate, and their simulation.

        If the simulation misses the share, the deployment gets up to `MORE` more units.
        """
        assert unit.rate_rps
        units = math.ceil(rate_rps / unit.rate_rps)
        for times in range(units, units + MORE + 1):
            deployment = unit.candidate.deployment.repeated(times)
            summary = self.check(deployment, rate_rps)
            if summary["attainment"] >= self.goal.share:
                break
        return deployment, summary


def planner_of(  # noqa: PLR0913 - each is an option
    profiles: str,
    workload: str | None,
    trace: Path | None,
    ttft_ms: float | None,
    tpot_ms: float | None,
    share: float,
    *,
    link_gbps: float | None,
    phases: Mapping[Layout, str],
    precision: float,
    seed: int,
) -> Planner:
    """Return the planner that the options describe.

    Raises:
        OSError: the trace cannot be read.
        ValueError: a profile, a target or the source of the requests is missing or wrong.
    """
    machines = MachineTypes.load(profiles)
    targets = targets_of(ttft_ms, tpot_ms, share)
    source = source_of(workload, trace, Slo.of_ms(ttft_ms, tpot_ms))
    return Planner.of(
        machines,
        source,
        targets,
        link=link_of(link_gbps),
        phases=phases,
        precision=precision,
        seed=seed,
    )


def plan_of(
    question: str,
    machines: MachineTypes,
    search: Search,
    deployment: Deployment | None,
    simulated: dict[str, Any] | None,
) -> dict[str, Any]:
    """Return a plan in the form `plan/1` with its search, of no machines for None."""
    groups = () if deployment is None else deployment.groups
    counts = Counter(dict.fromkeys(machines.names, 0))
    for group in groups:
        counts[group.profile] += group.count
    return {
        "format": "plan/1",
        "question": question,
        "feasible": deployment is not None,
        "cost_per_hour": None if deployment is None else deployment.total(machines.prices),
        "counts": dict(counts),
        "machines": [
            {
                "profile": machines.files[group.profile],
                "role": group.role.value,
                "count": group.count,
                "speculation": OFF,
            }
            for group in groups
        ],
        "infeasible_buckets": [],
        "simulated": simulated,
        "search": search_as_json(search),
    }


def search_as_json(search: Search) -> dict[str, Any]:
    """Return the measured deployments, and the bounds of the others."""
    return {
        "complete": search.complete,
        "measured": [
            {
                "deployment": str(one.candidate.deployment),
                "layout": one.candidate.deployment.layout.value,
                "bound_rps": one.candidate.bound_rps,
                "goodput_rps": one.rate_rps,
                "interval": [one.low_rps, one.high_rps if one.high_rps < math.inf else None],
                "weight": one.candidate.weight,
            }
            for one in search.measured
        ],
        "unmeasured": [
            {"deployment": str(one.deployment), "bound_rps": one.bound_rps, "weight": one.weight}
            for one in search.unmeasured
        ],
    }


def _finite(value: float) -> float:
    return value if value < math.inf else 0.0


def print_search(search: Search, deployment: Deployment | None) -> None:
    """Print the measured deployments and the plan."""
    from rich.console import Console
    from rich.table import Table

    console = Console()
    if deployment is None:
        console.print("no deployment meets the targets")
        return
    table = Table("deployment", "bound, requests/s", "goodput, requests/s", "interval")
    for one in sorted(search.measured, key=lambda one: -one.value):
        high = "" if one.high_rps == math.inf else f" to {one.high_rps:.2f}"
        table.add_row(
            str(one.candidate.deployment),
            f"{one.candidate.bound_rps:.2f}",
            "-" if one.rate_rps is None else f"{one.rate_rps:.2f}",
            f"{one.low_rps:.2f}{high}",
        )
    console.print(table)
    console.print(f"recommended ({deployment.layout}): {deployment}")
    if not search.complete:
        left = len(search.unmeasured)
        console.print(f"{left} deployments with lower bounds were not simulated")
