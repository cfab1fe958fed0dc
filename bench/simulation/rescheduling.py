"""Reproduce Llumnix's experiments: early and late binding, with and without rescheduling.

    draftgate bench rescheduling --lengths 256/256 --rate 7.7 --json OUT

16 instances hold 12,800 tokens each, as in the artifact of Llumnix (OSDI 2024). Lengths of prompts
and outputs follow a power law up to 6,144 tokens with the given means, and arrivals are Poisson.
All variants get the same requests. With early binding, a request goes to the least loaded instance
when it arrives, and queues there. Policies and moves are the production code. The length of an
output is the limit of its request, so policies that read limits know it.

Prefill latency is the time to the first token, with queueing. Decode latency is the mean time of a
further token. The loss is the time of a request in gaps of more than `GAP_S` between two tokens,
which preemptions cause.

The artifact's other experiments need more options:

    draftgate bench rescheduling --lengths 128/128 --rate 26 --arrival gamma:4 --urgent 0.1
    draftgate bench rescheduling --lengths 512/512 --rate 2 --arrival gamma:4 --autoscale

With `--urgent`, a share of the requests has a higher priority class, and the results have separate
latencies for it. With `--autoscale`, the pool begins with one instance, and the number of instances
follows the gateway's advice. Variants without a policy then drain an instance without moves.
"""

from __future__ import annotations

import argparse
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final, NamedTuple

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.autoscaling import Autoscaler
from bench.simulation.lengths import Drawn
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import ADMIT_ALL, SimulatedCluster, simulate
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.kv.pulls import KvFetch
from draftgate.gateway.dispatch.placement import Placement
from draftgate.gateway.dispatch.run import Move, Resume
from draftgate.loadgen.measuring.metrics import METRICS, percentile, values_of
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, Slo
from draftgate.policies.resilience.failover import Cause, GivenUp
from draftgate.policies.types import ServiceLevel

DEVICES: Final = Path(__file__).with_name("devices")
"""Profiles that are fitted to Llumnix's figure 10."""

LONGEST: Final = 6144
"""Longest prompt and output in tokens, as in the artifact."""

GAP_S: Final = 0.5
"""Gap between two tokens that counts as lost. A step with a full prompt chunk takes a third."""


URGENT: Final = ServiceLevel(priority=-1)
"""The service level of urgent requests."""


class Variant(NamedTuple):
    """A way to place and to move requests."""

    binding: str
    routing: str
    rescheduling: str

    @property
    def name(self) -> str:
        """The name in results."""
        moves = "" if self.rescheduling == "off" else f" + {self.rescheduling}"
        return f"{self.binding}{moves}"


VARIANTS: Final = (
    Variant("early", "least_loaded", "off"),
    Variant("early", "least_loaded", "llumnix"),
    Variant("late", "least_cost", "off"),
    Variant("late", "least_cost", "llumnix"),
    Variant("late", "least_cost", "least_time"),
)


class PowerLaw:
    """Lengths from 1 to `LONGEST` whose probability is proportional to length ** -exponent."""

    def __init__(self, mean: float) -> None:
        """Choose the exponent for a mean length."""
        low, high = 0.0, 4.0
        for _ in range(50):
            middle = (low + high) / 2.0
            low, high = (middle, high) if _mean(middle) > mean else (low, middle)
        self._sums = list(accumulate(_weights(high)))

    def draw(self, random: Random) -> int:
        """Return a random length."""
        return bisect_left(self._sums, random.random() * self._sums[-1]) + 1


def _weights(exponent: float) -> list[float]:
    return [length**-exponent for length in range(1, LONGEST + 1)]


def _mean(exponent: float) -> float:
    weights = _weights(exponent)
    return sum(length * one for length, one in enumerate(weights, 1)) / sum(weights)


def draw_lengths(prompt_mean: float, output_mean: float, requests: int, seed: int) -> Drawn:
    """Return requests with independent lengths of prompts and outputs."""
    random = Random(f"rescheduling/{seed}")
    prompts, outputs = PowerLaw(prompt_mean), PowerLaw(output_mean)
    rows = [
        TraceRow(0.0, max(prompts.draw(random), 4), outputs.draw(random)) for _ in range(requests)
    ]
    return Drawn(tuple(rows), seed)


