"""Repeat the serving experiments of Llumnix with the gateway and its policies.

    draftgate bench llumnix --json OUT
    draftgate bench llumnix --only early,late --seeds 0,1,2

A pool of simulated A10s with LLaMA-7B gets requests with the lengths of Llumnix's artifact (OSDI
2024), at rates relative to the rate at which the memory is full (`saturated_rps`). Gateway,
scheduler, policies and moves are the production code, in virtual time and without torch.

* `early`: each request goes to the freest instance at its arrival, and queues there, as in Llumnix.
* `late`: requests wait at the gateway until an instance has room, as in Draftgate.
* `slower`: `early` on instances with steps of 1.5 times the length, at the same relative rate.
* `priorities`: a tenth of the requests has a higher class, and arrivals come in bursts. `ignored`
  gives all requests the same class.
* `scaling`: the number of instances follows the advice of the gateway.

Prefill latency is the time to the first token, with queueing. Decode latency is the mean time of a
further token. The loss is the time of a request in gaps of more than `GAP_S` between two tokens,
which preemptions cause. All variants of an experiment get the same requests.
"""

from __future__ import annotations

import math
from bisect import bisect_left
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import asdict, dataclass, replace
from functools import cache, partial
from itertools import accumulate, product
from pathlib import Path
from random import Random
from statistics import fmean
from time import process_time
from typing import Any, Final

from bench.harness.provenance import bench_parser, cpu_name, simulated_provenance
from bench.harness.study import running_study
from bench.simulation.autoscaling import Autoscaler
from draftgate.backends.sim.backend import SimBackend
from draftgate.backends.sim.profile import Profile, load_profile
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.plan.sources import Drawn
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.sim.virtual_time import run_virtual
from draftgate.lab.simulate.cluster import (
    ADMIT_ALL,
    SimulatedCluster,
    running_dispatcher,
    send_jobs,
)
from draftgate.lab.simulate.experiment import MoveCounts
from draftgate.lab.simulate.intervals import estimate
from draftgate.loadgen.measuring.metrics import METRICS, chunk_gaps_s, percentile, values_of
from draftgate.loadgen.planning.traces import TraceRow
from draftgate.loadgen.sending.health import without_full_gc
from draftgate.loadgen.types import PlannedRequest, Record, Slo
from draftgate.policies.types import ServiceLevel

DEVICE: Final = Path(__file__).with_name("a10-7b.json")
"""A profile that is fitted to Llumnix's figure 10."""

EXPONENTS: Final = {128: 2.0, 256: 1.5, 512: 1.15}
"""Exponents of the distributions of lengths in the artifact, by mean length in tokens."""

LONGEST: Final = 6144
"""Longest prompt and output in tokens, as in the artifact."""

GAP_S: Final = 0.5
"""Gap between two tokens that counts as lost. A step with a full prompt chunk takes a third."""

URGENT: Final = ServiceLevel(priority=-1)
URGENT_SHARE: Final = 0.1
"""Service level and share of urgent requests."""

SLOWER: Final = 1.5
"""Factor of the times of slower instances."""


@dataclass(frozen=True, slots=True)
class Variant:
    """A way to place and to move requests.

    Attributes:
        name: name in results.
        has_classes: whether urgent requests have a higher class.
    """

    name: str
    routing: str = "freeness"
    rescheduling: str = "off"
    binding: str = "early"
    has_classes: bool = True


@dataclass(frozen=True, slots=True)
class Experiment:
    """A load on a pool.

    Attributes:
        share: rate of requests relative to saturation.
        arrival: arrival process.
        lengths: mean lengths of prompts and outputs in tokens.
        variants: compared variants, the first of which is the baseline.
    """

    name: str
    share: float
    variants: tuple[Variant, ...]
    arrival: str = "poisson"
    lengths: tuple[int, int] = (256, 256)
    slowness: float = 1.0
    urgent_share: float = 0.0
    autoscales: bool = False


_EARLY: Final = (
    Variant("off"),
    Variant("llumnix", rescheduling="llumnix"),
    Variant("least_time", rescheduling="least_time"),
)
_LATE: Final = tuple(replace(one, routing="least_cost", binding="late") for one in _EARLY)

