"""Simulate a pool of 1,000 workers and 64 gateways, and measure its state store.

    draftgate bench scale --json OUT
    draftgate bench scale --parts store --redis redis://127.0.0.1:6379 --json OUT

The part `decisions` sends requests through one gateway with more and more workers, and measures the
CPU time from the arrival of a request to its dispatch. The part `pool` simulates all gateways and
workers in virtual time, with and without moves. The lengths of requests and their rate per worker
are those of Llumnix's experiments. Both parts run the production code of gateways in front of
workers that compute their steps from totals (`bench/simulation/large_pool.py`).
The part `store` measures the scripts of Redis with the leases of the whole pool, and the messages
on links (`bench/gateway/large_store.py`).

Goodput counts requests whose TTFT and TPOT are below the targets. With several seeds, its change by
moves has an interval. Workers with little memory (`--memory-tokens`) are full at lower rates:

    draftgate bench scale --parts pool --lengths 512/512 --longest 1024 --memory-tokens 4096
        --rate 0.9 --rescheduling off,llumnix,least_time --seeds 3 --json OUT
"""

from __future__ import annotations

import argparse
import asyncio
import math
import sys
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import product
from statistics import fmean, stdev
from typing import Any, Final

from bench.gateway.large_store import measure_link, measure_store
from bench.harness.provenance import (
    bench_parser,
    cpu_name,
    simulated_provenance,
    write_results,
)
from bench.simulation.large_pool import LargePool, Measured, run_pool, spread
from bench.simulation.rescheduling import DEVICES, LONGEST, draw_lengths
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.loadgen.measuring.confidence import student_quantile
from draftgate.loadgen.measuring.metrics import percentile
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc

PARTS: Final = ("decisions", "store", "pool")
SIZES: Final = (1, 4, 16, 64, 256, 1000)
DECISIONS: Final = 200
"""Number of requests for each size of a pool in the part `decisions`."""

STORE_LEASES: Final = (4, 32)
"""Leases per worker in the part `store`: a worker of the simulation, and a full worker."""


