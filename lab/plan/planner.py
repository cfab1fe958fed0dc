"""The search for a deployment, with bounds and simulations."""

from __future__ import annotations

import math
import os
import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass, field, replace
from multiprocessing import active_children, get_context, parent_process
from threading import Thread
from typing import Final, Self, TypeVar

from msgspec import structs

from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.lab.plan.goodput import CHECKED, Simulation
from draftgate.lab.plan.machines import AUTO, CONFIG, MachineTypes, check_speculation_flag
from draftgate.lab.plan.options import DeploymentFlags
from draftgate.lab.plan.sources import Source, classes_of, lengths_of, source_of
from draftgate.lab.planning.best_deployment import (
    DeploymentCandidate,
    DeploymentSearch,
    Measured,
    Outcome,
    Report,
    find_best,
    find_least,
)
from draftgate.lab.planning.bounds import MeanLengths, RateBounds
from draftgate.lab.planning.deployments import Deployment, Layout, bound_rps
from draftgate.lab.planning.forecast import Forecast
from draftgate.lab.planning.throughput import Targets
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.search.types import SearchGoal
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import Record, Slo

MOST_REQUESTS: Final = 6000
"""Most simulated requests per deployment. An interval of 5% needs 2,000 to 8,000 requests near the
root. Chosen, not tuned, 2026-11-24."""

MORE: Final = 3
"""How many machines a plan may have more than the goodput of one unit predicts."""


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


