"""Measure how slow readers affect fast readers, and how much memory slow readers take.

    draftgate bench readers --json OUT

A real server process runs the simulator, and a client process uses plain sockets. Every step takes
`--step-ms` for any batch, because the study measures the work of the host, not of a device.

Each round has four phases. First, the fast readers read alone. Second, slow readers arrive evenly
over `--spread-s`. Third, all clients read for `--seconds`. Fourth, the slow readers finish in the
order of their arrival. Slow readers read `--bytes-s` per second through a small window. Every
fourth slow reader reads nothing for 12 s, and then reads the bytes of 12 s together.

Every stream must have the text of the same request without streaming, a single finish reason, and a
single `[DONE]` at its end. The server pauses and resumes a slow stream many times.
"""

from __future__ import annotations

import asyncio
import math
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from pathlib import Path
from statistics import median
from typing import Any, Final

import uvloop

from bench.gateway.readers_clients import (
    PROMPTS,
    Crowd,
    FastStream,
    read_fast,
    slow_prompt,
    text_digest,
)
from bench.harness.processes import on_core, two_cores
from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.harness.servers import (
    Server,
    allow_many_files,
    kernel_tcp_bytes,
    live_samples,
    quantiles,
    run_server,
    shaped_profile,
    watch_server,
)
from draftgate.gateway.cli.environment import collect_environment

PROMPT: Final = "def read_lines(path):\n"
PHASES: Final = ("alone", "coming", "beside", "reading_up")
GOAL: Final = 1.10
"""Maximum ratio of the fast readers' median TPOT with slow readers to their TPOT alone."""

KV_BYTES: Final = 64 << 30
"""KV memory of the simulated device in bytes. The device does not allocate it."""

FILES: Final = 8192
NOW_S: Final = 1.5
"""Maximum age of a sample in seconds. The node takes a sample each second."""


async def _phase(name: str, server: Server, streams: list[FastStream], work: Any) -> dict[str, Any]:
    """Run a phase, and return the server's resource use and the metrics of fast streams.

    Only streams that began and ended within the phase count.
    """
    began_s = time.perf_counter()
    load_before = await _sample(server)
    async with watch_server(server) as resources:
        await work
    ended_s = time.perf_counter()
    whole = [one for one in streams if began_s <= one.began_s and one.ended_s <= ended_s]
    return {
        "phase": name,
        "seconds": ended_s - began_s,
        "streams": len(whole),
        "tpot_s": quantiles([one.tpot_s for one in whole]) if whole else None,
        "ttft_s": quantiles([one.ttft_s for one in whole]) if whole else None,
        "worker_before": load_before,
        "worker_after": await _sample(server),
        **resources.metrics(),
    }


async def _sample(server: Server) -> dict[str, Any]:
    """Return the worker's part of the node's current sample."""
    async with aclosing(live_samples(server)) as samples:
        async for sample in samples:
            if sample["at_s"] > time.time() - NOW_S:
                break
    return {key: sample[key] for key in ("running", "waiting", "queued", "kv_usage")}


@asynccontextmanager
async def _fast(server: Server, args: Namespace, digest: str) -> AsyncIterator[list[FastStream]]:
    """Run the fast readers while the context lasts."""
    found: list[FastStream] = []
    tasks = [
        asyncio.create_task(read_fast(server.port, PROMPT, args.fast_tokens, digest, found))
        for _ in range(args.fast)
    ]
    try:
        yield found
    finally:
        for task in tasks:
            task.cancel()
        for task in tasks:
            with suppress(asyncio.CancelledError):
                await task


async def _round(
    server: Server, args: Namespace, digests: tuple[str, Sequence[str]]
) -> dict[str, Any]:
    fast_digest, slow_digests = digests
    crowd = Crowd(server.port, args.slow, args.bytes_s, args.slow_tokens, args.spread_s)
    rss_bytes = server.rss_bytes
    async with _fast(server, args, fast_digest) as streams:
        await asyncio.sleep(args.fast_tokens * args.step_ms / 1e3)
        work = (
            asyncio.sleep(args.seconds),
            crowd.start_readers(),
            asyncio.sleep(args.seconds),
            crowd.finish(),
        )
        phases = []
        for name, one in zip(PHASES, work, strict=True):
            phases.append(await _phase(name, server, streams, one))
            _show(phases[-1])
    faults = [one.fault for one in streams if one.fault is not None]
    return {
        "rss_bytes_before": rss_bytes,
        "rss_bytes_after": server.rss_bytes,
        "fast_streams": len(streams),
        "fast_faults": sorted(set(faults)),
        "slow_streams": len(crowd.readers),
        "slow_faults": crowd.faults(slow_digests),
        "slow_chunks": sum(one.content.chunks for one in crowd.readers),
        "slow_bytes": sum(one.read_bytes for one in crowd.readers),
        "phases": phases,
    }


async def measure(server: Server, args: Namespace) -> dict[str, Any]:
    """Return the rounds and their summary."""
    digests = (
        await text_digest(server.port, PROMPT, args.fast_tokens),
        await asyncio.gather(
            *(text_digest(server.port, slow_prompt(n), args.slow_tokens) for n in range(PROMPTS))
        ),
    )
    rows = []
    for number in range(args.rounds):
        row = {"round": number, **await _round(server, args, digests)}
        rows.append(row)
        _show_round(row)
    return {"summary": summary(rows), "rounds": rows}