def measure_decisions(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Yield the CPU time of decisions of one gateway, by the number of workers."""
    for workers in SIZES:
        rate = args.rate * workers
        warm_up_s = args.decision_warm_up
        requests = round(rate * warm_up_s) + DECISIONS
        pool = LargePool(workers, 1, _profile(args), args.routing, seed=args.seed)
        # Few requests arrive at a small pool, so its gateway decides for a longer time.
        found = run_pool(pool, _drawn(args, requests, args.seed), rate, warm_up_s)
        yield {"workers": workers, **_decisions(found)}


def measure_pool(args: argparse.Namespace, rescheduling: str, seed: int) -> dict[str, Any]:
    """Return the metrics of a simulation of the whole pool."""
    rate, begun_s = args.rate * args.workers, time.thread_time()
    pool = LargePool(
        *(args.workers, args.gateways, _profile(args), args.routing, rescheduling, seed),
        memory_tokens=args.memory_tokens,
    )
    drawn = _drawn(args, round(rate * args.duration), seed)
    found = run_pool(pool, drawn, rate, args.warm_up)
    return {
        "routing": args.routing,
        "rescheduling": rescheduling,
        "seed": seed,
        **_latencies(found, args),
        "load_age_mean_s": fmean([one.load_age_s for one in found.finished]),
        "load_age_max_s": max(one.load_age_s for one in found.finished),
        **_decisions(found),
        "spread_placed_tokens": spread(_placed(found, args.workers)),
        "spread_memory": fmean([memory for memory, _ in found.spreads]),
        "spread_running": fmean([running for _, running in found.spreads]),
        "store_calls_per_s": {
            name: calls / found.measured_s for name, calls in sorted(found.calls.items())
        },
        "renewed_leases_per_s": found.leases / found.measured_s,
        "moves": dict(sorted(found.moves.items())),
        "preemptions": found.preemptions,
        "memory_mean": fmean(found.memory),
        "memory_max": max(found.memory),
        "updates_while_waiting": found.updates,
        "update_cpu_us": 1e6 * found.updates_cpu_s / max(found.updates, 1),
        "simulation_cpu_s": time.thread_time() - begun_s,
    }


def compared_with_off(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return how moves change goodput with the same requests: the mean over all seeds.

    With several seeds, the change has the ends of its 95 % interval by Student's t.
    """
    goodput = {(row["rescheduling"], row["seed"]): row["goodput_rps"] for row in rows}
    found = []
    for name in dict.fromkeys(row["rescheduling"] for row in rows):
        seeds = [seed for policy, seed in goodput if policy == name and ("off", seed) in goodput]
        changes = [goodput[name, seed] / goodput["off", seed] - 1.0 for seed in seeds]
        if name == "off" or not changes:
            continue
        row = {"rescheduling": name, "seeds": len(changes), "goodput_change": fmean(changes)}
        if len(changes) > 1:
            quantile = student_quantile(len(changes) - 1)
            half = quantile * stdev(changes) / math.sqrt(len(changes))
            row["interval"] = [fmean(changes) - half, fmean(changes) + half]
        found.append(row)
    return found


def _profile(args: argparse.Namespace) -> str:
    return str(DEVICES / f"{args.device}.json")


def _drawn(args: argparse.Namespace, requests: int, seed: int) -> Drawn:
    prompt_mean, output_mean = map(float, args.lengths.split("/"))
    drawn, longest = draw_lengths(prompt_mean, output_mean, requests, seed), args.longest
    rows = [
        replace(
            row,
            prompt_tokens=min(row.prompt_tokens, longest),
            output_tokens=min(row.output_tokens, longest),
        )
        for row in drawn.rows
    ]
    return replace(drawn, rows=tuple(rows))


def _placed(found: Measured, workers: int) -> list[int]:
    tokens = list(found.placed_tokens.values())
    return tokens + [0] * (workers - len(tokens))


def _decisions(found: Measured) -> dict[str, Any]:
    decided = sorted(one.decided_s for one in found.finished if one.decided_s is not None)
    if not decided:  # every request waited
        return {"decisions": 0}
    return {
        "decisions": len(decided),
        "decision_p50_us": percentile(decided, 0.5) * 1e6,
        "decision_p99_us": percentile(decided, 0.99) * 1e6,
    }


def _latencies(found: Measured, args: argparse.Namespace) -> dict[str, float]:
    done = found.finished
    ttft = sorted(one.ttft_s for one in done)
    tpot = sorted(one.tpot_s for one in done if one.tpot_s is not None)
    good = sum(one.ttft_s <= args.slo_ttft and (one.tpot_s or 0.0) <= args.slo_tpot for one in done)
    return {
        "requests": len(done),
        "goodput_rps": good / found.measured_s,
        "attainment": good / len(done),
        "ttft_mean_s": fmean(ttft),
        "ttft_p99_s": percentile(ttft, 0.99),
        "tpot_mean_s": fmean(tpot),
        "tpot_p99_s": percentile(tpot, 0.99),
        "waited_share": sum(one.decided_s is None for one in done) / len(done),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench scale`."""
    args = _parser().parse_args(arguments)
    parts = args.parts.split(",")
    results: dict[str, Any] = {
        "format": "scale/1",
        **simulated_provenance("scale", arguments),
        "device": f"{args.device}, simulated, on {cpu_name()}",
        "python": sys.version.split()[0],
        "settings": {
            name: getattr(args, name)
            for name in (
                *("workers", "gateways", "lengths", "rate", "duration", "warm_up", "routing"),
                *("slo_ttft", "slo_tpot", "longest", "memory_tokens", "seed", "seeds"),
            )
        },
    }
    with without_full_gc():
        if "decisions" in parts:
            results["decisions"] = _shown(measure_decisions(args))
        if "store" in parts:
            results["link"] = measure_link()
            print(results["link"], flush=True)
            results["store"] = _shown(_measure_stores(args))
        if "pool" in parts:
            results["pool"] = _shown(_measure_pools(args))
            results["compared_with_off"] = compared_with_off(results["pool"])
            print(results["compared_with_off"], flush=True)
    tables = [
        html_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
        for rows in (results.get(part, []) for part in PARTS)
        if rows
    ]
    write_results(args, results, "Scale", tables)


def _measure_stores(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    for leases in STORE_LEASES:
        yield asyncio.run(measure_store(args.redis, args.workers, leases))


def _measure_pools(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    seeds = range(args.seed, args.seed + args.seeds)
    with ProcessPoolExecutor(args.processes) as processes:
        yield from processes.map(
            partial(_measure_case, args), product(seeds, args.rescheduling.split(","))
        )


def _measure_case(args: argparse.Namespace, case: tuple[int, str]) -> dict[str, Any]:
    seed, rescheduling = case
    with without_full_gc():
        return measure_pool(args, rescheduling, seed)


def _shown(rows: Iterator[dict[str, Any]]) -> list[dict[str, Any]]:
    """Print each row when it is complete, and return all rows."""
    found = []
    for row in rows:
        found.append(row)
        print(row, flush=True)
    return found


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("scale", __doc__, device=False)
    parser.add_argument("--parts", default="decisions,pool", help=f"any of {', '.join(PARTS)}")
    parser.add_argument("--redis", default="redis://127.0.0.1:6379", help="for the part `store`")
    parser.add_argument("--workers", type=int, default=1000)
    parser.add_argument("--gateways", type=int, default=64)
    parser.add_argument("--device", default="a10-7b", help="profile in bench/simulation/devices")
    parser.add_argument("--lengths", default="256/256", help="mean prompt and output tokens")
    parser.add_argument(
        "--longest", type=int, default=LONGEST, help="longer prompts and outputs are cut"
    )
    parser.add_argument("--memory-tokens", type=int, help="KV memory of a worker in tokens")
    parser.add_argument("--rate", type=float, default=0.48, help="requests per second and worker")
    parser.add_argument("--duration", type=float, default=60.0, help="seconds of arrivals")
    parser.add_argument("--warm-up", type=float, default=30.0, help="seconds that do not count")
    parser.add_argument("--decision-warm-up", type=float, default=0.5)
    parser.add_argument("--routing", default="least_cost")
    parser.add_argument("--rescheduling", default="off", help="names of policies")
    parser.add_argument("--slo-ttft", type=float, default=1.0, help="seconds")
    parser.add_argument("--slo-tpot", type=float, default=0.05, help="seconds")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--processes", type=int, default=1, help="runs at the same time")
    parser.add_argument("--seeds", type=int, default=1, help="number of runs of the part `pool`")
    return parser


if __name__ == "__main__":
    main()
