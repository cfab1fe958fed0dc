"""Compare routing policies on recorded traffic, over cluster sizes and mixed hardware.

    draftgate bench routing --trace FILE --json OUT --html OUT

The study replays windows of a trace with its order, prefixes and bursts. Rates are fractions of the
cluster's sustained rate. The sustained rate is the sum of the workers' throughput when all requests
arrive simultaneously. A mixed cluster repeats an H200, two H100s, and an H100 at half speed. All
policies get the same requests, texts and noise. Means of batches of requests are paired. Caches are
empty at the start of a window.
"""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache
from itertools import product
from pathlib import Path
from statistics import fmean
from typing import Any, Final, NamedTuple

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.routing_report import body, line
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import ADMIT_ALL, SimulatedCluster, simulate
from draftgate.gateway.cli.simulate.intervals import batch_means, differences, estimate
from draftgate.gateway.cli.simulate.trace_load import Recorded
from draftgate.loadgen.measuring.metrics import (
    METRICS,
    latency_s,
    percentile,
    tpot_s,
    ttft_s,
    values_of,
)
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import Record, Slo

POLICIES: Final = (
    "round_robin",
    "least_loaded",
    "power_of_two",
    "prefix_affinity",
    "least_cost",
)
LEAST_COST: Final = "least_cost"


class Kind(NamedTuple):
    """A kind of worker, with its profile and a factor for its times."""

    profile: str
    slowness: float = 1.0


CLUSTERS: Final = {
    "equal": (Kind("h100-8b"),),
    "mixed": (Kind("h200-8b"), Kind("h100-8b"), Kind("h100-8b"), Kind("h100-8b", 2.0)),
}
"""Kinds of workers by name of the cluster, repeated in turn."""

MAX_MODEL_LEN: Final = 131_072
"""Maximum tokens of a request. Longer requests of a trace are left out."""

BURST_REQUESTS: Final = 400
BURST_RPS: Final = 1e5
"""Requests per second at which all requests arrive practically simultaneously. The worker's batch
is then full until most requests are done."""


@dataclass(frozen=True, slots=True)
class Study:
    """The settings of all clusters.

    Attributes:
        recorded: requests for the windows of the largest cluster.
        each: number of requests per window and worker.
        windows: number of consecutive windows of the trace.
    """

    recorded: Recorded
    each: int
    config: WorkerConfig
    slo: Slo
    seed: int
    windows: int = 1

    @cache  # noqa: B019 - a study lives as long as the process
    def sustained_rps(self, kind: Kind) -> float:
        """Return the throughput of a worker when all requests arrive simultaneously."""
        window = self.recorded.cut(0, BURST_REQUESTS)
        records = self._run("least_loaded", 1, (kind,), window, BURST_RPS)
        return len(records) / max(record.end_s for record in records)

    def cell(self, workers: int, mix: str, share: float) -> dict[str, Any]:
        """Simulate all policies on a cluster, and return their metrics.

        The result also compares each policy with `least_cost`.

        Args:
            workers: number of workers.
            mix: name of the cluster.
            share: rate as a fraction of the sustained rate.
        """
        kinds, count = CLUSTERS[mix], workers * self.each
        sustained = [self.sustained_rps(kinds[n % len(kinds)]) for n in range(workers)]
        rate_rps = share * sum(sustained)
        windows = [self.recorded.cut(n * count, count) for n in range(self.windows)]
        found = {
            policy: [self._run(policy, workers, kinds, window, rate_rps) for window in windows]
            for policy in POLICIES
        }
        return {
            "workers": workers,
            "cluster": mix,
            "share": share,
            "rate_rps": rate_rps,
            "requests": count,
            "policies": {policy: _mean_metrics(runs) for policy, runs in found.items()},
            "to_ours": {
                policy: _difference(found[LEAST_COST], runs)
                for policy, runs in found.items()
                if policy != LEAST_COST
            },
        }

    def _run(
        self, routing: str, workers: int, kinds: Sequence[Kind], window: Recorded, rate_rps: float
    ) -> list[Record]:
        planned = window.planned(rate_rps, self.slo, self.seed)
        rules = replace(ADMIT_ALL, routing=routing)
        environment = SimEnvironment(self.seed, slowness=tuple(kind.slowness for kind in kinds))
        profiles = tuple(kind.profile for kind in kinds)
        cluster = SimulatedCluster(self.config, workers, environment, rules, profiles)
        records = simulate(cluster, planned, to_job=window.job)
        gc.collect()  # a stopped cluster has reference cycles of 90 kB per request
        return records


def _mean_metrics(runs: Sequence[Sequence[Record]]) -> dict[str, Any]:
    """Return the means of a policy's metrics over the windows, and the metrics of each window."""
    windows = [run_metrics(records) for records in runs]
    means = {name: fmean(results[name] for results in windows) for name in windows[0]}
    return {**means, "windows": windows}