def summary(rows: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """Return memory, and the ratios of the fast readers' TPOT to their TPOT alone.

    Ratios are medians over rounds. Memory is the maximum of all rounds, because a process keeps the
    memory of earlier rounds.
    """
    phases = [{phase["phase"]: phase for phase in row["phases"]} for row in rows]

    def against_alone(name: str, quantile: str) -> float | None:
        both = [
            (one[name]["tpot_s"], one["alone"]["tpot_s"])
            for one in phases
            if one[name]["tpot_s"] and one["alone"]["tpot_s"]
        ]
        return median(a[quantile] / b[quantile] for a, b in both) if both else None

    ratios = {
        name: {quantile: against_alone(name, quantile) for quantile in ("p50", "p99")}
        for name in PHASES[1:]
    }
    beside = ratios["beside"]["p50"]
    return {
        "tpot_against_alone": ratios,
        "goal": GOAL,
        "met": beside is not None and beside <= GOAL,
        "nothing_lost": not any(row["fast_faults"] or row["slow_faults"] for row in rows),
        "rss_bytes_per_slow_reader": max(
            (one["beside"]["rss_bytes"]["max"] - one["alone"]["rss_bytes"]["p50"])
            / row["slow_streams"]
            for one, row in zip(phases, rows, strict=True)
        ),
        "kernel_bytes_per_slow_reader": max(
            (one["beside"]["kernel_tcp_bytes"]["max"] - one["alone"]["kernel_tcp_bytes"]["p50"])
            / row["slow_streams"]
            for one, row in zip(phases, rows, strict=True)
        ),
    }


def _show(phase: dict[str, Any]) -> None:
    tpot = phase["tpot_s"] or {"p50": math.nan, "p99": math.nan}
    print(
        f"{phase['phase']:>10}: TPOT p50 {tpot['p50'] * 1e3:.2f} p99 {tpot['p99'] * 1e3:.2f} ms"
        f" of {phase['streams']} streams; RSS {phase['rss_bytes']['max'] / 1e6:.0f} MB;"
        f" TCP {phase['kernel_tcp_bytes']['max'] / 1e6:.0f} MB; CPU {phase['cpu_share']:.2f};"
        f" /health p99 {phase['health_s']['p99'] * 1e3:.1f} ms; {phase['worker_after']}",
        flush=True,
    )


def _show_round(row: dict[str, Any]) -> None:
    print(
        f"faults: fast {row['fast_faults']} of {row['fast_streams']},"
        f" slow {row['slow_faults']} of {row['slow_streams']};"
        f" RSS afterwards {row['rss_bytes_after'] / 1e6:.0f} MB",
        flush=True,
    )


def _flags(args: Namespace, folder: Path) -> list[str]:
    sequences = args.slow + args.fast
    profile = shaped_profile(folder, step_s=[args.step_ms / 1e3] * 2)
    return [
        *("--profile", str(profile), "--speculation", "off", "--kv-bytes", str(KV_BYTES)),
        *("--max-num-seqs", str(args.seats or sequences), "--max-queued", str(sequences)),
        *("--max-step-tokens", str(4 * sequences), "--queue-timeout-s", "600"),
    ]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench readers`."""
    parser = bench_parser("readers", __doc__)
    parser.add_argument("--slow", type=int, default=2000, help="number of slow readers")
    parser.add_argument("--fast", type=int, default=50, help="number of fast readers")
    parser.add_argument(
        "--bytes-s", type=int, default=300, help="bytes per second that a slow reader reads"
    )
    parser.add_argument(
        "--step-ms", type=float, default=30.0, help="duration of a simulated step, in milliseconds"
    )
    parser.add_argument(
        "--seats",
        type=int,
        default=0,
        help="sequence capacity of the simulated device (default: a sequence per reader)",
    )
    parser.add_argument(
        "--fast-tokens", type=int, default=150, help="length of a fast stream, in tokens"
    )
    parser.add_argument(
        "--slow-tokens", type=int, default=800, help="length of a slow stream, in tokens"
    )
    parser.add_argument(
        "--spread-s", type=float, default=60.0, help="seconds over which slow readers arrive"
    )
    parser.add_argument(
        "--seconds", type=float, default=30.0, help="seconds of the phases `alone` and `beside`"
    )
    parser.add_argument("--rounds", type=int, default=3)
    args = parser.parse_args(arguments)
    allow_many_files(FILES)
    server_core, client_core = two_cores()
    results: dict[str, Any] = {
        "format": "readers/1",
        **simulated_provenance("readers", arguments),
        "device": collect_environment()["cpu"],
        "load_before": os.getloadavg()[0],
        "kernel_tcp_bytes_before": kernel_tcp_bytes(),
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        run_server(_flags(args, Path(scratch)), Path(scratch), server_core) as server,
        on_core(client_core),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        results |= runner.run(measure(server, args))
    print(results["summary"])
    write_results(args, results, "Slow readers", ())


if __name__ == "__main__":
    main()
