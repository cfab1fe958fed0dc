"""Find the capacity of batching policies on a real server while long prompts arrive.

    draftgate bench batching --json OUT

A prompt of 8,000 tokens arrives at fixed intervals. Beside it, `draftgate load search` finds the
highest rate of chats of which 95% meet their SLO. The SLO limits each gap between tokens (the TBT
of Sarathi-Serve, arXiv 2403.02310) and the time to the first token.

Each policy has a server with one torch thread. All servers run on one core, and the generator runs
on a second core. Only one server is under load at a time, and idle servers take no CPU time.
"""

from __future__ import annotations

import asyncio
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import ExitStack, asynccontextmanager
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

import uvloop

from bench.harness.processes import on_core, two_cores
from bench.harness.provenance import bench_parser, provenance, require_quiet, write_results
from bench.harness.servers import fresh_cache, run_server
from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import ttft_s
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.report.html import html_table
from draftgate.loadgen.search.report import as_dict
from draftgate.loadgen.search.runner import search_load
from draftgate.loadgen.sending.client import open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.target import Target, inspect_server
from draftgate.loadgen.types import LoadRun, PlannedRequest, RequestSpec, Slo
from training.corpus import held_out_files

POLICIES: Final = "slack,fixed:64,fixed:128,prefill_first"
GAP_MS, TTFT_MS = 150.0, 12_000.0
"""Limits of a chat. A decode step of the shipped model takes about 5 ms, and the last 64 tokens of
a prompt of 8,000 about 70 to 100 ms, so the policies differ. A worker computes prompts in order of
arrival, so a chat may wait 8 s behind a long prompt under any policy. The limit of the TTFT only
excludes rates at which the queue grows (AMD EPYC with AVX2, 2026-11-24)."""

SHARE: Final = 0.95
"""A stall of all decodes affects the chats that run when a long prompt arrives. These are 5 to 10%
of the chats, so a smaller share would not notice it."""

LONG_TOKENS: Final = 8000
LONG_EVERY_S: Final = 16.0
"""Interval of the long prompts. A prompt takes 5 to 8 s alone, so that there is time for chats."""

LONG_PROMPTS: Final = 1000
"""More than arrive during a search."""

CHAT_TOKENS: Final = 128
MOST_REQUESTS: Final = 1200
"""Requests of a search, a limit of its time: about six minutes."""

PRECISION: Final = 0.08

FLAGS: Final = (
    *("--device", "cpu", "--threads", "1", "--speculation", "off", "--admission", "none"),
    *("--max-model-len", "8192", "--kv-bytes", "512MiB"),
)
SLO: Final = Slo.of_ms(TTFT_MS, GAP_MS, chunk_gap_ms=GAP_MS)


def long_prompts(text: str, seed: int) -> Iterator[PlannedRequest]:
    """Yield prompts of `LONG_TOKENS` at intervals of `LONG_EVERY_S`, without a common prefix.

    The server keeps the last tokens of each text, which has more of them.
    """
    random, truncated = Random(seed), (("truncate_prompt_tokens", LONG_TOKENS),)
    for index in range(LONG_PROMPTS):
        begin = random.randrange(len(text) - 8 * LONG_TOKENS)
        spec = RequestSpec(
            text[begin : begin + 8 * LONG_TOKENS], (), 1, seed=seed + index, extra=truncated
        )
        yield PlannedRequest(index, index * LONG_EVERY_S, spec)


@asynccontextmanager
async def beside_long_prompts(url: str, text: str, seed: int) -> AsyncIterator[LoadRun]:
    """Send long prompts to a server while the context lasts. The run is complete at its end.

    Raises:
        ValueError: a response was not intact.
    """
    run = LoadRun({})
    async with open_session() as session:
        server = await inspect_server(session, url)
        client = Target(url).client(session, server.model)
        sending = asyncio.create_task(run_plan(client, long_prompts(text, seed)))
        try:
            yield run
        finally:
            sending.cancel()
            run.records = (await sending).records
    broken = [one for one in run.records if one.verdict not in {Verdict.OK, Verdict.INTERRUPTED}]
    if broken:
        raise ValueError(f"a long prompt failed: {broken[0].verdict}: {broken[0].detail}")


async def measure(policy: str, url: str, text: str, args: Namespace) -> dict[str, Any]:
    """Return the capacity of a server for chats, and the latency of the long prompts."""
    load = Load(
        workload="chat", max_tokens=CHAT_TOKENS, slo=SLO, rate_rps=args.rate, seed=args.seed
    )
    goal = {"share": SHARE, "precision": PRECISION, "most_requests": args.requests}
    async with beside_long_prompts(url, text, args.seed) as beside:
        report = await search_load(
            load,
            Target(url),
            lambda result, _: print(policy, result.probe.rate_rps, result.verdict, result.share),
            **goal,
        )
    firsts_s = [first_s for one in beside.records if (first_s := ttft_s(one)) is not None]
    return {
        "batching": policy,
        "long_prompts": len(firsts_s),
        "long_ttft_p50_s": median(firsts_s) if firsts_s else None,
        "search": as_dict(report),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench batching`."""
    args = _parser().parse_args(arguments)
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    cores, rows = two_cores(), []
    text = "\n".join(p.read_text(encoding="utf-8", errors="ignore") for p in held_out_files())
    with tempfile.TemporaryDirectory() as scratch, ExitStack() as stack:
        cache = fresh_cache(Path(scratch))
        servers = {
            policy: stack.enter_context(
                run_server(
                    [*FLAGS, "--batching", policy],
                    Path(scratch),
                    cores.servers,
                    backend="engine",
                    variables=cache,
                )
            )
            for policy in args.policies.split(",")
        }
        with (
            on_core(cores.clients),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            for policy, server in servers.items():
                rows.append(runner.run(measure(policy, server.url, text, args)))
                print(_cells(rows[-1]))
    settings = {
        "slo_ttft_ms": TTFT_MS,
        "slo_gap_ms": GAP_MS,
        "long_tokens": LONG_TOKENS,
        "long_every_s": LONG_EVERY_S,
        "chat_tokens": CHAT_TOKENS,
        "seed": args.seed,
    }
    results = {"format": "batching/1", **facts, "settings": settings, "rows": rows}
    table = html_table(list(HEAD), [_cells(row) for row in rows])
    write_results(args, results, "Capacity of batching policies beside long prompts", [table])


HEAD: Final = ("batching", "chats/s", "95% interval", "TTFT of long prompts, s")


def _cells(row: dict[str, Any]) -> list[str]:
    search, first_s = row["search"], row["long_ttft_p50_s"]
    rate, interval = search["rate_rps"], search["interval"]
    return [
        row["batching"],
        "none" if rate is None else f"{rate:.2f}",
        " to ".join("open" if end is None else f"{end:.2f}" for end in interval),
        "none" if first_s is None else f"{first_s:.1f}",
    ]


def _parser() -> ArgumentParser:
    parser = bench_parser("batching", __doc__, device=False)
    parser.add_argument("--policies", default=POLICIES, help="comma-separated batching policies")
    parser.add_argument("--rate", type=float, default=3.0, help="first rate of chats per second")
    parser.add_argument(
        "--requests", type=int, default=MOST_REQUESTS, help="most chats of a search"
    )
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--allow-busy", action="store_true", help="measure on a busy machine")
    return parser


if __name__ == "__main__":
    main()
