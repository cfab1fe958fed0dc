"""Compare pools of unlike machines with Splitwise (arXiv 2311.18677).

    draftgate bench pools --trace AzureLLMInferenceTrace_conv.csv --json OUT

In Splitwise, H100 for prompts and A100 for outputs have 1.4 times the throughput of H100 alone, at
a lower price and equal power. This study has a fifth of the machines: 8 H100 or 14 A100, each with
8 GPUs that serve Llama-2-70B. Of p machines for prompts, the pool for outputs has the power of the
other 8 - p H100.

Throughput is the highest rate at which 90% of the requests meet both of their targets: 3 times the
TTFT of their prompt and 1.5 times the TPOT on an idle A100, as for P90 in the paper. Lengths are
those of a trace of Azure, and arrivals are Poisson. H100 and A100 alone also run `prefill_first`,
the batching of Splitwise's baseline, in which whole prompts delay outputs. `--decodes count`
replaces the decode times by those of splitwise-sim, which hardly depend on the batch.
"""

from __future__ import annotations

import argparse
import math
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from msgspec import structs

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.reference_devices import BY_COUNT, MACHINES, Sample, profile_file
from draftgate.backends.sim.profile import load_profile
from draftgate.gateway.cli.plan.goodput import POOLS
from draftgate.gateway.cli.plan.machine_types import MachineTypes
from draftgate.gateway.cli.plan.planner import Planner, link_of
from draftgate.gateway.cli.plan.sources import Requests
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.types import Slo
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.planning.deployments import Deployment, Group
from draftgate.policies.planning.throughput import Targets
from draftgate.policies.types import Role

A100, H100 = (MACHINES[one].name for one in ("a100-80gb", "h100-80gb"))

H100S, A100S = 8, 14
"""Machines of one type with equal power, within 2%."""

LINK_GBPS: Final = 200.0
"""Bandwidth between machines in the paper, in Gbit/s."""

SHARE, TTFT_FACTOR, TPOT_FACTOR = 0.9, 3.0, 1.5

TITLE: Final = "Pools of H100 and A100 at equal power, simulated"


class Cluster(NamedTuple):
    """Machines, with their name in the paper and their batching policy."""

    name: str
    deployment: Deployment
    batching: str = "slack"


@dataclass(frozen=True, slots=True)
class ReferenceSource:
    """Requests with lengths from a trace, and targets by their prompt.

    Attributes:
        cost: step costs of the machine whose idle times the targets multiply.
    """

    rows: Sequence[TraceRow]
    cost: StepCost

    def requests(self, rate_rps: float, seed: int, count: int) -> Requests:
        """See `Source`."""
        drawn = Drawn.of(self.rows, count, seed)
        planned = zip(drawn.planned(rate_rps, Slo()), drawn.rows, strict=True)
        return Requests(
            [replace(one, request=replace(one.request, slo=self.slo(row))) for one, row in planned],
            drawn.job,
        )

    def slo(self, row: TraceRow) -> Slo:
        """Return the targets of a request."""
        alone_s = Sample(0.0, tokens=max(row.prompt_tokens, 1)).predicted_s(self.cost)
        step_s = Sample(0.0, batch=1, context=row.prompt_tokens).predicted_s(self.cost)
        return Slo(TTFT_FACTOR * alone_s, TPOT_FACTOR * step_s)


def clusters() -> Iterator[Cluster]:
    """Yield clusters with about the power of 8 H100."""
    for batching in ("slack", "prefill_first"):
        yield Cluster("Baseline-H100", Deployment((Group(H100, Role.ANY, H100S),)), batching)
        yield Cluster("Baseline-A100", Deployment((Group(A100, Role.ANY, A100S),)), batching)
    for prompts in range(1, H100S):
        rest = A100S * (H100S - prompts) // H100S
        yield Cluster("Splitwise-HA", _pools(H100, prompts, A100, rest))
        yield Cluster("Splitwise-HH", _pools(H100, prompts, H100, H100S - prompts))
    for prompts in range(2, A100S, 2):
        yield Cluster("Splitwise-AA", _pools(A100, prompts, A100, A100S - prompts))


