"""Compare rescheduling policies on unlike workers, with speculation, bursts and long prompts.

    draftgate bench unlike-workers --json OUT

The pool has an H200, an H100, and an H100 at half speed, all with Llama-3.1-8B. Chats with random
lengths arrive in bursts, and a tenth of the requests has a long prompt. The targets are those of
MLPerf Inference for Llama 3.1 8B, the interactive ones for chats and the others for long prompts.
Goodput counts requests that meet both targets, per second of the arrivals. All policies get the
same requests, texts and noise, and are compared seed by seed.

In production, workers on different devices have different numerics classes and exchange no KV
blocks. The study assumes that they do, to measure what this would gain.

The predicted gain of all moves of a run is compared with the realised gain: the sum of the
latencies without moves, less the sum with moves. The prediction counts late requests up to four
times.
"""

from __future__ import annotations

import argparse
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import product
from random import Random
from statistics import fmean
from typing import Any, Final

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import ADMIT_ALL, SimulatedCluster, simulate
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.gateway.cli.simulate.intervals import differences, estimate
from draftgate.gateway.cli.simulate.move_counts import MoveCounts
from draftgate.gateway.dispatch.run import Move
from draftgate.loadgen.measuring.metrics import METRICS, latency_s, percentile, values_of
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, Slo
from draftgate.policies.moves import MoveEnd

PROFILES: Final = ("h200-8b", "h100-8b", "h100-8b")
SLOWNESS: Final = (1.0, 1.0, 2.0)
POLICIES: Final = ("off", "llumnix", "least_time")
OURS: Final = "least_time"

COMPARED: Final = ("goodput_rps", "latency_mean_s", "ttft_mean_s", "tpot_mean_s")
SHOWN: Final = ("goodput_rps", "attainment", "latency_mean_s", "ttft_p99_s", "tpot_mean_s", "moves")

CHAT: Final = Slo(0.5, 0.03)
LONG: Final = Slo(2.0, 0.1)

LONG_SHARE: Final = 0.1
LONG_PROMPTS: Final = (4096, 16_384)
LONG_OUTPUT: Final = 128
CHAT_PROMPT: Final = (300.0, 1.0)
CHAT_OUTPUT: Final = (120.0, 0.8)
"""Median length of a chat's prompt and output, and the standard deviation of its logarithm."""

MOST_CHAT: Final = 3000
MODEL_LEN: Final = 20_480


def draw_lengths(requests: int, seed: int) -> Drawn:
    """Return requests with random lengths."""
    random, rows = Random(f"unlike/{seed}"), list[TraceRow]()
    for _ in range(requests):
        if random.random() < LONG_SHARE:
            rows.append(TraceRow(0.0, random.randint(*LONG_PROMPTS), LONG_OUTPUT))
        else:
            prompt, output = _drawn(random, *CHAT_PROMPT), _drawn(random, *CHAT_OUTPUT)
            rows.append(TraceRow(0.0, prompt, output))
    return Drawn(tuple(rows), seed)


def _drawn(random: Random, middle: float, spread: float) -> int:
    return min(max(round(middle * random.lognormvariate(0.0, spread)), 4), MOST_CHAT)


def plan(drawn: Drawn, rate_rps: float, arrival: str) -> list[PlannedRequest]:
    """Return the requests with their classes and targets."""
    planned = []
    for one in drawn.planned(rate_rps, CHAT, arrival):
        request = replace(one.request, class_name="chat")
        if drawn.rows[one.index].prompt_tokens > MOST_CHAT:
            request = replace(one.request, class_name="long_document", slo=LONG)
        planned.append(replace(one, request=request))
    return planned


class ChosenMoves(MoveCounts):
    """An observer that keeps the chosen moves that succeeded."""

    def __init__(self) -> None:
        super().__init__()
        self.chosen = list[Move]()

    def moved(self, move: Move) -> None:
        """Keep a move."""
        super().moved(move)
        if move.end is MoveEnd.MOVED and move.chosen is not None:
            self.chosen.append(move)


@dataclass(frozen=True, slots=True)
class Run:
    """A simulation of one policy.

    Attributes:
        records: the requests in the order of arrival.
        watch: its moves.
    """

    records: list[Record]
    watch: ChosenMoves

    @property
    def metrics(self) -> dict[str, float]:
        """Goodput, latencies in seconds, and the number of moves."""
        records = self.records
        ttft, tpot = (sorted(values_of(METRICS[key], records)) for key in ("ttft_s", "tpot_s"))
        met = sum(map(meets_slo, records))
        return {
            "goodput_rps": met / records[-1].scheduled_s,
            "attainment": met / len(records),
            "latency_mean_s": fmean(map(latency_s, records)),
            "ttft_mean_s": fmean(ttft),
            "ttft_p99_s": percentile(ttft, 0.99),
            "tpot_mean_s": fmean(tpot),
            "tpot_p99_s": percentile(tpot, 0.99),
            "moves": len(self.watch.chosen),
        }


