"""Compare phases policies on two real workers, and with the simulator.

    draftgate bench phases --json OUT

Chats arrive beside bursts of prompts of 4,000 tokens. At each point of a grid of rates and bursts,
all policies get the same requests, in turn. `together` has two workers of the role `any`, and the
other policies have a worker for prompts and a worker for outputs. The requests do not use HTTP.

Each policy has two engines in their own processes, with one torch thread each, on a core each. The
gateway and the generator are this process, which is not pinned and shares the cores with the
engines. Only one policy has requests at a time, and idle engines take no CPU time.

The simulator gets the same requests. Its two profiles are measured beforehand, at the same time and
on the same cores. Policies differ at a point if the best two on the real workers differ by more
than 5%.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import asdict, dataclass, replace
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any, Final
from unittest.mock import patch

import uvloop

from bench.gateway.moved_streams import job_of
from bench.gateway.phase_points import COMPARED, PROMPT_TOKENS, Point, compared, metrics_of
from bench.harness.processes import cpu_s, pin, process_tree, two_cores
from bench.harness.profiles import measure_profiles
from bench.harness.provenance import bench_parser, provenance, require_quiet, write_results
from bench.harness.servers import fresh_cache
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.sim.assembly import SimEnvironment
from draftgate.backends.sim.kv_link import KvLink
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.cli.simulate.cluster import (
    ADMIT_ALL,
    SimulatedCluster,
    running_dispatcher,
    send,
    simulate,
)
from draftgate.gateway.cli.simulate.move_counts import MoveCounts
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.types import PlannedRequest
from draftgate.policies.types import Role

ROLES: Final = {
    "together": (Role.ANY, Role.ANY),
    "apart": (Role.PREFILL, Role.DECODE),
    "auto": (Role.PREFILL, Role.DECODE),
}
RATES_RPS: Final = (0.75, 1.5, 2.25, 3.0)
BURSTS: Final = (1, 2, 3)
EVERY_S: Final = 8.0
"""Interval of the bursts. An idle worker computes a long prompt in two seconds (AMD EPYC with AVX2,
2026-11-24)."""

SECONDS: Final = 24.0
"""Seconds of arrivals of a point: three bursts."""

WARM: Final = Point(1.0, 6, 4.0)
WARM_S: Final = 4.0
"""Requests before the first point, which use most of the KV memory for the first time."""

CONFIG: Final = WorkerConfig(
    speculation="off", threads=1, max_model_len=8192, kv_bytes=192 << 20, own_process=True
)
LINK: Final = KvLink(0.35e9, 1e-3)
"""Bandwidth between engines in processes of their own: 0.24 to 0.46 GB/s by `draftgate bench kv`
(AMD EPYC with AVX2, 2026-11-23)."""


def cluster_of(policy: str, profiles: tuple[str, ...] = ()) -> SimulatedCluster:
    """Return the workers of a policy, which are also the settings of the real workers."""
    return SimulatedCluster(
        CONFIG,
        len(ROLES[policy]),
        SimEnvironment(belief_error=0.0, roofline=False, delivers_tokens=True),
        replace(ADMIT_ALL, phases=policy),
        profiles,
        ROLES[policy],
        LINK,
    )


def to_job(planned: PlannedRequest) -> Job:
    """Return the job of a request, with a random prompt."""
    request = planned.request
    return job_of(PROMPT_TOKENS[request.class_name], request.seed, request.max_tokens)


@dataclass(frozen=True, slots=True)
class Pool:
    """The two real workers of a policy."""

    dispatcher: Dispatcher
    pids: tuple[int, ...]

    async def measure(self, planned: Sequence[PlannedRequest]) -> dict[str, Any]:
        """Send requests, and return their metrics and the load of the workers."""
        jobs = {one.index: to_job(one) for one in planned}  # made beforehand, off the clock
        moves, began_s, used_s = MoveCounts(), loop_time_s(), self._cpu_s()
        records = await send(self.dispatcher, planned, lambda one: jobs[one.index], watch=moves)
        share = (self._cpu_s() - used_s) / (loop_time_s() - began_s) / len(self.pids)
        return {**metrics_of(records), "moves": moves.ends, "busy_share": share}

    def _cpu_s(self) -> float:
        return sum(map(cpu_s, self.pids))


@asynccontextmanager
async def running_pool(policy: str) -> AsyncIterator[Pool]:
    """Run the workers of a policy, each on its own core."""
    cluster, before = cluster_of(policy), set(process_tree(os.getpid()))
    async with running_dispatcher(EngineBackend, cluster.configs, cluster.rules) as dispatcher:
        pids = tuple(sorted(set(process_tree(os.getpid())) - before))
        for pid, core in zip(pids, two_cores(), strict=True):
            if core is not None:
                pin(pid, core)
        yield Pool(dispatcher, pids)


def measure_simulated(
    policy: str, planned: Sequence[PlannedRequest], profiles: tuple[str, ...]
) -> dict[str, Any]:
    """Simulate requests, and return their metrics."""
    moves = MoveCounts()
    records = simulate(cluster_of(policy, profiles), planned, to_job=to_job, watch=moves)
    return {**metrics_of(records), "moves": moves.ends}


async def measure(
    points: Iterable[Point],
    seconds: float,
    profiles: tuple[str, ...],
    seed: int = 0,
    warm: Point = WARM,
) -> AsyncIterator[list[dict[str, Any]]]:
    """Yield the rows of each point, one for each policy. The first policy changes in turn.

    Args:
        seconds: seconds of arrivals of a point.
        profiles: profiles of the simulated workers.
        warm: requests before the first point.
    """
    policies = tuple(ROLES)
    async with AsyncExitStack() as stack:
        pools = {each: await stack.enter_async_context(running_pool(each)) for each in policies}
        for pool in pools.values():
            await pool.measure(warm.plan(WARM_S, 0, seed))
        for number, point in enumerate(points, 1):
            planned, first = point.plan(seconds, number, seed), number % len(policies)
            turns = (*policies[first:], *policies[:first])
            real = {each: await pools[each].measure(planned) for each in turns}
            # A simulation runs its own event loop, so it needs a thread.
            simulate_one = partial(measure_simulated, planned=planned, profiles=profiles)
            yield [
                {
                    "point": number,
                    **asdict(point),
                    "policy": each,
                    "real": real[each],
                    "simulated": await asyncio.to_thread(simulate_one, each),
                }
                for each in policies
            ]


async def run(args: Namespace, results: dict[str, Any], folder: Path) -> None:
    """Measure all points, and write the results after each of them."""
    paths = [folder / str(number) / "worker.json" for number in range(2)]  # one name, one KV format
    for path in paths:
        path.parent.mkdir()
    measure_profiles(dict(zip(paths, two_cores(), strict=True)))
    profiles = tuple(map(str, paths))
    results["profiles"] = [json.loads(path.read_text(encoding="utf-8")) for path in paths]
    points = [Point(*one, EVERY_S) for one in product(args.rates, args.bursts)]
    rows = results["rows"]
    async for added in measure(points, args.seconds, profiles, args.seed):
        rows += added
        for row in added:
            print(*_cells(row), flush=True)
        results["compared"] = compared(rows)
        tables = [html_table(HEAD, map(_cells, rows)), html_table(WON, _agreement(results))]
        write_results(args, results, "Phases policies on two workers", tables)
    for line in _agreement(results):
        print(*line)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench phases`."""
    args = _parser().parse_args(arguments)
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    settings = {"seconds": args.seconds, "link": LINK._asdict(), "seed": args.seed}
    results: dict[str, Any] = {"format": "phases/1", **facts, "settings": settings, "rows": []}
    with (
        tempfile.TemporaryDirectory() as scratch,
        patch.dict(os.environ, fresh_cache(Path(scratch))),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        runner.run(run(args, results, Path(scratch)))


HEAD: Final = (
    *("chats/s", "burst", "policy", "load", "failed", "gaps P50, ms", "gaps P99, ms"),
    *("simulated", "TTFT of chats, ms", "simulated", "TTFT of long prompts, ms", "simulated"),
)
WON: Final = ("metric", "points that differ", "simulator agrees", "pairs that differ", "agrees")


def _cells(row: dict[str, Any]) -> list[str]:
    real, simulated = row["real"], row["simulated"]
    compared_ms = [
        f"{1e3 * side[metric][value]:.1f}"
        for metric, value in COMPARED
        for side in (real, simulated)
    ]
    return [
        f"{row['chats_rps']:g}",
        str(row["burst"]),
        row["policy"],
        f"{real['busy_share']:.0%}",
        f"{real['failed_share']:.0%}",
        f"{1e3 * real['chat_gap_s']['p50']:.1f}",
        *compared_ms,
    ]


def _agreement(results: dict[str, Any]) -> list[list[str]]:
    return [
        [name, *(str(found[count]) for count in ("points", "agreed", "pairs", "agreed_pairs"))]
        for name, found in results["compared"].items()
    ]


def _parser() -> ArgumentParser:
    parser = bench_parser("phases", __doc__, device=False)
    parser.add_argument("--policies", nargs="+", choices=list(ROLES), default=list(ROLES))
    parser.add_argument(
        "--rates", nargs="+", type=float, default=RATES_RPS, help="chats per second"
    )
    parser.add_argument("--bursts", nargs="+", type=int, default=BURSTS, help="prompts of a burst")
    parser.add_argument("--seconds", type=float, default=SECONDS, help="arrivals of a point")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allow-busy", action="store_true", help="measure on a busy machine")
    return parser


if __name__ == "__main__":
    main()
