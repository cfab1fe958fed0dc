"""Compare plans of deployments with DistServe (arXiv 2401.09670).

    draftgate bench placement --trace sharegpt_8k_filtered_stats_llama2_tokenizer.csv --json OUT

The reference case of DistServe's simulator has four A100 with OPT-13B, targets of 200 ms (TTFT) and
100 ms (TPOT) for 90% of the requests, and lengths of ShareGPT. DistServe finds prefill on two GPUs
and decode on one, with 1.56 requests/s per GPU. It tests the two targets separately, with 300
requests per rate. This study tests both targets of each request.

The parts are the formula for the time to first token (`formulas`), the search of `draftgate plan
placement` (`search`), the deployment that DistServe finds (`distserve`), and the goodput of two
machines with two GPUs each for multiples of both targets (`scales`). The trace has other lengths
than DistServe's sample of ShareGPT, so all parts but the first also use lengths that are scaled to
the means in the paper.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from msgspec import structs

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.kv_link import KvLink
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.plan.goodput import PLACEMENT, WITHOUT_DRAFTS
from draftgate.gateway.cli.plan.machine_types import MachineTypes
from draftgate.gateway.cli.plan.planner import Planner, search_as_json
from draftgate.gateway.cli.plan.sources import TraceSource, lengths_of
from draftgate.gateway.cli.simulate.cluster import SimulatedCluster, simulate
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.loadgen.measuring.metrics import ttft_s
from draftgate.loadgen.planning.traces import TraceRow, read_trace
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import Slo
from draftgate.policies.planning.deployments import (
    Budget,
    Deployment,
    Group,
    Measured,
    deployments,
)
from draftgate.policies.planning.queueing import mean_ttft_s
from draftgate.policies.planning.throughput import Targets
from draftgate.policies.types import Role

DEVICES: Final = Path(__file__).with_name("devices")
PROFILES: Final = tuple(f"opt-13b-a100-tp{tensor}" for tensor in (1, 2, 4))

GPUS: Final = 4
GPU_PRICE: Final = 2.21
"""Price in the profiles, which is proportional to the number of GPUs."""

TTFT_S, TPOT_S, SHARE = 0.2, 0.1, 0.9

LONGEST: Final = 2048
"""Context of OPT-13B. DistServe leaves out longer requests."""

TRACE, SCALED = "trace", "paper"
"""The lengths of the trace, and those that are scaled to the means in the paper."""

PAPER_MEANS: Final = (755.5, 200.3)
"""Mean prompt and output tokens of ShareGPT in the paper (table 2)."""

DISTSERVE: Final = Deployment(
    (Group(PROFILES[1], Role.PREFILL, 1), Group(PROFILES[0], Role.DECODE, 1))
)
"""The deployment that DistServe finds."""

NVLINK: Final = KvLink(300e9, 1e-4)
"""The link between the GPUs: NVLink of the A100 in one direction. The latency is assumed."""

PAIRS: Final = Deployment((Group(PROFILES[1], Role.ANY, GPUS // 2),))
"""The deployment whose goodput is measured for multiples of the targets."""

LOADS: Final = (0.3, 0.6)
PROMPT_TOKENS: Final = 512
"""Loads and prompts for the check of the formulas."""


def reference_rows(path: Path) -> list[TraceRow]:
    """Return the requests of a trace that fit the context of OPT-13B."""
    return [row for row in read_trace(path) if row.prompt_tokens + row.output_tokens < LONGEST]


def scaled_rows(rows: Sequence[TraceRow], means: tuple[float, float]) -> list[TraceRow]:
    """Return the requests with lengths scaled to mean prompt and output tokens, where they fit."""
    prompts = means[0] / fmean(row.prompt_tokens for row in rows)
    outputs = means[1] / fmean(row.output_tokens for row in rows)
    scaled = (
        replace(
            row,
            prompt_tokens=max(round(prompts * row.prompt_tokens), 4),
            output_tokens=max(round(outputs * row.output_tokens), 1),
        )
        for row in rows
    )
    return [row for row in scaled if row.prompt_tokens + row.output_tokens < LONGEST]


def formula_errors(requests: int, seed: int) -> Iterator[dict[str, Any]]:
    """Yield the mean TTFT of equal prompts in the simulator, and by the formula.

    A worker with one sequence is an M/D/1 queue. Its service time is the TTFT of an idle worker.
    """
    config = structs.replace(WITHOUT_DRAFTS, profile=_file(PROFILES[0]), max_num_seqs=1)
    service_s = _mean_ttft_s(config, 1e-3, 20, seed)
    for load in LOADS:
        rate_rps = load / service_s
        measured_s = _mean_ttft_s(config, rate_rps, requests, seed)
        predicted_s = mean_ttft_s(rate_rps, service_s)
        yield {
            "profile": PROFILES[0],
            "load": load,
            "simulated_s": measured_s,
            "formula_s": predicted_s,
            "error": predicted_s / measured_s - 1.0,
        }


def _mean_ttft_s(config: WorkerConfig, rate_rps: float, requests: int, seed: int) -> float:
    drawn = Drawn((TraceRow(0.0, PROMPT_TOKENS, 1),) * requests, seed)
    cluster = SimulatedCluster(config, 1, SimEnvironment(seed, roofline=False))
    records = simulate(cluster, drawn.planned(rate_rps, Slo()), to_job=drawn.job)
    return fmean(found for record in records if (found := ttft_s(record)) is not None)


def planner_of(rows: Sequence[TraceRow], scale: float, args: argparse.Namespace) -> Planner:
    """Return the planner of the reference case for multiples of the targets."""
    machines = MachineTypes.load(",".join(map(_file, PROFILES)))
    slo = Slo(scale * TTFT_S, scale * TPOT_S)
    return Planner.of(
        machines,
        TraceSource(rows, slo),
        Targets(scale * TTFT_S, scale * TPOT_S, SHARE),
        link=NVLINK,
        phases=PLACEMENT,
        precision=args.precision,
        seed=args.seed,
    )


def search(rows: Sequence[TraceRow], args: argparse.Namespace) -> dict[str, Any]:
    """Search the deployments on four GPUs."""
    began_s = time.process_time()
    planner = planner_of(rows, 1.0, args)
    prices = planner.machines.prices
    every = deployments(PROFILES, [Budget(prices, GPUS * GPU_PRICE)], GPUS)
    found = planner.search((planner.candidate(one, one.total(prices)) for one in every), args.most)
    cpu_s = time.process_time() - began_s
    sample = lengths_of(planner.simulation.source)
    return {
        "prompt_tokens": fmean(prompt for prompt, _ in sample),
        "output_tokens": fmean(output for _, output in sample),
        "search_cpu_s": cpu_s,
        "recommended": None if found.best is None else _row(found.best, prices),
        **search_as_json(found),
    }


def by_scale(
    rows: Sequence[TraceRow], deployment: Deployment, args: argparse.Namespace, scales: str
) -> Iterator[dict[str, Any]]:
    """Yield the goodput of a deployment for multiples of both targets."""
    for scale in map(float, scales.split(",")):
        planner = planner_of(rows, scale, args)
        prices = planner.machines.prices
        candidate = planner.candidate(deployment, deployment.total(prices))
        if candidate.bound_rps:
            yield {"scale": scale, **_row(planner.measure(candidate), prices)}


def _row(measured: Measured, prices: dict[str, float]) -> dict[str, Any]:
    """Return a measured deployment with its rates in requests per second and GPU."""
    deployment = measured.candidate.deployment
    gpus = round(deployment.total(prices) / GPU_PRICE)
    rate_rps = measured.rate_rps
    return {
        "deployment": str(deployment),
        "layout": deployment.layout.value,
        "gpus": gpus,
        "goodput_per_gpu": None if rate_rps is None else rate_rps / gpus,
        "low_per_gpu": measured.low_rps / gpus,
        "high_per_gpu": measured.high_rps / gpus,
    }


def _file(profile: str) -> str:
    return str(DEVICES / f"{profile}.json")


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench placement`."""
    parser = bench_parser("placement", __doc__, device=False)
    parser.add_argument("--trace", type=Path, required=True, help="trace with the request lengths")
    parser.add_argument("--most", type=int, default=12, help="most deployments to simulate")
    parser.add_argument("--parts", default="formulas,search,distserve,scales")
    parser.add_argument("--lengths", default=f"{TRACE},{SCALED}", help="lengths to use")
    parser.add_argument("--precision", type=float, default=0.1)
    parser.add_argument("--formula-requests", type=int, default=20_000)
    parser.add_argument("--scales", default="0.6,0.8,1.0,1.2")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rows = reference_rows(args.trace)
    every = {TRACE: rows, SCALED: scaled_rows(rows, PAPER_MEANS)}
    lengths = {name: every[name] for name in args.lengths.split(",")}
    found: dict[str, Any] = {}
    with without_full_gc():
        for part in args.parts.split(","):
            if part == "formulas":
                found[part] = list(formula_errors(args.formula_requests, args.seed))
            elif part == "search":
                found[part] = {name: search(one, args) for name, one in lengths.items()}
            else:
                deployment, scales = (
                    (DISTSERVE, "1.0") if part == "distserve" else (PAIRS, args.scales)
                )
                found[part] = {
                    name: list(by_scale(one, deployment, args, scales))
                    for name, one in lengths.items()
                }
            print(part, found[part], flush=True)
    results = {
        "format": "placement/1",
        **simulated_provenance("placement", arguments),
        "profiles": {name: load_profile(_file(name)).source for name in PROFILES},
        "settings": {
            "trace": args.trace.name,
            "ttft_s": TTFT_S,
            "tpot_s": TPOT_S,
            "share": SHARE,
            "gpus": GPUS,
            "precision": args.precision,
            "seed": args.seed,
        },
        **found,
    }
    write_results(args, results, "Placement of OPT-13B on A100, simulated", _body(results))


def _body(results: dict[str, Any]) -> Iterator[str]:
    yield "<h1>Placement of OPT-13B on A100, simulated</h1>"
    for part in ("distserve", "scales"):
        for name, rows in results.get(part, {}).items():
            yield f"<h2>{part}, {name}</h2>"
            yield html_table(list(rows[0]), [list(map(str, row.values())) for row in rows])


if __name__ == "__main__":
    main()