EXPERIMENTS: Final = (
    Experiment("early", 0.85, (*_EARLY[:2], Variant("least_loaded", "least_loaded"))),
    Experiment("early", 0.9, _EARLY[:2]),
    Experiment("early", 0.95, _EARLY),
    Experiment("late", 0.85, _LATE),
    Experiment("late", 0.95, _LATE),
    Experiment(
        "priorities",
        0.6,
        (
            Variant("ignored", rescheduling="llumnix", has_classes=False),
            Variant("llumnix", rescheduling="llumnix"),
        ),
        arrival="gamma:4",
        lengths=(128, 128),
        urgent_share=URGENT_SHARE,
    ),
    Experiment("scaling", 0.5, _LATE[:2], arrival="gamma:4", autoscales=True),
    Experiment("slower", 0.9, _EARLY[:2], slowness=SLOWER),
)


@cache
def _zipf(mean: int) -> tuple[list[float], float]:
    """Return the cumulated weights of the ranks, and the tokens of a rank, for a mean length."""
    ranks = range(1, 2 * mean)
    weights = [rank ** -EXPONENTS[mean] for rank in ranks]
    expected = sum(rank * one for rank, one in zip(ranks, weights, strict=True)) / sum(weights)
    return list(accumulate(weights)), mean / expected


def draw_length(mean: int, random: Random) -> int:
    """Return a length in tokens with the distribution of the artifact.

    A rank from 1 to 2 x mean - 1 has a probability proportional to rank ** -exponent. The lengths
    are ranks that are scaled to the mean, and at most `LONGEST`.
    """
    sums, scale = _zipf(mean)
    rank = bisect_left(sums, random.random() * sums[-1]) + 1
    return min(max(round(rank * scale), 1), LONGEST)


def draw_requests(lengths: tuple[int, int], count: int, seed: int) -> Drawn:
    """Return requests with independent lengths of prompts and outputs."""
    random, (prompts, outputs) = Random(f"llumnix/{seed}"), lengths
    rows = [
        TraceRow(0.0, draw_length(prompts, random), draw_length(outputs, random))
        for _ in range(count)
    ]
    return Drawn(tuple(rows), seed)


def saturated_rps(drawn: Drawn, profile: Profile) -> float:
    """Return the requests per second and instance at which the memory is full on average.

    By Little's law, the mean memory in use is the rate times the memory x time of a request: the
    sum of its contexts over its steps, times the time of a step. That time is the one with full
    memory and the prompts that arrive meanwhile. Waiting and preempted requests are left out, so no
    pool sustains this rate.
    """
    memory = profile.kv_bytes // profile.kv_token_bytes
    prompts = fmean(row.prompt_tokens for row in drawn.rows)
    outputs = fmean(row.output_tokens for row in drawn.rows)
    token_steps = fmean(
        row.output_tokens * (row.prompt_tokens + row.output_tokens / 2) for row in drawn.rows
    )
    sequences = memory * outputs / token_steps
    arrivals = sequences / outputs  # in a step
    tokens = round(sequences + arrivals * prompts)
    return arrivals / profile.cost.seconds(tokens, memory, round(sequences + arrivals))


@dataclass(frozen=True, slots=True)
class Size:
    """The size of the runs."""

    instances: int
    requests: int


def run(experiment: Experiment, variant: Variant, size: Size, seed: int) -> dict[str, Any]:
    """Simulate a variant, and return its metrics."""
    began_s = process_time()
    drawn = draw_requests(experiment.lengths, size.requests, seed)
    saturated = saturated_rps(drawn, load_profile(str(DEVICE))) / experiment.slowness
    rate_rps = experiment.share * saturated * size.instances
    random = Random(f"urgent/{seed}")
    urgent = {one for one in range(size.requests) if random.random() < experiment.urgent_share}

    def job(planned: PlannedRequest) -> Job:
        is_urgent = planned.index in urgent and variant.has_classes
        return replace(drawn.job(planned), service=URGENT if is_urgent else ServiceLevel())

    environment = SimEnvironment(
        seed, 0.0, roofline=False, slowness=(experiment.slowness,), delivers_tokens=True
    )
    rules = replace(
        ADMIT_ALL,
        routing=variant.routing,
        rescheduling=variant.rescheduling,
        binding=variant.binding,
    )
    config = WorkerConfig(
        profile=str(DEVICE), speculation="off", max_step_tokens=512, max_model_len=2 * LONGEST
    )
    cluster = SimulatedCluster(config, size.instances, environment, rules)
    scaler = Autoscaler(1) if experiment.autoscales else None
    planned, watch = drawn.planned(rate_rps, Slo(), experiment.arrival), MoveCounts()

    async def send() -> list[Record]:
        factory = partial(SimBackend, build=environment.build_worker, link=cluster.link)
        async with (
            running_dispatcher(factory, cluster.configs, rules, seed) as dispatcher,
            nullcontext() if scaler is None else scaler.beside(dispatcher),
        ):
            return await send_jobs(dispatcher, planned, job, watch=watch)

    with without_full_gc():
        records = run_virtual(send())
    usual = [record for record in records if record.planned.index not in urgent]
    row = {"seed": seed, "rate_rps": rate_rps, **metrics(usual)}
    if urgent:
        high = metrics([record for record in records if record.planned.index in urgent])
        row |= {f"urgent_{name}": value for name, value in high.items()}
    if scaler is not None:
        row["mean_instances"] = scaler.worker_s / row["duration_s"]
    return {**row, "moves": dict(sorted(watch.ends.items())), "cpu_s": process_time() - began_s}


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
    return sum(gap for gap in chunk_gaps_s(record) if gap > GAP_S)


