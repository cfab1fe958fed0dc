"""Reproduce Llumnix's experiments: early and late binding, with and without rescheduling.

    draftgate bench rescheduling --lengths all --seeds 0,1,2 --json OUT

16 instances hold 12,800 tokens each, as in the artifact of Llumnix (OSDI 2024). Lengths of prompts
and outputs follow a power law up to 6,144 tokens with the given means. All variants get the same
requests, at the highest rate of the artifact. With early binding, a request goes to
the least loaded instance when it arrives, and queues there. The gateway, its policies and its moves
are the production code, and instances are simulated by `batch_backend`. The length of an output is
the limit of its request, so policies that read limits know it.

Prefill latency is the time to the first token, with queueing. Decode latency is the mean time of a
further token. The loss is the time of a request in gaps of more than `GAP_S` between two tokens,
which preemptions cause. Improvements are the ratios of metrics with and without moves for the same
requests: their geometric mean over the seeds, with a 95 % interval.

The artifact's other experiments need more options:

    draftgate bench rescheduling --lengths 128/128 --rates 26 --arrivals gamma:4 --urgent 0.1
    draftgate bench rescheduling --lengths 512/512 --rates 2,3 --arrivals gamma:4 --autoscale

With `--urgent`, a share of the requests has a higher priority class, and the results have separate
latencies for it. With `--autoscale`, the pool begins with one instance, and the number of instances
follows the gateway's advice. Variants without a policy then drain an instance without moves.
"""

from __future__ import annotations

import argparse
import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import accumulate, pairwise, product
from pathlib import Path
from random import Random
from statistics import fmean, stdev
from typing import Any, Final, NamedTuple

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.simulation.autoscaling import Autoscaler
from bench.simulation.batch_backend import BatchBackend
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.sim.virtual_time import run_virtual
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.simulate.cluster import ADMIT_ALL, running_dispatcher, send
from draftgate.gateway.cli.simulate.drawn import Drawn
from draftgate.gateway.cli.simulate.move_counts import MoveCounts
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.measuring.confidence import student_quantile
from draftgate.loadgen.measuring.metrics import METRICS, percentile, values_of
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, Slo
from draftgate.policies.types import ServiceLevel

DEVICES: Final = Path(__file__).with_name("devices")
"""Profiles that are fitted to Llumnix's figure 10."""

RATES: Final = {
    "128/128": 38.0,
    "512/128": 22.0,
    "256/256": 8.0,
    "128/512": 4.4,
    "512/512": 3.2,
}
"""Highest rate of the artifact in requests per second, by the mean lengths of prompts and
outputs."""

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


@dataclass(frozen=True, slots=True)
class Scenario:
    """The pool and its requests.

    Attributes:
        device: profile in `DEVICES`.
        lengths: mean tokens of prompts and outputs.
        rate_rps: mean arrivals per second.
        arrival: the arrival process.
        urgent_share: share of urgent requests.
        autoscale: whether the number of instances follows the advice.
    """

    device: str
    instances: int
    requests: int
    lengths: str
    rate_rps: float
    arrival: str
    urgent_share: float
    autoscale: bool
    seed: int

    def drawn(self) -> Drawn:
        """Return the lengths of the requests."""
        prompt_mean, output_mean = map(float, self.lengths.split("/"))
        return draw_lengths(prompt_mean, output_mean, self.requests, self.seed)


class PowerLaw:
    """Lengths from 1 to `LONGEST` whose probability is proportional to length ** -exponent."""

    def __init__(self, mean: float) -> None:
        """Choose the exponent for a mean length."""
        self._sums = _cumulated(mean)

    def draw(self, random: Random) -> int:
        """Return a random length."""
        return bisect_left(self._sums, random.random() * self._sums[-1]) + 1


@cache
def _cumulated(mean: float) -> list[float]:
    """Return the cumulated weights of the lengths with a mean."""
    low, high = 0.0, 4.0
    for _ in range(50):
        middle = (low + high) / 2.0
        low, high = (middle, high) if _mean(middle) > mean else (low, middle)
    return list(accumulate(_weights(high)))


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


def run(case: tuple[Scenario, Variant]) -> dict[str, Any]:
    """Simulate a variant, and return its metrics."""
    scenario, variant = case
    urgent = draw_urgent(scenario.urgent_share, scenario.requests, scenario.seed)
    scaler = Autoscaler(1) if scenario.autoscale else None
    watch = MoveCounts()
    with without_full_gc():
        records = run_virtual(_send(scenario, variant, urgent, watch, scaler))
    usual = [record for record in records if record.planned.index not in urgent]
    row: dict[str, Any] = {**asdict(scenario), "variant": variant.name, **metrics(usual)}
    if urgent:
        high = metrics([record for record in records if record.planned.index in urgent])
        row |= {f"urgent_{name}": value for name, value in high.items()}
    if scaler is not None:
        row["mean_instances"] = scaler.worker_s / row["duration_s"]
        row["advice_changes"] = scaler.changes
    return {**row, "moves": dict(sorted(watch.ends.items()))}


async def _send(
    scenario: Scenario,
    variant: Variant,
    urgent: frozenset[int],
    watch: MoveCounts,
    scaler: Autoscaler | None,
) -> list[Record]:
    """Send the requests to a gateway, and return their records."""
    profile = load_profile(str(DEVICES / f"{scenario.device}.json"))
    tokenizer, drawn = Tokenizer(SHIPPED_MODEL), scenario.drawn()
    rules = replace(
        ADMIT_ALL,
        routing=variant.routing,
        rescheduling=variant.rescheduling,
        binding=variant.binding,
        moves=variant.rescheduling != "off",
    )

    def job(planned: PlannedRequest) -> Job:
        level = URGENT if planned.index in urgent else ServiceLevel()
        return replace(drawn.job(planned), service=level)

    beside = nullcontext if scaler is None else scaler.beside
    configs = [WorkerConfig(speculation="off")] * scenario.instances
    planned = drawn.planned(scenario.rate_rps, Slo(), scenario.arrival)
    async with (
        running_dispatcher(
            lambda _config: BatchBackend(profile, tokenizer), configs, rules, scenario.seed
        ) as dispatcher,
        beside(dispatcher),
    ):
        return await send(dispatcher, planned, job, watch=watch)


