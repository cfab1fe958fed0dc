"""CPU time of the integer program of `draftgate plan mix --tputs`.

    draftgate bench mix-solver --json OUT

Each problem has 60 buckets, 8 slices per bucket and four types of GPUs with Mélange's prices. The
kinds of problems differ in the throughputs: those of GPUs whose relative speed varies by bucket
(`realistic`), independent random numbers (`independent`), numbers that make all GPUs cost the same
per request (`proportional`), and four equal GPUs (`equal`). Not all GPUs serve all buckets.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from typing import Any, Final

import numpy as np

from bench.harness.provenance import bench_parser, cpu_name, simulated_provenance, write_results
from draftgate.gateway.cli.plan.solver import silent_solver
from draftgate.loadgen.report.html import html_table
from draftgate.policies.planning.mix import MachineType, Workload, cheapest_mix

BUCKETS: Final = 60
SLICES: Final = 8
COSTS: Final = np.array((0.70, 1.01, 3.67, 7.516))
RATES_RPS: Final = (1.0, 8.0, 32.0, 300.0)
KINDS: Final = ("realistic", "independent", "proportional", "equal")
HEAD: Final = ("problems", "number", "CPU s: median", "90%", "99%", "max")


def problem(kind: str, rate_rps: float, seed: int) -> tuple[Workload, dict[str, MachineType]]:
    """Return a random problem."""
    random = np.random.default_rng((KINDS.index(kind), round(rate_rps), seed))
    shape = BUCKETS, len(COSTS)
    costs = np.ones(len(COSTS)) if kind == "equal" else COSTS
    if kind == "independent":
        throughputs = random.uniform(0.1, 20.0, shape)
    else:
        sizes = random.lognormal(0.0, 1.0, (BUCKETS, 1))
        speeds = random.uniform(0.6, 1.4, shape) if kind == "realistic" else np.ones(shape)
        throughputs = 2.0 * costs / sizes * speeds
    throughputs[:, :-1][random.random((BUCKETS, len(COSTS) - 1)) < 0.1] = 0.0
    rates = rate_rps * random.dirichlet(np.ones(BUCKETS))
    types = {
        f"gpu{number}": MachineType(float(cost), tuple(map(float, column)))
        for number, (cost, column) in enumerate(zip(costs, throughputs.T, strict=True))
    }
    return Workload(tuple(map(float, rates)), SLICES), types


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench mix-solver`."""
    parser = bench_parser("mix-solver", __doc__, device=False)
    parser.add_argument("--problems", type=int, default=10, help="problems of a kind and a rate")
    args = parser.parse_args(arguments)
    with silent_solver():
        cheapest_mix(*problem("equal", 1.0, 0))  # imports scipy
        rows = [
            _solve(kind, rate_rps, seed)
            for kind, rate_rps, seed in product(KINDS, RATES_RPS, range(args.problems))
        ]
    results = {
        "format": "mix-solver/1",
        **simulated_provenance("mix-solver", arguments),
        "device": cpu_name(),
        "problems": rows,
    }
    summary = list(_summary(rows))
    for row in summary:
        print(*row, sep="  ")
    write_results(args, results, "Integer program of mixes", _body(summary))


def _solve(kind: str, rate_rps: float, seed: int) -> dict[str, Any]:
    given = problem(kind, rate_rps, seed)
    began_s = time.process_time()
    found = cheapest_mix(*given)
    cpu_s = time.process_time() - began_s
    facts = {"kind": kind, "rate_rps": rate_rps, "seed": seed, "cpu_s": round(cpu_s, 3)}
    return {**facts, "cost_per_hour": found.cost_per_hour, "counts": dict(found.counts)}


def _summary(rows: Sequence[Mapping[str, Any]]) -> Iterator[list[str]]:
    """Yield the distribution of CPU times of each kind of problems, and of all."""
    for kind in (*KINDS, "all"):
        times_s = [row["cpu_s"] for row in rows if kind in {row["kind"], "all"}]
        points = np.percentile(times_s, (50, 90, 99, 100))
        yield [kind, str(len(times_s)), *(f"{point:.2f}" for point in points)]


def _body(summary: Sequence[Sequence[str]]) -> Iterator[str]:
    yield "<h1>Integer program of mixes</h1>"
    yield html_table(list(HEAD), [list(row) for row in summary], __doc__ or "")


if __name__ == "__main__":
    main()
