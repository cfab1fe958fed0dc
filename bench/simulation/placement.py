"""Compare plans of deployments with DistServe (arXiv 2401.09670).

    draftgate bench placement --trace sharegpt_8k_filtered_stats_llama2_tokenizer.csv --json OUT

The reference case of DistServe's simulator has four A100 with OPT-13B, targets of 200 ms (TTFT) and
100 ms (TPOT) for 90% of the requests, and lengths of ShareGPT. DistServe finds prefill on two GPUs
and decode on one, with 1.56 requests/s per GPU. It tests the two targets separately, with 300
requests per rate. This study tests both targets of each request.

The parts are the formulas for the TTFT (`formulas`), the search of `draftgate plan placement`
(`search`), and the goodput for multiples of both targets (`scales`), of DistServe's deployment and
of two machines with two GPUs each. The trace has other lengths than DistServe's sample of ShareGPT,
so the last two parts can use lengths that are scaled to the means in the paper.
"""

from __future__ import annotations

import argparse
import math
import os
import time
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from statistics import fmean
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.reference_devices import profile_file
from bench.simulation.ttft_formulas import compare, prefill_workers
from draftgate.backends.sim.kv_link import KvLink
from draftgate.backends.sim.profile import load_profile
from draftgate.gateway.cli.plan.answer import search_as_json
from draftgate.gateway.cli.plan.goodput import PLACEMENT
from draftgate.gateway.cli.plan.machine_types import MachineTypes
from draftgate.gateway.cli.plan.planner import Planner
from draftgate.gateway.cli.plan.sources import TraceSource, lengths_of
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
from draftgate.policies.planning.throughput import Targets
from draftgate.policies.types import Role

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
"""The deployment with machines for both phases with which it is compared."""


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


def formulas(requests: int, seed: int) -> list[dict[str, Any]]:
    """Return the mean TTFT of equal prompts in the simulator, and by the formulas."""
    every = prefill_workers(*map(profile_file, PROFILES[:2]))
    prompt_s = every[0].idle_ttft_s()
    return [row for workers in every for row in compare(workers, prompt_s, requests, seed)]


def planner_of(rows: Sequence[TraceRow], scale: float, args: argparse.Namespace) -> Planner:
    """Return the planner of the reference case for multiples of the targets."""
    machines = MachineTypes.load(",".join(map(profile_file, PROFILES)))
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
    began_s, began_cpu_s = time.perf_counter(), _cpu_s()
    planner = planner_of(rows, 1.0, args)
    prices = planner.machines.prices
    every = deployments(PROFILES, [Budget(prices, GPUS * GPU_PRICE)], GPUS)
    found = planner.search((planner.candidate(one, one.total(prices)) for one in every), args.most)
    taken_s, cpu_s = time.perf_counter() - began_s, _cpu_s() - began_cpu_s
    sample = lengths_of(planner.simulation.source)
    return {
        "prompt_tokens": fmean(prompt for prompt, _ in sample),
        "output_tokens": fmean(output for _, output in sample),
        "search_s": taken_s,
        "search_cpu_s": cpu_s,
        "recommended": None if found.best is None else _row(found.best, prices),
        **search_as_json(found),
    }


def _cpu_s() -> float:
    """Return the CPU time of this process and of the processes that it has waited for."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


def by_scale(rows: Sequence[TraceRow], args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the goodput of both deployments for multiples of both targets.

    A deployment that even by its bound cannot meet the targets has a goodput of 0.
    """
    for scale in map(float, args.scales.split(",")):
        planner = planner_of(rows, scale, args)
        prices = planner.machines.prices
        for deployment in (DISTSERVE, PAIRS):
            began_s = time.process_time()
            candidate = planner.candidate(deployment, deployment.total(prices))
            measured = Measured(candidate, 0.0, 0.0, 0.0)
            if candidate.bound_rps:
                measured = planner.measure(candidate)
            row = {"scale": scale, **_row(measured, prices)}
            yield row | {"cpu_s": round(time.process_time() - began_s, 1)}


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
        "high_per_gpu": measured.high_rps / gpus if measured.high_rps < math.inf else None,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench placement`."""
    parser = bench_parser("placement", __doc__, device=False)
    parser.add_argument("--trace", type=Path, required=True, help="trace with the request lengths")
    parser.add_argument("--most", type=int, default=100, help="most deployments to simulate")
    parser.add_argument("--parts", default="formulas,search,scales")
    parser.add_argument("--lengths", default=f"{TRACE},{SCALED}", help="lengths to use")
    parser.add_argument("--precision", type=float, default=0.1)
    parser.add_argument("--formula-requests", type=int, default=10_000)
    parser.add_argument("--scales", default="0.5,0.75,1,1.25,1.5")
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    rows = reference_rows(args.trace)
    every = {TRACE: rows, SCALED: scaled_rows(rows, PAPER_MEANS)}
    lengths = {name: every[name] for name in args.lengths.split(",")}
    found: dict[str, Any] = {}
    with without_full_gc():
        for part in args.parts.split(","):
            if part == "formulas":
                found[part] = formulas(args.formula_requests, args.seed)
            elif part == "search":
                found[part] = {name: search(one, args) for name, one in lengths.items()}
            else:
                found[part] = {name: list(by_scale(one, args)) for name, one in lengths.items()}
            print(part, found[part], flush=True)
    results = {
        "format": "placement/1",
        **simulated_provenance("placement", arguments),
        "profiles": {name: load_profile(profile_file(name)).source for name in PROFILES},
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
    if "formulas" in results:
        yield "<h2>Mean TTFT</h2>"
        head = ["workers", "load", "simulated, ms", "formula, ms", "error"]
        yield html_table(head, map(_shown_formula, results["formulas"]))
    for name, found in results.get("search", {}).items():
        yield f"<h2>Search with the lengths of the {name}</h2>"
        head = ["deployment", "requests/s", "interval"]
        yield html_table(head, map(_shown_measured, found["measured"]))
    for name, rows in results.get("scales", {}).items():
        yield f"<h2>Multiples of the targets with the lengths of the {name}</h2>"
        head = ["targets", "deployment", "requests/s per GPU", "interval"]
        yield html_table(head, map(_shown_row, rows))


def _shown_formula(row: dict[str, Any]) -> list[str]:
    times = (f"{row[key] * 1e3:.1f}" for key in ("simulated_s", "formula_s"))
    return [row["workers"], f"{row['load']:g}", *times, f"{row['error']:+.1%}"]


def _shown_measured(row: dict[str, Any]) -> list[str]:
    return [row["deployment"], *_shown_rates(row["goodput_rps"], *row["interval"])]


def _shown_row(row: dict[str, Any]) -> list[str]:
    rates = (row[key] for key in ("goodput_per_gpu", "low_per_gpu", "high_per_gpu"))
    return [f"x {row['scale']:g}", row["deployment"], *_shown_rates(*rates)]


def _shown_rates(rate: float | None, low: float, high: float | None) -> list[str]:
    shown = "-" if rate is None else f"{rate:.2f}"
    return [shown, f"{low:.2f} to {'-' if high is None else f'{high:.2f}'}"]


if __name__ == "__main__":
    main()
