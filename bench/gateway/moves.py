"""Measure moves of running streams between two engines.

    draftgate bench moves --json OUT

The engines run in their own processes, as the workers of one gateway. The parts are:

- `gaps`: one stream at a time moves, for several lengths of its context. The pause of the client at
  the switch is compared with the median pause, and with the time in which an idle engine computes
  the context.
- `effects`: the steps of both engines during moves are compared with their usual steps, for a
  source that leaves and for a source that keeps running.
- `drain`: an engine that runs several streams is drained.

Each part has a time limit. A part that fails or takes longer has an `error` in the JSON, and the
others run all the same. The JSON is written after each part.
"""

from __future__ import annotations

import argparse
import asyncio
import faulthandler
from collections.abc import AsyncIterator, Callable, Coroutine, Iterator, Sequence
from contextlib import aclosing, asynccontextmanager
from functools import partial
from statistics import median
from typing import Any, Final

from msgspec import structs

from bench.gateway.move_effects import MovesOnRequest, measure_effects
from bench.gateway.moved_streams import (
    BEGUN_TOKENS,
    Observed,
    dispatching,
    job_of,
    run_job,
    until,
)
from bench.harness.provenance import bench_parser, provenance, require_quiet, write_results
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.assembly import WaitingRules, loop_time_s
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.job import Job
from draftgate.gateway.dispatch.run import Move
from draftgate.gateway.fleet import Fleet, FleetWorker

PARTS: Final = ("gaps", "effects", "drain")
CONTEXTS: Final = (256, 1000, 4000, 8000)
ROUNDS: Final = 10
MOST_COMPUTED: Final = 3
"""Rounds in which the context is computed. Their times differ little."""

MOST_DRAINS: Final = 3
OUTPUT_TOKENS: Final = 500
"""Longest output of a moved stream, as far as it fits into a worker. A stream that ends before it
has moved counts as not moved."""

SETTLED_TOKENS: Final = 20
"""Output tokens after the switch."""

PART_S: Final = {"gaps": 360.0, "effects": 240.0, "drain": 240.0}
"""Time limits in seconds, twice to three times the time on two idle cores with AVX2."""

CANCEL_S: Final = 60.0
"""Time limit in seconds to end a part that has exceeded its limit."""

DRAIN_S: Final = 60.0
MODEL_LEN: Final = 8192
CONFIG: Final = WorkerConfig(
    speculation="off", threads=1, max_model_len=MODEL_LEN, kv_bytes=640 << 20, own_process=True
)


@asynccontextmanager
async def two_engines(
    policy: MovesOnRequest | None = None,
) -> AsyncIterator[tuple[Dispatcher, Fleet]]:
    """Run two engines and a dispatcher for them."""
    configs = [structs.replace(CONFIG, device_index=index) for index in range(2)]
    rules = WaitingRules(admission="none")
    async with dispatching(EngineBackend, configs, rules, policy) as dispatcher:
        yield dispatcher, dispatcher.fleet


async def first_token_s(dispatcher: Dispatcher, job: Job) -> float:
    """Return the time in which an idle engine computes a new prompt."""
    began_s = loop_time_s()
    async with dispatcher.run(job) as run, aclosing(run.deltas) as deltas:
        await anext(deltas)
        return loop_time_s() - began_s


async def measure_gaps(
    dispatcher: Dispatcher, fleet: Fleet, tokens: int, rounds: int, model_len: int = MODEL_LEN
) -> dict[str, Any]:
    """Return the extra gaps of moved streams, and the times to compute their contexts.

    Args:
        tokens: context of the streams.
        model_len: longest context of a worker in tokens.
    """
    gaps_s, computed_s, moves = list[float](), list[float](), list[Move]()

    def drain(worker: FleetWorker) -> None:
        worker.drained = True

    output_tokens = min(OUTPUT_TOKENS, model_len - tokens)
    for turn in range(rounds):
        observed, job = Observed(), job_of(tokens, 1000 * tokens + turn, output_tokens)
        await run_job(dispatcher, job, observed, drain, SETTLED_TOKENS)
        moves += observed.moves
        if observed.resumes:
            gaps_s.append(observed.extra_gap_s())
        for worker in fleet.workers:
            worker.drained = False
        if turn < MOST_COMPUTED:
            new = job_of(tokens, 1000 * tokens + 500 + turn, output_tokens)
            computed_s.append(await first_token_s(dispatcher, new))
        await until(partial(_is_idle, fleet))
    gaps_s.sort()
    at_switch_s = [move.gap_s for move in moves if move.gap_s is not None]
    ends = sorted({move.end.value for move in moves})
    if not gaps_s:
        return {"moved": 0, "ends": ends}
    return {
        "moved": len(gaps_s),
        "ends": ends,
        "extra_gap_s": [round(gap, 6) for gap in gaps_s],
        "median_extra_gap_s": round(median(gaps_s), 6),
        "p99_extra_gap_s": round(gaps_s[min(len(gaps_s) - 1, int(0.99 * len(gaps_s)))], 6),
        "median_gap_s": round(median(at_switch_s), 6),
        "median_compute_s": round(median(computed_s), 6),
        "compute_over_gap": round(median(computed_s) / max(median(gaps_s), 1e-4), 1),
        "verified_tokens": [move.verified_tokens for move in moves],
    }


def _is_idle(fleet: Fleet) -> bool:
    """Return whether no engine runs a sequence."""
    return not any(one.backend.load().running for one in fleet.workers)


