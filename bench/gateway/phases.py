"""Compare phases policies on two real workers, and with the simulator.

    draftgate bench phases --json OUT

Chats arrive beside bursts of long prompts. At each point of a grid of rates and bursts, all
policies get the same requests, in turn. `together` has two workers of the role `any`, and the other
policies have a worker for prompts and a worker for outputs. The requests do not use HTTP.

Each policy has two engines in their own processes, with one torch thread each, on a core each. The
gateway and the generator are this process, which is not pinned and shares the cores with the
engines. Only one policy has requests at a time, and idle engines take no CPU time.

The simulator gets the same requests. Its costs are measured in the same run (`phase_costs`), and
its step times are those that a worker of `together` has learned during the points. A point counts
for a metric if the best two policies on the real workers differ by more than 10% in the mean of all
rounds. `auto` has no place where it has moved no request, because it then decides as `together`.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from argparse import Namespace
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from contextlib import AsyncExitStack
from dataclasses import asdict, dataclass
from dataclasses import replace as changed
from itertools import combinations, pairwise, product, takewhile
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final
from unittest.mock import patch

from bench.gateway.moved_streams import job_of
from bench.gateway.phase_costs import CONFIG, learned_cost, measure_costs, running_workers
from bench.harness.provenance import bench_parser, provenance, require_quiet, write_results
from draftgate.backends.sim.kv_link import KvLink
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.lab.sim.environment import SimEnvironment
from draftgate.lab.simulate.cluster import (
    ADMIT_ALL,
    SimulatedCluster,
    send_jobs,
    simulate_requests,
)
from draftgate.lab.simulate.experiment import MoveCounts
from draftgate.loadgen.measuring.metrics import distribution, errors, intact, ttft_s
from draftgate.loadgen.planning.arrivals import gamma
from draftgate.loadgen.types import PlannedRequest, Record, RequestSpec
from draftgate.policies.types import Role

ROLES: Final = {
    "together": (Role.ANY, Role.ANY),
    "apart": (Role.PREFILL, Role.DECODE),
    "auto": (Role.PREFILL, Role.DECODE),
}
CHAT: Final = "chat"
LONG: Final = "long_document"
CHAT_TOKENS: Final = 100
OUTPUT_TOKENS: Final = {CHAT: (100, 200), LONG: (32, 32)}
"""Least and most output tokens of a class."""

RATES_RPS: Final = (1.0, 2.5, 4.5)
BURSTS: Final = ((1000, 2), (2000, 2), (4000, 1), (4000, 2))
"""Tokens and number of the prompts of a burst."""

EVERY_S: Final = 4.0
"""Interval of the bursts. The first arrives after half of it."""

SECONDS: Final = 8.0
"""Seconds of arrivals of a point in a round."""

ROUNDS: Final = 2
"""Rounds of all points, each with its own requests. Machines in a cloud change their speed within
minutes, so a round compares the policies of a point within a minute."""

MOST_REQUESTS: Final = 100_000
"""More requests than a point has, so that all seeds differ."""

COMPARED: Final = (("chat_gap_s", "p99"), ("chat_ttft_s", "mean"), ("long_ttft_s", "mean"))
"""Metrics by which policies are compared. A point has too few requests for a P99 of their TTFT."""

TIE: Final = 0.01
"""Relative difference of two policies below which the simulator cannot tell which is better."""

SIDES: Final = ("real", "simulated")
LEAST_LEAD: Final = 0.1
"""Relative difference of the best two policies at which a point has a winner."""


@dataclass(frozen=True, slots=True)
class Point:
    """A load: Poisson arrivals of chats, and bursts of long prompts at fixed intervals.

    Attributes:
        chats_rps: mean rate of chats.
        prompt_tokens: length of the long prompts.
        burst: number of long prompts that arrive at once.
    """

    chats_rps: float
    prompt_tokens: int
    burst: int

    def plan(self, seconds: float, number: int, seed: int = 0) -> list[PlannedRequest]:
        """Return the requests of a time interval, in order of arrival.

        Args:
            number: number of the plan. The prompts of all plans differ.
        """
        first_seed = (1000 * seed + number) * MOST_REQUESTS
        chats_s = gamma(self.chats_rps, first_seed)
        arrivals = [(at_s, CHAT) for at_s in takewhile(lambda at_s: at_s < seconds, chats_s)]
        burst_s = EVERY_S / 2
        while burst_s < seconds:
            arrivals += [(burst_s, LONG)] * self.burst
            burst_s += EVERY_S
        draw = Random(first_seed)
        return [
            PlannedRequest(
                index,
                at_s,
                RequestSpec("", (), draw.randint(*OUTPUT_TOKENS[name]), first_seed + index, name),
            )
            for index, (at_s, name) in enumerate(sorted(arrivals))
        ]

    def job(self, planned: PlannedRequest) -> Job:
        """Return the job of a request, with a random prompt."""
        request = planned.request
        tokens = CHAT_TOKENS if request.class_name == CHAT else self.prompt_tokens
        return job_of(tokens, request.seed, request.max_tokens)


@dataclass(frozen=True, slots=True)
class Settings:
    """The settings of a run: seconds of arrivals of each point, rounds of points, and the seed."""

    seconds: float = SECONDS
    rounds: int = ROUNDS
    seed: int = 0


WARM: Final = Point(1.0, 4000, 4)
"""Requests before the first point, which use most of the KV memory for the first time."""


def metrics_of(records: Sequence[Record]) -> dict[str, Any]:
    """Return the metrics of a run, in seconds. A metric without values is None.

    `chat_gap_s` has the gaps between the tokens of chats from the arrival of a long prompt to the
    end of its response.
    """
    chats, long_ones = (
        [one for one in intact(records) if one.planned.request.class_name == name]
        for name in (CHAT, LONG)
    )
    bursts_s = [(one.scheduled_s, one.end_s) for one in long_ones]
    values = {
        "chat_gap_s": [gap_s for one in chats for gap_s in _gaps_within(one, bursts_s)],
        "chat_ttft_s": list(filter(None, map(ttft_s, chats))),
        "long_ttft_s": list(filter(None, map(ttft_s, long_ones))),
    }
    found = {name: distribution(each) for name, each in values.items()}
    return {
        "chats": len(chats),
        "long_prompts": len(long_ones),
        "failed_share": sum(errors(records).values()) / len(records),
        **{name: None if each is None else each.as_dict() for name, each in found.items()},
    }


def _gaps_within(record: Record, intervals_s: Sequence[tuple[float, float]]) -> Iterator[float]:
    """Yield the gaps between the chunks of a record that overlap one of the time intervals."""
    for before_s, after_s in pairwise(chunk.at_s for chunk in record.chunks):
        if any(before_s < end_s and begin_s < after_s for begin_s, end_s in intervals_s):
            yield after_s - before_s


def compared(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Return by metric how often the simulator agrees with the workers.

    The winner of a point is the policy with the least mean over all rounds. Points whose best two
    policies differ by less than `LEAST_LEAD` on the workers have no winner. A winner is consistent
    if it is the best policy in each round, and decided if the best two policies in the simulator
    differ by more than `TIE`. `pairs` counts all pairs of policies that differ by more at a point,
    and `agreed_pairs` those in the same order in the simulator.

    Args:
        rows: rows with the number of their `point`, their `policy`, and their metrics `real` and
            `simulated`.
    """
    found = {}
    for metric, value in COMPARED:
        won, pairs = list[dict[str, Any]](), list[bool]()
        for point in dict.fromkeys(row["point"] for row in rows):
            here = [row for row in rows if row["point"] == point]
            real, simulated = (_by_policy(here, side, metric, value) for side in SIDES)
            if len(real) < 2:
                continue
            means = {policy: fmean(values) for policy, values in real.items()}
            ranking = sorted(means, key=means.__getitem__)
            guess = {policy: fmean(simulated[policy]) for policy in ranking}
            pairs += [
                guess[better] < guess[worse]
                for better, worse in combinations(ranking, 2)
                if means[worse] / means[better] - 1 > LEAST_LEAD
            ]
            lead = means[ranking[1]] / means[ranking[0]] - 1
            if lead > LEAST_LEAD:
                best, second = sorted(guess, key=guess.__getitem__)[:2]
                rounds = zip(*(real[policy] for policy in ranking), strict=False)
                is_consistent = all(first == min(first, *others) for first, *others in rounds)
                won.append(
                    {
                        "point": point,
                        "real": ranking[0],
                        "simulated": best,
                        "lead": lead,
                        "consistent": is_consistent,
                        "decided": guess[second] / guess[best] - 1 > TIE,
                    }
                )
        found[f"{metric}.{value}"] = {
            **_counts("points", won),
            **_counts("consistent", [one for one in won if one["consistent"]]),
            **_counts("decided", [one for one in won if one["decided"]]),
            "pairs": len(pairs),
            "agreed_pairs": sum(pairs),
            "winners": won,
        }
    return found


