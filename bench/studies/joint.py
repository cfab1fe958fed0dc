"""Placement and draft decided together or apart, by prices of the cluster or as last reported.

    draftgate bench joint --json OUT --html OUT

Several gateways over the same workers, bursts, reports that are up to a heartbeat old, and leases
that all share (`gateway/cli/simulate/gateways.py`). Jointly, `price` places a request where its
latency with the drafts that pay there, and what it costs all others, is least. Independently it is
placed by the same forecast without drafts, or by tokens, and the cap of its drafts is decided
afterwards by the worker's price. In turn the cap is decided by the price as reported, as projected
with what is leased since, or as it is; or there is none. Within the cap workers decide each step
(`auto`), or draft as far as they may (`fixed:8`). Targets are what goodput is counted by; nobody is
promised them: who is gets seats and caps as if it were late.
Everybody meets the same requests, texts and noise; differences are paired by seed.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from statistics import fmean
from typing import Any, Final, NamedTuple

from bench.studies.joint_report import body, line
from bench.studies.record import provenance, study_parser, write_results
from bench.studies.routing import CLUSTERS
from draftgate.backends.base import WorkerConfig
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.simulated import World
from draftgate.gateway.cli.simulate.cluster import EVERYBODY_WAITS, Cluster
from draftgate.gateway.cli.simulate.gateways import Gateways, simulate_gateways
from draftgate.gateway.cli.simulate.intervals import differences, estimate
from draftgate.gateway.cli.simulate.prompts import job_of
from draftgate.gateway.cli.simulate.seen import Price
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.measuring.metrics import METRICS, percentile, values_of
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, Slo
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.auto import Auto
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS, capped
from draftgate.policies.types import ANYTIME, RequestView, SpeculationPlan, WorkerLoad


class Uncapped(Auto):
    """`auto` at the worker, and no cap from the gateway but the longest draft."""

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan the longest draft."""
        plan = super().decide(request, load)
        if plan.proposer is None:
            return plan
        return replace(plan, max_draft_tokens=capped(MAX_DRAFT_TOKENS, request))


class Way(NamedTuple):
    """How placement and cap are decided."""

    routing: str
    price: Price = Price.REPORTED
    capped: bool = True

    @property
    def policy(self) -> SpeculationPolicy:
        """What decides the cap."""
        return speculation_policy("auto") if self.capped else Uncapped()


JOINT: Final = "joint"
WAYS: Final = {
    JOINT: Way("price"),
    "independent": Way("price:undrafted"),
    "independent, by tokens": Way("weighted:load=1"),
    "joint, projected price": Way("price", Price.PROJECTED),
    "joint, present price": Way("price", Price.PRESENT),
    "joint, no caps": Way("price", capped=False),
}

FIGURES: Final = (
    "goodput_rps", "attainment", "ttft_p50_s", "ttft_p99_s", "tpot_p50_s", "tpot_p99_s",
    "latency_mean_s", "planned_slots",
)  # fmt: skip


@dataclass(frozen=True, slots=True)
class Study:
    """What is the same for all ways.

    Attributes:
        load: of all gateways; its rate and seed are replaced.
        report_s: between two reports of a worker.
    """

    config: WorkerConfig
    load: Load
    gateways: int
    workers: int
    report_s: float

    def cell(self, mix: str, steps: str, rate_rps: float, seeds: int) -> dict[str, Any]:
        """Simulate all ways; return what each gave, and how it compares with the joint one.

        Args:
            steps: the policy by which workers take drafts within the cap.
        """
        runs: dict[str, list[dict[str, float]]] = {name: [] for name in WAYS}
        for seed in range(seeds):
            for name, way in WAYS.items():
                runs[name].append(figures(self._run(way, mix, steps, rate_rps, seed)))
        return {
            "cluster": mix,
            "steps": steps,
            "rate_rps": rate_rps,
            "ways": {name: _means(found) for name, found in runs.items()},
            "to_joint": {
                name: _compared(found, runs[JOINT]) for name, found in runs.items() if name != JOINT
            },
            "runs": runs,
        }

    def _run(self, way: Way, mix: str, steps: str, rate_rps: float, seed: int) -> list[Record]:
        load = replace(self.load, rate_rps=rate_rps, seed=seed)
        plan = make_plan(load, max_model_len=self.config.max_model_len, lazily=True)
        kinds = CLUSTERS[mix]
        world = World(seed, slowness=tuple(kind.slowness for kind in kinds))
        rules = replace(EVERYBODY_WAITS, routing=way.routing)
        profiles = tuple(kind.profile for kind in kinds)
        config = replace(self.config, speculation=steps)
        cluster = Cluster(config, self.workers, world, rules, profiles)
        gateways = Gateways(cluster, way.policy, way.price, self.gateways, self.report_s)
        records = simulate_gateways(gateways, list(plan.requests), _unpromised)
        gc.collect()  # what has stopped goes in circles
        return records


