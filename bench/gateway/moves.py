"""Measure moves of running streams between two engines.

    draftgate bench moves --json OUT

The engines run in their own processes, as the workers of one gateway. The first part moves one
stream at a time, for several lengths of its context. It compares the pause of the client at the
switch with the median pause, and with the time in which an idle engine computes the context. The
second part compares the steps of both engines during moves with their usual steps. The third part
drains an engine that runs several streams. The last part restarts each of three nodes under load,
with and without moves.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager
from pathlib import Path
from statistics import median
from typing import Any, Final

from msgspec import structs

from bench.gateway.move_effects import measure_effects
from bench.gateway.moved_streams import (
    BEGUN_TOKENS,
    Observed,
    dispatching,
    job_of,
    run_job,
)
from bench.gateway.rolling_restart import measure_restart
from bench.harness.provenance import provenance, require_quiet
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.run import Move
from draftgate.gateway.fleet import Fleet, FleetWorker

CONTEXTS: Final = (256, 1000, 4000, 7600)
ROUNDS: Final = 10
CONFIG: Final = WorkerConfig(
    speculation="off", threads=1, max_model_len=8192, kv_bytes=640 << 20, own_process=True
)


@asynccontextmanager
async def two_engines(config: WorkerConfig) -> AsyncIterator[tuple[Dispatcher, Fleet]]:
    """Run two engines and a dispatcher for them."""
    configs = [structs.replace(config, device_index=index) for index in range(2)]
    async with dispatching(EngineBackend, configs, WaitingRules(admission="none")) as running:
        yield running


async def first_token_s(dispatcher: Dispatcher, job: Job) -> float:
    """Return the time in which an idle engine computes a new prompt."""
    began_s = time.perf_counter()
    async with dispatcher.run(job) as run, aclosing(run.deltas) as deltas:
        await anext(deltas)
        return time.perf_counter() - began_s


async def measure_gaps(
    dispatcher: Dispatcher, fleet: Fleet, tokens: int, rounds: int
) -> dict[str, Any]:
    """Return the extra gaps of moved streams, and the times to compute their contexts."""
    gaps_s, computed_s, moves = list[float](), list[float](), list[Move]()

    def drain(worker: FleetWorker) -> None:
        worker.drained = True

    for turn in range(rounds):
        observed = Observed()
        await run_job(dispatcher, job_of(tokens, 1000 * tokens + turn), observed, drain)
        moves += observed.moves
        if observed.resumes:
            gaps_s.append(observed.extra_gap_s())
        for worker in fleet.workers:
            worker.drained = False
        computed_s.append(
            await first_token_s(dispatcher, job_of(tokens, 1000 * tokens + 500 + turn))
        )
        await idle(fleet)
    gaps_s.sort()
    return {
        "moved": len(gaps_s),
        "ends": sorted({move.end.value for move in moves}),
        "extra_gap_s": [round(gap, 6) for gap in gaps_s],
        "median_extra_gap_s": round(median(gaps_s), 6),
        "p99_extra_gap_s": round(gaps_s[min(len(gaps_s) - 1, int(0.99 * len(gaps_s)))], 6),
        "median_compute_s": round(median(computed_s), 6),
        "compute_over_gap": round(median(computed_s) / max(median(gaps_s), 1e-4), 1),
        "verified_tokens": [move.verified_tokens for move in moves],
    }


async def idle(fleet: Fleet) -> None:
    """Wait until no engine runs a sequence."""
    while any(one.backend.load().running for one in fleet.workers):  # noqa: ASYNC110
        await asyncio.sleep(0.001)


async def measure_drain(
    dispatcher: Dispatcher, fleet: Fleet, streams: int, tokens: int
) -> dict[str, Any]:
    """Drain an engine that runs streams, and return how long it takes."""
    source, sink = fleet.workers
    sink.drained = True
    observed = [Observed() for _ in range(streams)]
    jobs = [job_of(tokens, 77_000_000 + number, 4000) for number in range(streams)]
    tasks = [
        asyncio.create_task(run_job(dispatcher, job, one))
        for job, one in zip(jobs, observed, strict=True)
    ]
    while min(len(one.times_s) for one in observed) < BEGUN_TOKENS:  # noqa: ASYNC110
        await asyncio.sleep(0.01)
    sink.drained, source.drained = False, True
    began_s = time.perf_counter()
    while source.usage.sequences and time.perf_counter() - began_s < 60.0:  # noqa: ASYNC110
        await asyncio.sleep(0.005)
    drained_s = time.perf_counter() - began_s
    await asyncio.sleep(0.5)
    for task in tasks:
        task.cancel()
    ended = await asyncio.gather(*tasks, return_exceptions=True)
    failed = [str(one) for one in ended if not isinstance(one, asyncio.CancelledError)]
    moved = [one for one in observed if one.resumes]
    source.drained = False
    return {
        "streams": streams,
        "tokens": tokens,
        "drained_s": round(drained_s, 3),
        "left": source.usage.sequences,
        "failed": failed,
        "moved": len(moved),
        "most_computed_tokens": max((one.computed_tokens for one in moved), default=0),
        "extra_gap_s": sorted(round(one.extra_gap_s(), 6) for one in moved),
        "ends": sorted(move.end.value for one in observed for move in one.moves),
    }


async def measure(
    contexts: Sequence[int], rounds: int, streams: int, restarted: int
) -> dict[str, Any]:
    """Run all parts, and print their results."""
    found: dict[str, Any] = {"gaps": {}}
    async with two_engines(CONFIG) as (dispatcher, fleet):
        for tokens in contexts:
            result = await measure_gaps(dispatcher, fleet, tokens, rounds)
            found["gaps"][str(tokens)] = result
            gap_ms = 1e3 * result["median_extra_gap_s"]
            ratio = result["compute_over_gap"]
            print(f"{tokens} tokens: extra gap {gap_ms:.1f} ms, {ratio} times below", flush=True)
        if streams:
            found["effects"] = effects = await measure_effects(dispatcher, fleet, 7000, rounds)
            print(
                f"steps: {effects['source_step_ratio']}, {effects['sink_step_ratio']}", flush=True
            )
            found["drain"] = result = await measure_drain(dispatcher, fleet, streams, 4000)
            print(f"drain of {streams} streams: {result['drained_s']} s", flush=True)
    found["restarts"] = []
    for moves in (False, True) if restarted else ():
        result = await measure_restart(4000, restarted, moves=moves)
        found["restarts"].append(result)
        gap_s, computed = result["longest_gap_s"], result["computed_tokens"]
        print(f"restart, moves {moves}: gap {gap_s:.2f} s, {computed} tokens", flush=True)
    return found


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(prog="draftgate bench moves", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--streams", type=int, default=16, help="drained streams, or 0 for none")
    parser.add_argument("--restarted", type=int, default=6, help="streams during restarts, or 0")
    parser.add_argument("--allow-busy", action="store_true")
    args = parser.parse_args(arguments)
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    found = asyncio.run(measure(args.contexts, args.rounds, args.streams, args.restarted))
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**facts, **found}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
