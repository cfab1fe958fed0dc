"""The highest rate at which a simulated deployment meets its targets, with a confidence interval.

The search is that of `draftgate load search`, with probes in virtual time. A request counts only if
it meets all of its targets. Every deployment gets the same sequence of seeds, and a rate only
scales the gaps between arrivals (common random numbers), so differences between deployments are not
those of their requests. Each probe of a search has a new seed, so an estimate rests on
at least two. On an M/D/1 queue, independent probes need 13,200 requests on average for an interval
of 5% to either side, and probes that share eight seeds in pairs need 23,100 (40 searches each,
2026-11-30).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Final

from msgspec import structs

from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.backends.worker_config import WorkerConfig
from draftgate.lab.plan.machines import AUTO, CONFIG, OFF
from draftgate.lab.plan.sources import Requests, Source
from draftgate.lab.planning.best_deployment import DeploymentCandidate, Measured, Outcome
from draftgate.lab.planning.deployments import Deployment, Layout
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.simulate.cluster import ADMIT_ALL, SimulatedCluster, never, simulate_requests
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.search.search import LEAST_REQUESTS, RateSearch, warm_up_s
from draftgate.loadgen.search.sequential_test import SequentialTest
from draftgate.loadgen.search.types import (
    ProbeResult,
    ProbeVerdict,
    SearchGoal,
    SearchProbe,
)
from draftgate.loadgen.types import PlannedRequest, Record
from draftgate.policies.types import Role

PLACEMENT: Final = {Layout.TOGETHER: "together", Layout.APART: "apart", Layout.MIXED: "auto"}
POOLS: Final = {**dict.fromkeys(Layout, "splitwise"), Layout.TOGETHER: "together"}
"""The phases policy of each layout, by question."""

CHECKED: Final = 2000
"""Requests of the simulation that tests a plan."""

TESTED, LEAST_TESTED = 160, 100
"""Most and least requests of a short simulation. Adjusted for CPU time in five incomplete searches
of the reference case of DistServe, seed 0, virtual Intel Xeon, 2026-11-30."""

TEST_DISPERSION: Final = 2.0
"""Least dispersion of the requests of a short simulation, whose first batches are often all met.
Adjusted as `TESTED`, after a clear verdict at 80 requests that 400 did not confirm."""

_START: Final = 0.5
"""First rate of a search, as a share of the bound. Chosen, not tuned, 2026-11-24."""


_OUTCOMES: Final = {ProbeVerdict.HOLDS: Outcome.SERVES, ProbeVerdict.FAILS: Outcome.FAILS}


def speculation_of(deployment: Deployment, role: Role) -> str:
    """Return the speculation policy of machines. Those that only compute prompts do not draft."""
    return AUTO if deployment.drafts and role is not Role.PREFILL else OFF


@dataclass(frozen=True, slots=True)
class Simulation:
    """How deployments are simulated. Devices follow their profiles, which workers learn.

    Attributes:
        source: the requests.
        files: the name or file of each profile, by its name in deployments.
        phases: the phases policy of each layout.
        link: link between the machines.
        config: the configuration of all workers, whose profile and policy are replaced.
    """

    source: Source
    files: Mapping[str, str]
    phases: Mapping[Layout, str]
    link: KvLink = LOCAL_LINK
    config: WorkerConfig = CONFIG

    def records(
        self,
        deployment: Deployment,
        requests: Requests,
        seed: int,
        on_record: Callable[[Record], None] = lambda _record: None,
        is_over: Callable[[], bool] = never,
    ) -> list[Record]:
        """Return the records of requests, in order, as `simulate_requests` does."""
        machines = [group for group in deployment.groups for _ in range(group.count)]
        divides = deployment.layout is not Layout.TOGETHER
        cluster = SimulatedCluster(
            structs.replace(self.config, speculation=AUTO if deployment.drafts else OFF),
            len(machines),
            SimEnvironment(seed, roofline=False, delivers_tokens=divides, shares_kv=divides),
            replace(ADMIT_ALL, phases=self.phases[deployment.layout]),
            tuple(self.files[one.profile] for one in machines),
            tuple(one.role for one in machines),
            self.link,
            tuple(speculation_of(deployment, one.role) for one in machines),
        )
        return simulate_requests(
            cluster, requests.planned, on_record, requests.to_job, is_over=is_over
        )

    def measure(
        self, candidate: DeploymentCandidate, goal: SearchGoal, beat_rps: float = 0.0
    ) -> Measured:
        """Return the highest rate at which the share of a goal meets its targets.

        Args:
            goal: the goal, whose first rate is replaced.
            beat_rps: a rate to compare with. The search begins there, and ends without an estimate
                when the rate of the deployment is certainly lower.
        """
        start_rps = beat_rps or _START * candidate.bound_rps
        search = RateSearch(replace(goal, start_rps=start_rps))
        found = search.result()
        while (probe := search.propose()) is not None:
            result = self._probe(candidate.deployment, probe, goal)
            search.observe(result)
            found = search.result()
            fails = result.verdict is ProbeVerdict.FAILS and probe.rate_rps <= beat_rps
            if fails or found.high_rps < beat_rps:
                return Measured(candidate, None, 0.0, beat_rps)
        return Measured(candidate, found.rate_rps, found.low_rps, found.high_rps, found.converged)

    def test(self, deployment: Deployment, goal: SearchGoal, rate_rps: float) -> Outcome:
        """Return whether the share of a goal meets its targets at a rate, as far as is clear.

        The simulation ends when this is certain, or else after `TESTED` requests.
        """
        settle_s = warm_up_s(goal, rate_rps)
        probe = SearchProbe(
            rate_rps, goal.seed, settle_s, TESTED, LEAST_TESTED, dispersion=TEST_DISPERSION
        )
        return _OUTCOMES.get(self._probe(deployment, probe, goal).verdict, Outcome.UNCLEAR)

    def holds(self, deployment: Deployment, goal: SearchGoal, rate_rps: float) -> bool:
        """Return whether the share of a goal meets its targets at a rate.

        Two seeds have half of `CHECKED` requests each. A simulation ends when its verdict is
        certain.
        """
        settle_s = warm_up_s(goal, rate_rps)
        probes = (
            SearchProbe(rate_rps, seed, settle_s, CHECKED // 2, min(LEAST_REQUESTS, CHECKED // 2))
            for seed in (goal.seed, goal.seed + 1)
        )
        shares = [self._probe(deployment, probe, goal).share or 0.0 for probe in probes]
        return fmean(shares) >= goal.share

    def _probe(self, deployment: Deployment, probe: SearchProbe, goal: SearchGoal) -> ProbeResult:
        """Simulate a rate until its verdict is clear."""
        test, sent, enough = SequentialTest(probe, goal), 0, False
        requests = self.source.requests(probe.rate_rps, probe.seed, probe.longest)

        def over(record: Record) -> None:
            nonlocal enough
            enough = test.observe(record.planned.index, record.scheduled_s, met=meets_slo(record))

        def counted() -> Iterator[PlannedRequest]:
            nonlocal sent
            for planned in requests.planned:
                sent += 1
                yield planned

        counting = Requests(counted(), requests.to_job)
        self.records(deployment, counting, probe.seed, over, lambda: enough)
        return ProbeResult(probe, test.met, sent, test.verdict)