def _unpromised(planned: PlannedRequest) -> Job:
    """Return a request's job without its targets."""
    return replace(job_of(planned), service=ANYTIME)


def figures(records: Sequence[Record]) -> dict[str, float]:
    """Return what a run gave, and how long the drafts were that gateways allowed on average."""
    ttfts_s, tpots_s = (sorted(values_of(METRICS[key], records)) for key in ("ttft_s", "tpot_s"))
    schedule_s = max(record.scheduled_s for record in records)
    plans = [(record.metrics or {})["speculative_decoding"] for record in records]
    return {
        "goodput_rps": sum(map(meets_slo, records)) / schedule_s,
        "attainment": fmean(map(meets_slo, records)),
        "ttft_p50_s": percentile(ttfts_s, 0.5),
        "ttft_p99_s": percentile(ttfts_s, 0.99),
        "tpot_p50_s": percentile(tpots_s, 0.5),
        "tpot_p99_s": percentile(tpots_s, 0.99),
        "latency_mean_s": fmean(record.end_s - record.scheduled_s for record in records),
        "planned_slots": fmean(plan["max_draft_tokens"] for plan in plans),
    }


def _means(runs: Sequence[dict[str, float]]) -> dict[str, Any]:
    found = {}
    for figure in FIGURES:
        mean = estimate([run[figure] for run in runs])
        assert mean is not None
        found[figure] = mean.as_dict()
    return found


def _compared(
    runs: Sequence[dict[str, float]], joint: Sequence[dict[str, float]]
) -> dict[str, Any]:
    """Return by how much each figure is more than that of the joint way, paired by seed."""
    found = {}
    for figure in FIGURES:
        pairs = [[run[figure] for run in each] for each in (runs, joint)]
        difference = estimate(differences(*pairs))
        assert difference is not None
        found[figure] = {**difference.as_dict(), "relative": difference.mean / fmean(pairs[1])}
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all clusters and rates, print a line for each way, write what was asked for."""
    args = _parser().parse_args(arguments)
    slo = Slo.of_ms(args.slo_ttft_ms, args.slo_tpot_ms)
    load = Load(
        workload=args.workload,
        arrival=args.arrival,
        rate_rps=1.0,
        duration_s=args.duration,
        slo=slo,
    )
    config = WorkerConfig(
        proposer="ngram",
        max_num_seqs=256,
        max_model_len=32_768,
        max_step_tokens=2048,
    )
    study = Study(config, load, args.gateways, args.workers, args.report_ms / 1e3)
    cells = []
    with without_full_gc():
        asked = (text.split(",") for text in (args.clusters, args.speculation, args.rates))
        for mix, steps, rate in product(*asked):
            cells.append(study.cell(mix, steps, float(rate) * args.workers, args.seeds))
            for name in WAYS:
                print(*line(cells[-1], name), sep="  ", flush=True)
    results = {
        "format": "joint/1",
        **provenance("joint", arguments),
        "profiles": {kind.profile: load_profile(kind.profile).source for kind in CLUSTERS["mixed"]},
        "settings": {
            "workload": args.workload,
            "arrival": args.arrival,
            "duration_s": args.duration,
            "gateways": args.gateways,
            "workers": args.workers,
            "seeds": args.seeds,
            "report_s": study.report_s,
            "slo_s": [slo.ttft_s, slo.tpot_s],
        },
        "cells": cells,
    }
    title = "Placement and draft together, simulated"
    write_results(args, results, title, body(title, results, __doc__ or ""))


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("joint", __doc__, device=False)
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--arrival", default="onoff:1.5,1.5", help="bursts and pauses, in seconds")
    parser.add_argument("--rates", default="60", help="requests a second for each worker, mean")
    parser.add_argument("--duration", type=float, default=6.0, help="seconds of arrivals")
    parser.add_argument("--speculation", default="auto,fixed:8", help="of the workers' steps")
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument("--gateways", type=int, default=4)
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=4)
    parser.add_argument(
        "--report-ms", type=float, default=1000.0, help="links report each 100, heartbeats 1000"
    )
    parser.add_argument("--slo-ttft-ms", type=float, default=1000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=40.0)
    return parser


if __name__ == "__main__":
    main()