def draw_urgent(share: float, requests: int, seed: int) -> frozenset[int]:
    """Return the indices of the requests of the higher priority class."""
    random = Random(f"urgent/{seed}")
    return frozenset(index for index in range(requests) if random.random() < share)


def metrics(records: Sequence[Record]) -> dict[str, float]:
    """Return latencies and losses of complete requests, in seconds."""
    keys = "ttft_s", "tpot_s", "latency_s"
    prefills, decodes, latencies = (sorted(values_of(METRICS[key], records)) for key in keys)
    losses = [lost_s(record) for record in records]
    return {
        "request_mean_s": fmean(latencies),
        "request_p99_s": percentile(latencies, 0.99),
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


def improvements(rows: Sequence[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    """Yield the ratios of metrics with and without moves, over all seeds of a scenario.

    A ratio below 1 is an improvement. Each ratio has the ends of its 95 % interval, unless there is
    only one seed. Metrics that are 0 in a row have no ratio.
    """
    by_case = defaultdict[tuple[Any, ...], dict[int, dict[str, Any]]](dict)
    settings = [name for name in Scenario.__dataclass_fields__ if name != "seed"]
    for row in rows:
        case = *(row[name] for name in settings), row["variant"]
        by_case[case][row["seed"]] = row
    for (*scenario, variant), moved in by_case.items():
        base = by_case.get((*scenario, variant.partition(" ")[0]))
        if base is None or moved is base:
            continue
        found = dict(zip(settings, scenario, strict=True)) | {"variant": variant}
        for name in (one for one in next(iter(moved.values())) if one.endswith(RATIOS)):
            pairs = [(moved[seed][name], base[seed][name]) for seed in moved if seed in base]
            if all(min(pair) > 0.0 for pair in pairs):
                found[name] = geometric_mean([after / before for after, before in pairs])
        yield found


RATIOS: Final = ("_mean_s", "_p99_s", "mean_instances")
"""Ends of the names of metrics that are compared."""


def geometric_mean(ratios: Sequence[float]) -> list[float]:
    """Return the geometric mean of ratios, and the ends of its 95 % interval by Student's t."""
    logs = [math.log(ratio) for ratio in ratios]
    mean, count = fmean(logs), len(logs)
    if count < 2:
        return [math.exp(mean)]
    half = student_quantile(count - 1) * stdev(logs) / math.sqrt(count)
    return [math.exp(mean), math.exp(mean - half), math.exp(mean + half)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench rescheduling`."""
    args = _parser().parse_args(arguments)
    names = args.variants.split(",") if args.variants else [one.name for one in VARIANTS]
    chosen = [one for one in VARIANTS if one.name in names]
    facts = {
        "format": "rescheduling/2",
        **simulated_provenance("rescheduling", arguments),
        "profile": load_profile(str(DEVICES / f"{args.device}.json")).source,
    }
    rows = list[dict[str, Any]]()
    with ProcessPoolExecutor(args.processes) as processes:
        for row in processes.map(run, product(_scenarios(args), chosen)):
            print(row, flush=True)
            rows.append(row)
            # All runs take hours, so each row is kept at once.
            results = {**facts, "rows": rows, "improvements": list(improvements(rows))}
            cells = [[str(value) for value in one.values()] for one in rows]
            body = html_table(list(rows[0]), cells)
            write_results(args, results, f"Rescheduling, {args.device}, simulated", [body])


def _scenarios(args: argparse.Namespace) -> Iterator[Scenario]:
    """Yield the scenarios, all seeds of the first one before the next one."""
    scenario = partial(
        Scenario, device=args.device, instances=args.instances, requests=args.requests
    )
    for lengths in RATES if args.lengths == "all" else args.lengths.split(","):
        rates = map(float, args.rates.split(",")) if args.rates else [RATES[lengths]]
        arrivals, seeds = args.arrivals.split(","), map(int, args.seeds.split(","))
        for rate, arrival, seed in product(rates, arrivals, seeds):
            yield scenario(
                lengths=lengths,
                rate_rps=rate,
                arrival=arrival,
                urgent_share=args.urgent,
                autoscale=args.autoscale,
                seed=seed,
            )


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("rescheduling", __doc__, device=False)
    parser.add_argument("--device", default="a10-7b", help="profile in bench/simulation/devices")
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--requests", type=int, default=10_000)
    parser.add_argument("--lengths", default="all", help=f"some of {', '.join(RATES)}, or all")
    parser.add_argument("--rates", default="", help="requests per second (default: Llumnix's)")
    parser.add_argument("--arrivals", default="poisson", help="some of poisson and gamma:CV")
    parser.add_argument("--urgent", type=float, default=0.0, help="share of urgent requests")
    parser.add_argument("--autoscale", action="store_true", help="follow the scaling advice")
    parser.add_argument("--variants", default="", help="names of variants (default: all)")
    parser.add_argument("--seeds", default="0", help="seeds of the requests")
    parser.add_argument("--processes", type=int, default=1, help="simulations at the same time")
    return parser


if __name__ == "__main__":
    main()
