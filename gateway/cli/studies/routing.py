"""Routing: what policies give on recorded traffic, over numbers of workers, alike and mixed.

    draftgate bench routing --trace FILE --json OUT --html OUT

The requests of a trace, in its order, with its prefixes and its own bursts, at a share of the rate
that the workers can sustain: what one gives with everything there at once, as often as there are
workers. Mixed ones are half of them half as fast. Policies meet the same requests, texts and noise;
means of batches of requests are paired.
"""

from __future__ import annotations

import argparse
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from backends.base import WorkerConfig
from backends.sim.profile import load_profile
from backends.sim.simulated import World
from gateway.cli.simulate.cluster import EVERYBODY_WAITS, Cluster, simulate
from gateway.cli.simulate.intervals import batch_means, differences, estimate
from gateway.cli.studies.record import provenance, study_parser, write_results
from gateway.cli.studies.recorded import Recorded
from gateway.cli.studies.routing_report import body, line
from loadgen.measuring.figures import FIGURE, latency_s, percentile, tpot_s, ttft_s, values_of
from loadgen.measuring.slo import met
from loadgen.planning.traces import read_trace
from loadgen.sending.health import without_full_collections
from loadgen.types import Record, Slo

POLICIES: Final = (
    "round_robin",
    "least_loaded",
    "power_of_two",
    "prefix_affinity",
    "price",
)
OURS: Final = "price"

SLOWNESS: Final = {"equal": (1.0,), "mixed": (1.0, 2.0)}
"""By what the times of a profile are multiplied, worker by worker in turn."""

MAX_MODEL_LEN: Final = 131_072
"""Longer requests of a trace are left out."""

AT_ONCE_RPS: Final = 1e5


@dataclass(frozen=True, slots=True)
class Study:
    """What is the same for all clusters.

    Attributes:
        recorded: as many requests as the largest cluster gets.
        each: requests for each worker of a cluster.
    """

    recorded: Recorded
    each: int
    config: WorkerConfig
    slo: Slo
    seed: int

    def sustained_rps(self) -> float:
        """Return the requests per second of one worker when everything is there at once."""
        records = self._run("least_loaded", 1, (1.0,), AT_ONCE_RPS)
        return len(records) / max(record.end_s for record in records)

    def cell(self, workers: int, mix: str, rate_rps: float) -> dict[str, Any]:
        """Simulate all policies on a cluster; return what each gave, and how ours compares."""
        found = {policy: self._run(policy, workers, SLOWNESS[mix], rate_rps) for policy in POLICIES}
        return {
            "workers": workers,
            "cluster": mix,
            "rate_rps": rate_rps,
            "requests": workers * self.each,
            "policies": {policy: figures(records) for policy, records in found.items()},
            "to_ours": {
                policy: _difference(found[OURS], records)
                for policy, records in found.items()
                if policy != OURS
            },
        }

    def _run(
        self, routing: str, workers: int, slowness: tuple[float, ...], rate_rps: float
    ) -> list[Record]:
        recorded = replace(self.recorded, rows=self.recorded.rows[: workers * self.each])
        planned = recorded.planned(rate_rps, self.slo, self.seed)
        rules = replace(EVERYBODY_WAITS, routing=routing)
        cluster = Cluster(self.config, workers, World(self.seed, slowness=slowness), rules)
        return simulate(cluster, planned, to_job=recorded.job)


def figures(records: Sequence[Record]) -> dict[str, float]:
    """Return what a policy gave: times, goodput, how much was cached, how unequal workers were."""
    ttfts_s, tpots_s = (sorted(values_of(FIGURE[key], records)) for key in ("ttft_s", "tpot_s"))
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
        "attainment": sum(map(met, records)) / len(records),
        "goodput_rps": sum(map(met, records)) / schedule_s,
        "cached": cached / sum(usage["prompt_tokens"] for usage in usages),
        "imbalance": max(tokens.values()) * len(tokens) / sum(tokens.values()),
    }


def _difference(ours: Sequence[Record], theirs: Sequence[Record]) -> dict[str, Any]:
    """Return our mean figures less theirs, batch by batch of the same requests."""
    found = {}
    for name, value in (("latency_s", latency_s), ("ttft_s", ttft_s), ("tpot_s", tpot_s)):
        pairs = [batch_means([value(record) for record in records]) for records in (ours, theirs)]
        difference = estimate(differences(*pairs))
        if difference is not None:
            found[name] = difference.as_dict()
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Simulate all clusters, print a line for each policy, write what was asked for."""
    args = _parser().parse_args(arguments)
    config = WorkerConfig(
        profile=args.profile,
        proposer="ngram",
        speculation=args.speculation,
        max_num_seqs=256,
        max_model_len=MAX_MODEL_LEN,
        max_step_tokens=2048,
    )
    counts = [int(text) for text in args.workers.split(",")]
    rows = read_trace(args.trace)
    recorded = Recorded.of(rows, max(counts) * args.requests, MAX_MODEL_LEN)
    slo = Slo.of_ms(args.slo_ttft_ms, args.slo_tpot_ms)
    study = Study(recorded, args.requests, config, slo, args.seed)
    with without_full_collections():
        sustained_rps = study.sustained_rps()
        cells = list(_cells(study, counts, args.clusters.split(","), args.share * sustained_rps))
    results = {
        "format": "routing/1",
        **provenance("routing", arguments),
        "profile": load_profile(args.profile).source,
        "settings": {
            "trace": args.trace.name,
            "requests": args.requests,
            "share": args.share,
            "sustained_rps": sustained_rps,
            "speculation": args.speculation,
            "slo_s": [slo.ttft_s, slo.tpot_s],
            "seed": args.seed,
        },
        "cells": cells,
    }
    title = f"Routing, {args.trace.stem} on {args.profile}, simulated"
    write_results(args, results, title, body(title, results))


def _parser() -> argparse.ArgumentParser:
    parser = study_parser("routing", __doc__)
    parser.add_argument("--trace", type=Path, required=True)
    parser.add_argument("--workers", default="8,16,32,64")
    parser.add_argument("--clusters", default=",".join(SLOWNESS))
    parser.add_argument("--requests", type=int, default=100, help="for each worker")
    parser.add_argument("--share", type=float, default=0.7, help="of the rate that is sustained")
    parser.add_argument("--speculation", default="auto")
    parser.add_argument("--slo-ttft-ms", type=float, default=2000.0)
    parser.add_argument("--slo-tpot-ms", type=float, default=50.0)
    parser.add_argument("--seed", type=int, default=0)
    return parser


def _cells(
    study: Study, counts: Sequence[int], mixes: Sequence[str], rate_rps: float
) -> Iterator[dict[str, Any]]:
    """Simulate every cluster, at so many requests a second for each worker of full speed."""
    for mix in mixes:
        speed = sum(1.0 / times for times in SLOWNESS[mix]) / len(SLOWNESS[mix])
        for workers in counts:
            cell = study.cell(workers, mix, rate_rps * workers * speed)
            for policy in cell["policies"]:
                print(*line(cell, policy), flush=True)
            yield cell


if __name__ == "__main__":
    main()