def _counts(name: str, won: Sequence[Mapping[str, Any]]) -> dict[str, int]:
    agreed = sum(one["real"] == one["simulated"] for one in won)
    return {name: len(won), f"agreed_{name}": agreed}


def _by_policy(
    rows: Sequence[Mapping[str, Any]], side: str, metric: str, value: str
) -> dict[str, list[float]]:
    """Return the values of a metric by policy, one for each round that has a value."""
    found: dict[str, list[float]] = {}
    moved = any(row["real"].get("moves") for row in rows if row["policy"] == "auto")
    for row in rows:
        if row[side][metric] is not None and (moved or row["policy"] != "auto"):
            found.setdefault(row["policy"], []).append(row[side][metric][value])
    return found


def cluster_of(
    policy: str, profile: str = CONFIG.profile, link: KvLink | None = None
) -> SimulatedCluster:
    """Return the workers of a policy, which are also the settings of the real workers."""
    cluster = SimulatedCluster(
        CONFIG,
        len(ROLES[policy]),
        SimEnvironment(belief_error=0.0, roofline=False, delivers_tokens=True),
        changed(ADMIT_ALL, phases=policy),
        (profile,),
        ROLES[policy],
    )
    return cluster if link is None else changed(cluster, link=link)


async def measure_real(
    dispatcher: Dispatcher, point: Point, planned: Sequence[PlannedRequest]
) -> dict[str, Any]:
    """Send requests to real workers, and return their metrics."""
    jobs = {one.index: point.job(one) for one in planned}  # made beforehand, off the clock
    moves = MoveCounts()
    records = await send_jobs(dispatcher, planned, lambda one: jobs[one.index], watch=moves)
    return {**metrics_of(records), "moves": moves.ends}