def ratios(rows: Sequence[dict[str, Any]], base: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return the ratios of metrics to those of the baseline, in pairs of the same seed.

    A ratio below 1 is an improvement. The mean is geometric, and has a 95% interval with at least
    three seeds. Metrics that are 0 in a row have no ratio.
    """
    found = defaultdict[str, list[float]](list)
    for own, other in zip(rows, base, strict=True):
        for name in (one for one in own if one.endswith(("_mean_s", "_p99_s", "_instances"))):
            if min(own[name], other[name]) > 0.0:
                found[name].append(math.log(own[name] / other[name]))
    result = {}
    for name, logs in found.items():
        mean = estimate(logs)
        assert mean is not None
        ends = None
        if mean.half is not None:
            ends = [math.exp(mean.mean - mean.half), math.exp(mean.mean + mean.half)]
        ratio = {"ratio": math.exp(mean.mean), "interval": ends}
        result[name] = {**ratio, "by_seed": [math.exp(one) for one in logs]}
    return result


def results_of(
    experiment: Experiment,
    size: Size,
    seeds: Sequence[int],
    report: Callable[[str, int, int], None] = lambda _experiment, _done, _of: None,
) -> dict[str, Any]:
    """Simulate all variants of an experiment, and compare them with the first one."""
    found: dict[str, list[dict[str, Any]]] = {}
    runs = list(product(experiment.variants, seeds))
    for done, (variant, seed) in enumerate(runs, 1):
        row = run(experiment, variant, size, seed)
        found.setdefault(variant.name, []).append(row)
        print(experiment.name, experiment.share, variant.name, _line(row), flush=True)
        report(f"{experiment.name} at {experiment.share:g}", done, len(runs))
    base = found[experiment.variants[0].name]
    compared = {name: ratios(rows, base) for name, rows in found.items() if rows is not base}
    return {**asdict(experiment), "rows": found, "ratios": compared}


def _line(row: dict[str, Any]) -> str:
    shown = {name: round(value, 4) for name, value in row.items() if isinstance(value, float)}
    return f"{shown} {row['moves']}"


def _chosen(names: str) -> Iterator[Experiment]:
    wanted = names.split(",") if names else [one.name for one in EXPERIMENTS]
    return (one for one in EXPERIMENTS if one.name in wanted)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench llumnix`."""
    parser = bench_parser("llumnix", __doc__)
    parser.add_argument("--only", default="", help="names of experiments (default: all)")
    parser.add_argument("--instances", type=int, default=16)
    parser.add_argument("--requests", type=int, default=5000)
    parser.add_argument("--seeds", default="0,1")
    args = parser.parse_args(arguments)
    size, seeds = Size(args.instances, args.requests), [int(one) for one in args.seeds.split(",")]
    results: dict[str, Any] = {
        "format": "llumnix/1",
        **simulated_provenance("llumnix", arguments),
        "machine": cpu_name(),
        "profile": load_profile(str(DEVICE)).source,
        "instances": size.instances,
        "requests": size.requests,
        "seeds": seeds,
        "experiments": [],
    }
    with running_study(args.json, results, "runs") as progress:
        for experiment in _chosen(args.only):
            found = results_of(experiment, size, seeds, progress.report)
            results["experiments"].append(found)


if __name__ == "__main__":
    main()