def _pools(prefill: str, prompts: int, decode: str, outputs: int) -> Deployment:
    return Deployment((Group(prefill, Role.PREFILL, prompts), Group(decode, Role.DECODE, outputs)))


def planner_of(args: argparse.Namespace) -> Planner:
    """Return the planner for a trace, with the profiles that `--decodes` selects."""
    suffix = BY_COUNT if args.decodes == "count" else ""
    machines = MachineTypes.load(",".join(profile_file(name + suffix) for name in (A100, H100)))
    machines = MachineTypes(
        {name.removesuffix(suffix): one for name, one in machines.machines.items()}
    )
    rows = read_trace(args.trace)
    # The targets are those of the right decode times, so that both profiles have the same ones.
    source = ReferenceSource(rows, load_profile(profile_file(A100)).cost)
    limits = [source.slo(row) for row in rows]
    planner = Planner.of(
        machines,
        source,
        Targets(
            max(one.ttft_s or 0.0 for one in limits),
            max(one.tpot_s or 0.0 for one in limits),
            SHARE,
        ),
        link=link_of(LINK_GBPS),
        phases=POOLS,
        precision=args.precision,
        seed=args.seed,
    )
    typical_s = sorted(one.ttft_s or 0.0 for one in limits)[len(limits) // 2]
    goal = replace(planner.goal, limit_s=typical_s, most_requests=args.requests)
    return replace(planner, goal=goal)


def measure(planner: Planner, cluster: Cluster) -> dict[str, Any]:
    """Return the throughput, the price and the power of a cluster."""
    began_s, machines, deployment = time.process_time(), planner.machines, cluster.deployment
    config = structs.replace(planner.simulation.config, batching=cluster.batching)
    planner = replace(planner, simulation=replace(planner.simulation, config=config))
    found = planner.measure(planner.candidate(deployment, 1.0))
    return {
        "cluster": cluster.name,
        "deployment": str(deployment),
        "batching": cluster.batching,
        "throughput_rps": found.rate_rps,
        "low_rps": found.low_rps,
        "high_rps": found.high_rps if found.high_rps < math.inf else None,
        "bound_rps": found.candidate.bound_rps,
        "usd_per_hour": round(deployment.total(machines.prices), 2),
        "power_kw": round(deployment.total(machines.powers) / 1e3, 2),
        "cpu_s": round(time.process_time() - began_s, 1),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench pools`."""
    parser = bench_parser("pools", __doc__, device=False)
    parser.add_argument("--trace", type=Path, required=True, help="trace with the request lengths")
    parser.add_argument("--decodes", choices=("batch", "count"), default="batch")
    parser.add_argument("--only", default="", help="parts of deployments, separated by commas")
    parser.add_argument("--precision", type=float, default=0.1)
    parser.add_argument("--requests", type=int, default=3000, help="most requests per cluster")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    planner, rows = planner_of(args), list[dict[str, Any]]()
    for cluster in clusters():
        if any(part in str(cluster.deployment) for part in args.only.split(",")):
            rows.append(measure(planner, cluster))
            print(rows[-1], flush=True)
    results = {
        "format": "pools/1",
        **simulated_provenance("pools", arguments),
        "profiles": {name: one.profile.source for name, one in planner.machines.machines.items()},
        "settings": {
            "trace": args.trace.name,
            "decodes": args.decodes,
            "share": SHARE,
            "ttft_factor": TTFT_FACTOR,
            "tpot_factor": TPOT_FACTOR,
            "link_gbps": LINK_GBPS,
            "precision": args.precision,
            "requests": args.requests,
            "seed": args.seed,
        },
        "clusters": rows,
    }
    table = html_table(list(rows[0]), [list(map(str, row.values())) for row in rows])
    write_results(args, results, TITLE, [f"<h1>{TITLE}</h1>", table])


if __name__ == "__main__":
    main()