def measure_simulated(
    policy: str, point: Point, planned: Sequence[PlannedRequest], profile: str, link: KvLink
) -> dict[str, Any]:
    """Simulate requests, and return their metrics."""
    moves, cluster = MoveCounts(), cluster_of(policy, profile, link)
    records = simulate_requests(cluster, planned, to_job=point.job, watch=moves)
    return {**metrics_of(records), "moves": moves.ends}


async def measure(
    points: Sequence[Point], settings: Settings, warm: Point = WARM
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the rows of each point in each round on real workers, one for each policy.

    The first policy of a point changes in turn. The workers of `together` end last, so the cache of
    start-up measurements then has what one of them has learned.

    Args:
        warm: requests before the first point.
    """
    policies = tuple(ROLES)
    async with AsyncExitStack() as stack:
        pools = {}
        for policy in policies:
            cluster = cluster_of(policy)
            running = running_workers(cluster.configs, cluster.rules)
            pools[policy] = await stack.enter_async_context(running)
            await measure_real(pools[policy], warm, warm.plan(EVERY_S, 0, settings.seed))
        for plan, point in enumerate([*points] * settings.rounds, 1):
            planned = point.plan(settings.seconds, plan, settings.seed)
            first = plan % len(policies)
            turns = (*policies[first:], *policies[:first])
            real = {each: await measure_real(pools[each], point, planned) for each in turns}
            shape = {"plan": plan, "point": points.index(point) + 1, **asdict(point)}
            yield [{**shape, "policy": each, "real": real[each]} for each in policies]


def add_simulated(results: dict[str, Any]) -> None:
    """Simulate all points of a run, and compare the policies."""
    settings = Settings(**results["settings"])
    with tempfile.TemporaryDirectory() as folder:
        profile = Path(folder) / "worker.json"
        profile.write_text(json.dumps(results["profile"]), encoding="utf-8")
        for row in results["rows"]:
            point = Point(row["chats_rps"], row["prompt_tokens"], row["burst"])
            planned = point.plan(settings.seconds, row["plan"], settings.seed)
            link = KvLink(**results["link"])
            row["simulated"] = measure_simulated(row["policy"], point, planned, str(profile), link)
            print(_line(row), flush=True)
    results["compared"] = compared(results["rows"])


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the points, simulate them, and write the JSON after each part."""
    parser = bench_parser("phases", __doc__)
    parser.add_argument("--rates", nargs="+", type=float, default=RATES_RPS, help="chats/s")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="arrivals of a point")
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--again", type=Path, help="simulate the points of this JSON file again")
    parser.add_argument("--allow-busy", action="store_true", help="measure on a busy machine")
    args = parser.parse_args(arguments)
    if args.again is None:
        results = _measured(args)
    else:
        results = json.loads(args.again.read_text(encoding="utf-8"))
    add_simulated(results)
    write_results(args.json, results)
    for name, one in results["compared"].items():
        counts = {key: value for key, value in one.items() if key != "winners"}
        print(f"{name}: {json.dumps(counts)}")


def _measured(args: Namespace) -> dict[str, Any]:
    """Return the costs and the real rows of a run."""
    facts, settings = provenance(), Settings(args.seconds, args.rounds, args.seed)
    require_quiet(facts, allow_busy=args.allow_busy)
    results: dict[str, Any] = {**facts, "settings": asdict(settings), "rows": []}
    points = [Point(rate, *burst) for rate, burst in product(args.rates, BURSTS)]

    async def run() -> None:
        costs = await measure_costs()
        async for rows in measure(points, settings):
            results["rows"] += rows
            print(f"plan {rows[0]['plan']} of {len(points) * settings.rounds}", flush=True)
        results.update(costs.results(learned_cost()))
        write_results(args.json, results)

    # A fresh cache, because measurements of an earlier start may come from a busy machine.
    with (
        tempfile.TemporaryDirectory() as scratch,
        patch.dict(os.environ, XDG_CACHE_HOME=scratch),
    ):
        asyncio.run(run())
    print("measured", flush=True)
    return results


def _line(row: Mapping[str, Any]) -> str:
    pairs = [
        " / ".join(
            "-" if row[side][metric] is None else f"{1e3 * row[side][metric][value]:.1f}"
            for side in SIDES
        )
        for metric, value in COMPARED
    ]
    load = f"{row['chats_rps']:g} chats/s, {row['burst']} x {row['prompt_tokens']}"
    return f"{load}, {row['policy']}: {', '.join(pairs)} ms"


if __name__ == "__main__":
    main()