T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Planner:
    """Finds deployments of machines for a workload.

    Attributes:
        targets: latency targets of the requests.
        bounds: bounds of one machine of each type without drafts.
        forecast: estimates of the rates without drafts.
        goal: share, precision and warm-up of each search for a rate.
        draft_bounds: the bounds with drafts, or none if no deployment may speculate.
    """

    machines: MachineTypes
    simulation: Simulation
    targets: Targets
    bounds: Mapping[str, RateBounds]
    forecast: Forecast
    goal: SearchGoal
    draft_bounds: Mapping[str, RateBounds] = field(default_factory=dict)

    @classmethod
    def for_source(
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
        """Return a planner for the mean lengths of a source, without drafts.

        Args:
            link: link between the machines.
            phases: the phases policy of each layout.
        """
        sample = lengths_of(source)
        lengths = MeanLengths.from_requests(sample, targets.share)
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
        bounds, forecast = (
            machines.bounds(lengths, targets),
            machines.forecast(sample, lengths, targets),
        )
        return cls(machines, simulation, targets, bounds, forecast, goal)

    def with_drafts(self, proposer: str) -> Planner:
        """Return a planner that compares each deployment without and with drafts."""
        source = self.simulation.source
        lengths = MeanLengths.from_requests(lengths_of(source), self.targets.share)
        config = structs.replace(CONFIG, proposer=proposer)
        return replace(
            self,
            simulation=replace(self.simulation, config=config),
            draft_bounds=self.machines.bounds(lengths, self.targets, classes_of(source)),
        )

    def candidate(self, deployment: Deployment, weight: float) -> DeploymentCandidate:
        """Return a deployment with its bound."""
        bounds = self.draft_bounds if deployment.drafts else self.bounds
        return DeploymentCandidate(deployment, bound_rps(deployment, bounds), weight)

    def expected_rps(self, candidate: DeploymentCandidate) -> float:
        """Return the estimated rate of a deployment, which drafts raise as much as its bound.

        An estimate takes milliseconds, too long for the thousands of deployments of large pools.
        """
        plain_rps = bound_rps(candidate.deployment, self.bounds)
        if not plain_rps:
            return 0.0
        raised = candidate.bound_rps / plain_rps
        return self.forecast.rate_rps(candidate.deployment, plain_rps) * raised

    def candidates(
        self, found: Iterable[Deployment], each: Mapping[str, float] | None = None
    ) -> Iterator[DeploymentCandidate]:
        """Yield deployments without drafts, and with drafts if deployments may speculate.

        Args:
            each: the weight of one machine, by profile. Without it, all deployments have equal
                weights.
        """
        for deployment in found:
            weight = 1.0 if each is None else deployment.total(each)
            yield self.candidate(deployment, weight)
            if self.draft_bounds:
                yield self.candidate(replace(deployment, drafts=True), weight)

    def search(
        self, candidates: Iterable[DeploymentCandidate], most: int, report: Report
    ) -> DeploymentSearch:
        """Simulate candidates briefly, and then those that may be the best precisely.

        The simulations run in parallel processes.

        Args:
            most: most candidates to simulate.
        """
        possible = [one for one in candidates if one.bound_rps > 0.0]
        with _Processes() as processes:
            return find_best(
                possible,
                lambda pairs: processes.results(self.test, pairs),
                lambda pairs: processes.results(self.measure, pairs),
                most,
                estimate=self.expected_rps,
                width=processes.width,
                report=report,
            )

    def search_least(
        self,
        candidates: Iterable[DeploymentCandidate],
        rate_rps: float,
        most: int,
        report: Report,
    ) -> DeploymentSearch:
        """Simulate candidates to find the one with the least weight that serves a rate.

        Args:
            most: most candidates to simulate.
        """
        with _Processes() as processes:

            def holds(one: DeploymentCandidate) -> bool:
                return all(processes.results(self.holds, [(one, rate_rps)]))

            return find_least(candidates, rate_rps, holds, most, report)

    def test(self, candidate: DeploymentCandidate, rate_rps: float) -> Outcome:
        """Return whether a candidate serves a rate, by a short simulation."""
        goal = self._goal_of_test(candidate, rate_rps)
        with without_full_gc():
            return self.simulation.test(candidate.deployment, goal, rate_rps)

    def measure(self, candidate: DeploymentCandidate, beat_rps: float = 0.0) -> Measured:
        """Return the goodput of a candidate (`Simulation.measure`)."""
        with without_full_gc():
            return self.simulation.measure(candidate, self.goal, beat_rps)

    def _goal_of_test(self, candidate: DeploymentCandidate, rate_rps: float) -> SearchGoal:
        """Return the goal, whose warm-up is that of a deployment at a rate.

        Measurements keep the warm-up of the TPOT, which is longer. A machine that begins empty has
        all its sequences after the time of an output. Drafts change this time, so a deployment
        with drafts has that of the TPOT.
        """
        if candidate.deployment.drafts or not math.isfinite(self.targets.tpot_s):
            return self.goal
        answer_s = self.forecast.output_s(candidate.deployment, rate_rps)
        return replace(self.goal, answer_s=answer_s)

    def holds(self, candidate: DeploymentCandidate, rate_rps: float) -> bool:
        """Return whether a deployment serves a rate, by one simulation."""
        with without_full_gc():
            return self.simulation.holds(candidate.deployment, self.goal, rate_rps)

    def records(self, deployment: Deployment, rate_rps: float) -> list[Record]:
        """Simulate a deployment at a rate, and return its requests."""
        requests = self.simulation.source.requests(rate_rps, self.goal.seed, CHECKED)
        with without_full_gc():
            return self.simulation.records(deployment, requests, self.goal.seed)

    def enough(self, unit: Measured, rate_rps: float) -> tuple[Deployment | None, Sequence[Record]]:
        """Return as many machines as serve a rate, and their simulated requests.

        The machines have the proportions of a unit. If the simulation misses the share, the
        deployment gets up to `MORE` more machines. It is None if they are not enough.
        """
        assert unit.rate_rps
        one = unit.candidate.deployment
        for more in range(MORE + 1):
            deployment = one.scaled(rate_rps / unit.rate_rps + more / one.machines)
            records = self.records(deployment, rate_rps)
            if sum(map(meets_slo, records)) >= self.goal.share * len(records):
                return deployment, records
        return None, records


class _Processes:
    """Processes that simulate, one for each core, until the search ends or is interrupted."""

    def __init__(self) -> None:
        self.width = len(os.sched_getaffinity(0))
        self._pool = ProcessPoolExecutor(self.width, get_context("spawn"), _follow_parent)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Simulations that an interruption has made useless are not awaited.
        self._pool.shutdown(wait=False, cancel_futures=True)
        for process in active_children():
            process.terminate()
            process.join()

    def results(
        self,
        function: Callable[[DeploymentCandidate, float], T],
        pairs: Sequence[tuple[DeploymentCandidate, float]],
    ) -> Iterator[T]:
        """Yield the results of pairs in order."""
        for future in [self._pool.submit(function, *pair) for pair in pairs]:
            yield future.result()


def _follow_parent() -> None:
    """Leave Ctrl-C to the process that searches, and end when it is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    Thread(target=_end_with_parent, name="parent", daemon=True).start()


def _end_with_parent() -> None:
    """Wait for the end of the parent, which may be killed, and exit in the middle of a task."""
    parent = parent_process()
    assert parent is not None
    parent.join()
    os._exit(1)


def planner_of(flags: DeploymentFlags, phases: Mapping[Layout, str]) -> Planner:
    """Return the planner that the flags describe.

    Raises:
        OSError: the trace cannot be read.
        ValueError: an option is missing or wrong.
    """
    check_speculation_flag(flags.speculation)
    machines = MachineTypes.load(flags.profiles, flags.proposer, flags.engine)
    targets = targets_of(flags.slo_ttft_ms, flags.slo_tpot_ms, flags.share)
    slo = Slo.of_ms(flags.slo_ttft_ms, flags.slo_tpot_ms)
    planner = Planner.for_source(
        machines,
        source_of(flags.workload, flags.trace, slo),
        targets,
        link=link_of(flags.link_gbps),
        phases=phases,
        precision=flags.precision,
        seed=flags.seed,
    )
    return planner.with_drafts(flags.proposer) if flags.speculation == AUTO else planner


def _finite(value: float) -> float:
    return value if value < math.inf else 0.0