def run(drawn: Drawn, variant: Variant, args: argparse.Namespace) -> dict[str, Any]:
    """Simulate a variant, and return its metrics."""
    config = WorkerConfig(
        profile=str(DEVICES / f"{args.device}.json"),
        speculation=args.speculation,
        max_num_seqs=256,
        max_step_tokens=512,
        max_model_len=2 * LONGEST,
    )
    rules = replace(
        ADMIT_ALL,
        routing=variant.routing,
        rescheduling=variant.rescheduling,
        binding=variant.binding,
        moves=variant.rescheduling != "off",
    )
    environment = SimEnvironment(args.seed, delivers_tokens=True)
    cluster = SimulatedCluster(config, args.instances, environment, rules)
    watch, urgent = MoveCounts(), draw_urgent(args.urgent, args.requests, args.seed)
    scaler = Autoscaler(1) if args.autoscale else None

    def job(planned: PlannedRequest) -> Job:
        level = URGENT if planned.index in urgent else ServiceLevel()
        return replace(drawn.job(planned), service=level)

    records = simulate(
        cluster,
        drawn.planned(args.rate, Slo(), args.arrival),
        to_job=job,
        watch=watch,
        beside=nullcontext if scaler is None else scaler.beside,
    )
    usual = [record for record in records if record.planned.index not in urgent]
    row: dict[str, Any] = {"variant": variant.name, **metrics(usual)}
    if urgent:
        high = metrics([record for record in records if record.planned.index in urgent])
        row |= {f"urgent_{name}": value for name, value in high.items()}
    if scaler is not None:
        row["mean_instances"] = scaler.worker_s / row["duration_s"]
        row["advice_changes"] = scaler.changes
    return {**row, "moves": dict(sorted(watch.ends.items()))}


def draw_urgent(share: float, requests: int, seed: int) -> frozenset[int]:
    """Return the indices of the requests of the higher priority class."""
    random = Random(f"urgent/{seed}")
    return frozenset(index for index in range(requests) if random.random() < share)


class MoveCounts:
    """An observer that counts moves by reason and end."""

    def __init__(self) -> None:
        self.ends = Counter[str]()

    def placed(self, placed: Placement) -> None:
        """Ignore a placement."""

    def resumed(self, resume: Resume) -> None:
        """Ignore a resume."""

    def given_up(self, cause: Cause, why: GivenUp) -> None:
        """Ignore the end of a prompt."""

    def fetched(self, fetch: KvFetch) -> None:
        """Ignore a fetch."""

    def moved(self, move: Move) -> None:
        """Count a move."""
        self.ends[f"{move.reason.value} {move.end.value}"] += 1


def metrics(records: Sequence[Record]) -> dict[str, float]:
    """Return latencies and losses of complete requests, in seconds."""
    prefills, decodes = (sorted(values_of(METRICS[key], records)) for key in ("ttft_s", "tpot_s"))
    losses = [lost_s(record) for record in records]
    return {
        "prefill_mean_s": fmean(prefills),
        "prefill_p99_s": percentile(prefills, 0.99),
        "decode_mean_s": fmean(decodes),
        "decode_p99_s": percentile(decodes, 0.99),
        "loss_mean_s": fmean(losses),
        "stalled_requests": sum(loss > 0.0 for loss in losses),
        "duration_s": max(record.end_s for record in records),
    }


def lost_s(record: Record) -> float:
    """Return the time of a request in long gaps between its tokens, in seconds."""
    gaps = (after.at_s - before.at_s for before, after in pairwise(record.chunks))
    return sum(gap for gap in gaps if gap > GAP_S)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench rescheduling`."""
    args = _parser().parse_args(arguments)
    prompt_mean, output_mean = map(float, args.lengths.split("/"))
    drawn = draw_lengths(prompt_mean, output_mean, args.requests, args.seed)
    chosen = [one for one in VARIANTS if not args.variants or one.name in args.variants.split(",")]
    rows = []
    with without_full_gc():
        for variant in chosen:
            rows.append(run(drawn, variant, args))
            print(rows[-1], flush=True)
    results = {
        "format": "rescheduling/1",
        **simulated_provenance("rescheduling", arguments),
        "profile": load_profile(str(DEVICES / f"{args.device}.json")).source,
        "settings": {
            "device": args.device,
            "instances": args.instances,
            "lengths": args.lengths,
            "rate_rps": args.rate,
            "arrival": args.arrival,
            "urgent_share": args.urgent,
            "autoscale": args.autoscale,
            "requests": args.requests,
            "speculation": args.speculation,
            "seed": args.seed,
        },
        "rows": rows,
    }
    title = f"Rescheduling, {args.device}, {args.lengths}, simulated"
    body = html_table(list(rows[0]), [[str(value) for value in row.values()] for row in rows])
    write_results(args, results, title, [body])


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("rescheduling", __doc__, device=False)
    parser.add_argument("--device", default="a10-7b", help="profile in bench/simulation/devices")
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--lengths", default="256/256", help="mean prompt and output tokens")
    parser.add_argument("--rate", type=float, default=7.7, help="requests per second")
    parser.add_argument("--arrival", default="poisson", help="poisson or gamma:CV")
    parser.add_argument("--urgent", type=float, default=0.0, help="share of urgent requests")
    parser.add_argument("--autoscale", action="store_true", help="follow the scaling advice")
    parser.add_argument("--requests", type=int, default=2000)
    parser.add_argument("--variants", default="", help="names of variants (default: all)")
    parser.add_argument("--speculation", default="off")
    parser.add_argument("--seed", type=int, default=0)
    return parser


if __name__ == "__main__":
    main()