def run(args: argparse.Namespace, policy: str, speculation: str, rate: float, seed: int) -> Run:
    """Simulate a policy."""
    drawn = draw_lengths(args.requests, seed)
    config = WorkerConfig(
        speculation=speculation,
        max_model_len=MODEL_LEN,
        max_num_seqs=args.max_num_seqs,
        kv_bytes=args.kv_gb * 10**9,
    )
    environment = SimEnvironment(seed, slowness=SLOWNESS, delivers_tokens=True, shares_kv=True)
    rules = replace(ADMIT_ALL, rescheduling=policy)
    cluster = SimulatedCluster(config, len(PROFILES), environment, rules, PROFILES)
    watch = ChosenMoves()
    records = simulate(cluster, plan(drawn, rate, args.arrival), to_job=drawn.job, watch=watch)
    return Run(records, watch)


def cell(speculation: str, rate: float, runs: dict[str, list[Run]]) -> dict[str, Any]:
    """Return the metrics of all policies, means over seeds, and the paired differences of ours.

    Args:
        runs: the runs of each policy, one for each seed.
    """
    metrics = {policy: [one.metrics for one in found] for policy, found in runs.items()}
    ours = metrics[OURS]
    return {
        "speculation": speculation,
        "rate_rps": rate,
        "policies": {
            policy: {
                **{name: fmean([one[name] for one in found]) for name in found[0]},
                "ends": dict(sorted(_ends(runs[policy]).items())),
            }
            for policy, found in metrics.items()
        },
        "ours_less": {
            policy: {name: _difference(ours, metrics[policy], name) for name in COMPARED}
            for policy in POLICIES
            if policy != OURS
        },
        "gains": gains(runs[OURS], runs["off"]),
    }


def _ends(runs: Sequence[Run]) -> Counter[str]:
    return sum((one.watch.ends for one in runs), Counter())


def _difference(
    ours: Sequence[dict[str, float]], theirs: Sequence[dict[str, float]], name: str
) -> dict[str, Any]:
    """Return the paired difference over seeds with its 95% interval, relative to the mean."""
    base = fmean([one[name] for one in theirs])
    relative = [
        difference / base
        for difference in differences([one[name] for one in ours], [one[name] for one in theirs])
    ]
    found = estimate(relative)
    assert found is not None
    return found.as_dict()


def gains(runs: Sequence[Run], without: Sequence[Run]) -> dict[str, float]:
    """Compare the predicted gains of moves with the realised ones.

    Args:
        runs: runs with moves, one for each seed.
        without: the same runs without moves.
    """
    moves = [move for one in runs for move in one.watch.chosen]
    if not moves:
        return {}
    chosen = [move.chosen for move in moves if move.chosen is not None]
    saved_s = sum(
        latency_s(theirs) - latency_s(ours)
        for with_, none in zip(runs, without, strict=True)
        for ours, theirs in zip(with_.records, none.records, strict=True)
    )
    return {
        "moves": len(moves),
        "predicted_s_per_move": fmean([one.gain for one in chosen]),
        "threshold_s_per_move": fmean([one.threshold for one in chosen]),
        "realised_s_per_move": saved_s / len(moves),
        "gap_mean_s": fmean([move.gap_s for move in moves if move.gap_s is not None]),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench unlike-workers`."""
    args = _parser().parse_args(arguments)
    loads = list(product(args.speculation, args.rates))
    runs = {load: {policy: list[Run]() for policy in POLICIES} for load in loads}
    with without_full_gc():
        for seed in range(args.seeds):
            for (speculation, rate), policy in product(loads, POLICIES):
                found = run(args, policy, speculation, rate, seed)
                runs[speculation, rate][policy].append(found)
                print(seed, speculation, rate, policy, found.metrics, flush=True)
            # All runs take long, so the results of each seed are kept at once.
            _write(args, arguments, [cell(*load, runs[load]) for load in loads], seed + 1)


def _write(
    args: argparse.Namespace,
    arguments: Sequence[str] | None,
    cells: Sequence[dict[str, Any]],
    seeds: int,
) -> None:
    """Write the results of the first seeds."""
    results = {
        "format": "unlike-workers/1",
        **simulated_provenance("unlike-workers", arguments),
        "settings": {
            "profiles": PROFILES,
            "slowness": SLOWNESS,
            "arrival": args.arrival,
            "requests": args.requests,
            "seeds": seeds,
            "max_num_seqs": args.max_num_seqs,
            "kv_gb": args.kv_gb,
        },
        "cells": cells,
    }
    head = ["speculation", "rate_rps", "policy", *SHOWN]
    table = [
        [one["speculation"], str(one["rate_rps"]), policy, *(str(row[name]) for name in SHOWN)]
        for one in cells
        for policy, row in one["policies"].items()
    ]
    write_results(args, results, "Unlike workers, simulated", [html_table(head, table)])


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("unlike-workers", __doc__, device=False)
    parser.add_argument("--speculation", nargs="+", default=["auto", "off"])
    parser.add_argument("--rates", nargs="+", type=float, default=[45.0, 60.0])
    parser.add_argument("--arrival", default="gamma:4", help="as for draftgate simulate")
    parser.add_argument("--requests", type=int, default=200)
    parser.add_argument("--seeds", type=int, default=8)
    parser.add_argument("--max-num-seqs", type=int, default=64)
    parser.add_argument("--kv-gb", type=int, default=16, help="KV memory of a worker")
    return parser


if __name__ == "__main__":
    main()
