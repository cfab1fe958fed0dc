"""Measure whether moves shorten the waits of new requests at three engines with full memory.

    draftgate bench full-memory --json OUT

Three engines serve the shipped model in processes of their own, each with a KV cache of a few
thousand tokens. Short and long requests arrive at a rate at which the memory is full most of the
time, and go to the freest engine at once (`early` binding), as in Llumnix (OSDI 2024). Each round
draws other requests, and runs all of them with each rescheduling policy. The policies take turns.

The engines share the cores of the machine, so only ratios within a round are meaningful.
"""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from math import log
from random import Random
from statistics import fmean
from typing import Any, Final

from msgspec import structs

from bench.engine.bound import ratio_of
from bench.gateway.moved_streams import Observed, dispatching, job_of, run_job
from bench.harness.provenance import bench_parser, provenance, write_results
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, loop_time_s
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.measuring.metrics import percentile
from draftgate.policies.moves import MoveEnd

ENGINES: Final = 3
POLICIES: Final = ("off", "llumnix", "least_time")
SHORT: Final = (32, 96, 16, 48)
LONG: Final = (64, 256, 300, 600)
"""Least and most tokens of the prompts, and of the outputs, of each kind of request."""

LONG_SHARE: Final = 0.25
COMPARED: Final = ("ttft_mean_s", "ttft_p99_s")
GAP_S: Final = 0.5
"""Gap between two tokens that counts as lost, as in `draftgate bench llumnix`."""

CONFIG: Final = WorkerConfig(
    speculation="off", threads=1, max_model_len=1024, own_process=True, max_num_seqs=64
)


@dataclass(frozen=True, slots=True)
class Arrival:
    """A request and the time of its arrival after the start of its round, in seconds."""

    at_s: float
    job: Job
    is_long: bool


def arrivals(requests: int, rate: float, seed: int) -> list[Arrival]:
    """Return the requests of a round, as a Poisson process.

    Args:
        rate: requests per second.
    """
    draw, at_s, found = Random(f"full-memory/{seed}"), 0.0, list[Arrival]()
    for number in range(requests):
        at_s -= log(1.0 - draw.random()) / rate
        is_long = draw.random() < LONG_SHARE
        least, most, shortest, longest = LONG if is_long else SHORT
        tokens, output = draw.randint(least, most), draw.randint(shortest, longest)
        job = job_of(tokens, 10_000 * (seed + 1) + number, output)
        found.append(Arrival(at_s, job, is_long))
    return found


async def run_arm(policy: str, requests: Sequence[Arrival], config: WorkerConfig) -> dict[str, Any]:
    """Run the requests of a round with a rescheduling policy."""
    configs = [structs.replace(config, device_index=index) for index in range(ENGINES)]
    rules = WaitingRules(
        admission="none", ordering="fcfs", routing="freeness", rescheduling=policy, binding="early"
    )
    observed = [Observed() for _ in requests]
    async with dispatching(EngineBackend, configs, rules) as dispatcher:
        begin_s = loop_time_s() + 0.1
        await asyncio.gather(
            *(
                _send(dispatcher, one, seen, begin_s)
                for one, seen in zip(requests, observed, strict=True)
            )
        )
    return figures(requests, observed, begin_s)


async def _send(dispatcher: Dispatcher, request: Arrival, seen: Observed, begin_s: float) -> None:
    await asyncio.sleep(begin_s + request.at_s - loop_time_s())
    await run_job(dispatcher, request.job, seen)


def figures(
    requests: Sequence[Arrival], observed: Sequence[Observed], begin_s: float
) -> dict[str, Any]:
    """Return what happened to the requests of a round."""
    ttfts_s = sorted(
        seen.times_s[0] - begin_s - one.at_s for one, seen in zip(requests, observed, strict=True)
    )
    moves = [move for seen in observed for move in seen.moves]
    return {
        "ttft_mean_s": fmean(ttfts_s),
        "ttft_p99_s": percentile(ttfts_s, 0.99),
        "lost_s": fmean(sum(gap for gap in seen.gaps_s() if gap > GAP_S) for seen in observed),
        "last_s": max(seen.times_s[-1] for seen in observed) - begin_s,
        "moved": sum(move.end is MoveEnd.MOVED for move in moves),
        "moves": len(moves),
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the rounds, and write the JSON after each."""
    parser = bench_parser("full-memory", __doc__)
    parser.add_argument("--requests", type=int, default=100, help="requests of a round")
    parser.add_argument("--rate", type=float, default=6.0, help="requests per second")
    parser.add_argument("--rounds", type=int, default=4)
    parser.add_argument("--kv-bytes", type=int, default=8_000_000, help="of each engine")
    args = parser.parse_args(arguments)
    facts, rounds = provenance(), list[dict[str, dict[str, Any]]]()
    config = structs.replace(CONFIG, kv_bytes=args.kv_bytes)
    for number in range(args.rounds):
        requests = arrivals(args.requests, args.rate, number)
        turn = number % len(POLICIES)
        order = POLICIES[turn:] + POLICIES[:turn]
        found = {policy: asyncio.run(run_arm(policy, requests, config)) for policy in order}
        rounds.append(found)
        for policy, one in found.items():
            print(f"round {number}, {policy}: {one}", flush=True)
        values = {
            policy: {name: [one[policy][name] for one in rounds] for name in COMPARED}
            for policy in POLICIES
        }
        summary = {
            policy: {name: ratio_of(values[policy][name], values["off"][name]) for name in COMPARED}
            for policy in POLICIES[1:]
        }
        write_results(args.json, {**facts, "relative_to_off": summary, "rounds": rounds})


if __name__ == "__main__":
    main()