async def measure_drain(
    dispatcher: Dispatcher, fleet: Fleet, streams: int, tokens: int, number: int
) -> dict[str, Any]:
    """Drain an engine that runs streams, and return how long it takes.

    Args:
        number: number of the drain, each of which has other prompts.
    """
    source, sink = fleet.workers
    sink.drained = True
    observed = [Observed() for _ in range(streams)]
    first = 77_000_000 + 1000 * number
    jobs = [job_of(tokens, first + index, 4000) for index in range(streams)]
    tasks = [
        asyncio.create_task(run_job(dispatcher, job, one))
        for job, one in zip(jobs, observed, strict=True)
    ]
    try:
        await until(lambda: min(len(one.times_s) for one in observed) >= BEGUN_TOKENS, tasks)
        sink.drained, source.drained = False, True
        began_s = loop_time_s()
        while source.usage.sequences and loop_time_s() - began_s < DRAIN_S:  # noqa: ASYNC110
            await asyncio.sleep(0.005)
        drained_s, left = loop_time_s() - began_s, source.usage.sequences
        await asyncio.sleep(0.5)
    finally:
        for task in tasks:
            task.cancel()
        ended = await asyncio.gather(*tasks, return_exceptions=True)
        source.drained = sink.drained = False
    failed = [str(one) for one in ended if not isinstance(one, asyncio.CancelledError)]
    moved = [one for one in observed if one.resumes]
    await until(partial(_is_idle, fleet))
    return {
        "streams": streams,
        "tokens": tokens,
        "drained_s": round(drained_s, 3),
        "left": left,
        "failed": failed,
        "moved": len(moved),
        "most_computed_tokens": max((one.computed_tokens for one in moved), default=0),
        "extra_gap_s": sorted(round(one.extra_gap_s(), 6) for one in moved),
        "longest_pause_s": max(max(one.gaps_s(began_s)) for one in moved),
        "ends": sorted(move.end.value for one in observed for move in one.moves),
    }


async def run_gaps(contexts: Sequence[int], rounds: int) -> dict[str, Any]:
    """Run the part `gaps`."""
    found = {}
    async with two_engines() as (dispatcher, fleet):
        for tokens in contexts:
            result = await measure_gaps(dispatcher, fleet, tokens, rounds)
            found[str(tokens)] = result
            if not result["moved"]:
                print(f"{tokens} tokens: no stream moved before it ended", flush=True)
                continue
            median_ms, p99_ms = (1e3 * result[f"{name}_extra_gap_s"] for name in ("median", "p99"))
            print(
                f"{tokens} tokens: extra gap {median_ms:.1f} ms (P99 {p99_ms:.1f} ms), "
                f"{result['compute_over_gap']} times below recomputation",
                flush=True,
            )
    return found


async def run_effects(tokens: int, rounds: int) -> dict[str, Any]:
    """Run the part `effects`."""
    policy, found = MovesOnRequest(), {}
    async with two_engines(policy) as (dispatcher, fleet):
        for name, moves in (("drain", None), ("balance", policy)):
            found[name] = result = await measure_effects(dispatcher, fleet, tokens, rounds, moves)
            ratios = f"{result['source_step_ratio']}, {result['sink_step_ratio']}"
            print(f"{name}: steps of source and destination take {ratios} times", flush=True)
    return found


async def run_drains(streams: int, tokens: int, rounds: int) -> list[dict[str, Any]]:
    """Run the part `drain`."""
    found = []
    async with two_engines() as (dispatcher, fleet):
        for number in range(rounds):
            result = await measure_drain(dispatcher, fleet, streams, tokens, number)
            found.append(result)
            pause_s = result["longest_pause_s"]
            print(
                f"drain of {streams} streams: {result['drained_s']} s, pause {pause_s:.2f} s",
                flush=True,
            )
    return found


async def bounded(name: str, part: Coroutine[None, None, Any]) -> Any:
    """Return the result of a part, or its error. The part ends after `PART_S`."""
    try:
        async with asyncio.timeout(PART_S[name]):
            return await part
    except Exception as error:  # noqa: BLE001 - the other parts run whatever happens
        text = f"{type(error).__name__}: {error}"
        print(f"{name}: {text}", flush=True)
        return {"error": text}


def measure(args: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Run the parts that `args` request, print their results, and yield them after each part."""
    parts: dict[str, Callable[[], Coroutine[None, None, Any]]] = {
        "gaps": partial(run_gaps, args.contexts, args.rounds),
        "effects": partial(run_effects, args.effect_tokens, args.rounds),
        "drain": partial(run_drains, args.streams, args.tokens, min(args.rounds, MOST_DRAINS)),
    }
    found = {}
    for name in args.parts:
        # A part that cannot even be cancelled ends this process, and with it the engines.
        faulthandler.dump_traceback_later(PART_S[name] + CANCEL_S, exit=True)
        found[name] = asyncio.run(bounded(name, parts[name]()))
        yield found
    faulthandler.cancel_dump_traceback_later()


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    """Return the parsed arguments."""
    parser = bench_parser("moves", __doc__)
    parser.add_argument("--parts", nargs="+", choices=PARTS, default=PARTS)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--effect-tokens", type=int, default=7000, help="context in `effects`")
    parser.add_argument("--tokens", type=int, default=4000, help="context in `drain`")
    parser.add_argument("--streams", type=int, default=16, help="drained streams")
    parser.add_argument("--allow-busy", action="store_true")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    """Measure and write the JSON."""
    args = parse(arguments)
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    for found in measure(args):
        write_results(args.json, {**facts, **found})


if __name__ == "__main__":
    main()