def run_metrics(records: Sequence[Record]) -> dict[str, float]:
    """Return a policy's latencies, goodput, cache hits and imbalance."""
    ttfts_s, tpots_s = (sorted(values_of(METRICS[key], records)) for key in ("ttft_s", "tpot_s"))
    schedule_s = max(record.scheduled_s for record in records)
    usages = [record.usage or {} for record in records]
    cached = sum(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)
    tokens: dict[str, int] = {}
    for record, usage in zip(records, usages, strict=True):
        worker = str((record.metrics or {})["worker_id"])
        used = usage["prompt_tokens"] + usage["completion_tokens"]
        tokens[worker] = tokens.get(worker, 0) + used
    return {
        "ttft_p50_s": percentile(ttfts_s, 0.5),
        "ttft_p99_s": percentile(ttfts_s, 0.99),
        "tpot_p50_s": percentile(tpots_s, 0.5),
        "tpot_p99_s": percentile(tpots_s, 0.99),
        "latency_mean_s": sum(map(latency_s, records)) / len(records),
        "attainment": sum(map(meets_slo, records)) / len(records),
        "goodput_rps": sum(map(meets_slo, records)) / schedule_s,
        "cached": cached / sum(usage["prompt_tokens"] for usage in usages),
        "imbalance": max(tokens.values()) * len(tokens) / sum(tokens.values()),
    }


def _difference(
    least_cost_runs: Sequence[Sequence[Record]], other_runs: Sequence[Sequence[Record]]
) -> dict[str, Any]:
    """Return the paired differences of mean metrics over batches of the same requests."""
    found = {}
    for name, value in COMPARED.items():
        pairs = [
            [mean for records in runs for mean in batch_means([value(one) for one in records])]
            for runs in (least_cost_runs, other_runs)
        ]
        difference = estimate(differences(*pairs))
        if difference is not None:
            found[name] = difference.as_dict()
    return found


COMPARED: Final[dict[str, Callable[[Record], float | None]]] = {
    "latency_s": latency_s,
    "ttft_s": ttft_s,
    "tpot_s": tpot_s,
    "attainment": lambda record: float(meets_slo(record)),
}


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench routing`."""
    args = _parser().parse_args(arguments)
    config = WorkerConfig(
        proposer="ngram",
        speculation=args.speculation,
        max_num_seqs=256,
        max_model_len=MAX_MODEL_LEN,
        max_step_tokens=2048,
    )
    counts = [int(text) for text in args.workers.split(",")]
    shares = [float(text) for text in args.shares.split(",")]
    rows = read_trace(args.trace)
    needed = max(max(counts) * args.requests * args.windows, BURST_REQUESTS)
    recorded = Recorded.of(rows, min(needed, len(rows)), MAX_MODEL_LEN)
    slo = Slo.of_ms(args.slo_ttft_ms, args.slo_tpot_ms)
    study = Study(recorded, args.requests, config, slo, args.seed, args.windows)
    mixes = args.clusters.split(",")
    with without_full_gc():
        cells = list(_cells(study, mixes, counts, shares))
    kinds = dict.fromkeys(kind for mix in mixes for kind in CLUSTERS[mix])
    results = {
        "format": "routing/2",
        **simulated_provenance("routing", arguments),
        "profiles": {name: load_profile(name).source for name in {one.profile for one in kinds}},
        "settings": {
            "trace": args.trace.name,
            "requests": args.requests,
            "windows": args.windows,
            "sustained_rps": {
                f"{kind.profile} x {kind.slowness:g}": study.sustained_rps(kind) for kind in kinds
            },
            "speculation": args.speculation,
            "slo_s": [slo.ttft_s, slo.tpot_s],
            "seed": args.seed,
        },
        "cells": cells,
    }
    title = f"Routing, {args.trace.stem}, simulated"
    write_results(args, results, title, body(title, results))


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("routing", __doc__, device=False)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--workers", default="8,16,32,64")
    parser.add_argument("--clusters", default=",".join(CLUSTERS))
    parser.add_argument(
        "--requests", type=int, default=100, help="number of requests per window and worker"
    )
    parser.add_argument("--windows", type=int, default=1, help="number of windows of the trace")
    parser.add_argument("--shares", default="0.9", help="fractions of the sustained rate")
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--slo-ttft-ms", type=float, default=2000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _cells(
    study: Study, mixes: Sequence[str], counts: Sequence[int], shares: Sequence[float]
) -> Iterator[dict[str, Any]]:
    """Simulate every cluster at every rate, and print the metrics of each policy."""
    for mix, workers, share in product(mixes, counts, shares):
        cell = study.cell(workers, mix, share)
        for policy in cell["policies"]:
            print(*line(cell, policy), flush=True)
        yield cell


if __name__ == "__main__":
    main()
