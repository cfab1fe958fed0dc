"""Measure overload in real time over HTTP, with a real server and the simulator.

    draftgate bench overload --real --json OUT

Each rate lasts for a minute. A few rates find the peak of goodput, and the last rate is three times
that peak. Each request is a stream over plain HTTP. A refused client retries until it
is admitted. It waits for `retry-after-ms`, as OpenAI's clients do, or for the whole seconds of
`Retry-After` (`--whole-seconds`).

The metrics are those of `overload.py`. This module adds the time from a request to its refusal, as
the client sees it, and the server's maximum memory and queue. A refusal has status 429. After 5 s,
the first heartbeat of a stream sends status 200, and a later refusal is an error event.
"""

from __future__ import annotations

import asyncio
import json
import os
import tempfile
import time
from argparse import Namespace
from collections.abc import AsyncIterator, Sequence
from contextlib import aclosing, asynccontextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import aiohttp
import uvloop

from bench.harness.processes import on_core, two_cores
from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.harness.servers import (
    ResourceUse,
    Server,
    allow_many_files,
    live_samples,
    quantiles,
    run_server,
    watch_server,
)
from bench.simulation.overload import TIMES
from bench.simulation.overload_clients import MAX_ATTEMPTS, OVERLOAD_S, Client, Overload
from bench.simulation.overload_metrics import overload_metrics
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.cli.environment import collect_environment
from draftgate.loadgen.planning.plan import Load, make_plan
from draftgate.loadgen.sending.sse import SseParser
from draftgate.policies.types import ServiceLevel

REFUSAL_GOAL_S: Final = 0.050
REAL_FACTORS: Final = "0.7,0.85,1.0,1.2"
FILES: Final = 8192
TOO_MANY: Final = 429

COMMITTED_S: Final = 5.0
"""Seconds until a stream sends its status (docs/guide/overload.md)."""


@dataclass(slots=True)
class Attempts:
    """All attempts at a single rate.

    Attributes:
        refusal_s: seconds from each refused request to its response.
        queued, running: samples of the node, once per second.
        broken: number of responses that were neither a whole stream nor a refusal, by kind.
        error_s: seconds from each request to an error event after status 200.
        without_delay: number of refusals without `Retry-After`.
    """

    refusal_s: list[float] = field(default_factory=list)
    queued: list[int] = field(default_factory=list)
    running: list[int] = field(default_factory=list)
    broken: dict[str, int] = field(default_factory=dict)
    error_s: list[float] = field(default_factory=list)
    without_delay: int = 0

    def note_broken(self, what: str) -> None:
        """Count an unexpected response."""
        self.broken[what] = self.broken.get(what, 0) + 1


class Crowd:
    """The clients of a single rate, with times in seconds since the start of the rate."""

    def __init__(self, overload: Overload, server: Server, args: Namespace) -> None:
        self._overload = overload
        self._url = server.url
        self._whole_seconds: bool = args.whole_seconds
        self._began_s = 0.0
        self.attempts = Attempts()

    async def run(self, rate_rps: float) -> list[Client]:
        """Send requests at a rate for a minute, and return the clients after all have ended.

        Each rate has its own prompts, because the server caches the prompts of earlier rates.
        """
        overload = self._overload
        seed = round(1e3 * rate_rps) + overload.seed
        load = Load(workload=overload.workload, rate_rps=rate_rps, duration_s=OVERLOAD_S, seed=seed)
        plan = make_plan(load, max_model_len=overload.config.max_model_len)
        clients = [Client(planned, planned.at_s or 0.0) for planned in plan.requests]
        timeout = aiohttp.ClientTimeout(total=None)
        connector = aiohttp.TCPConnector(limit=0)
        async with aiohttp.ClientSession(
            self._url, connector=connector, timeout=timeout
        ) as session:
            self._began_s = time.perf_counter()
            await asyncio.gather(*(self._live(session, client) for client in clients))
        return clients

    def _now_s(self) -> float:
        return time.perf_counter() - self._began_s

    async def _live(self, session: aiohttp.ClientSession, client: Client) -> None:
        """Send the request, and retry as the server requests until it is admitted."""
        await asyncio.sleep(max(0.0, client.arrived_s - self._now_s()))
        index = client.planned.index
        service = self._overload.service(index)
        fields = client.planned.request.body("")
        del fields["model"]
        body = json.dumps({**fields, "priority": service.priority, "ignore_eos": True}).encode()
        path = "/v1/completions" if "prompt" in fields else "/v1/chat/completions"
        headers = _targets(service)
        while len(client.refusals) < MAX_ATTEMPTS:
            headers["x-stainless-retry-count"] = str(len(client.refusals))
            at_s = self._now_s()
            async with session.post(path, data=body, headers=headers) as response:
                if response.status != TOO_MANY:
                    await self._read(client, at_s, response)
                    return
                self.attempts.refusal_s.append(self._now_s() - at_s)
                self.attempts.without_delay += "Retry-After" not in response.headers
                await response.read()
            retry_s = self._retry_s(response)
            if client.refusals:
                client.retries.append((at_s, False))
            client.refusals.append((at_s, retry_s))
            await asyncio.sleep(retry_s)

    async def _read(self, client: Client, at_s: float, response: aiohttp.ClientResponse) -> None:
        """Read the stream of an admitted request, or count a broken response."""
        if response.status != 200:
            self.attempts.note_broken(f"status {response.status}")
            return
        if client.refusals:
            client.retries.append((at_s, True))
        client.admitted_s = at_s
        parser, usage, done, first_s = SseParser(), None, False, None
        async for data in response.content.iter_any():
            for event in parser.feed(data):
                if event.data == b"[DONE]":
                    done = True
                    continue
                first_s = self._now_s() if first_s is None else first_s
                message = json.loads(event.data)
                usage = message.get("usage") or usage
                if "error" in message:
                    self.attempts.error_s.append(self._now_s() - at_s)
                    self.attempts.note_broken(str(message["error"]["code"]))
                    return
        if not done or usage is None or first_s is None:
            self.attempts.note_broken("cut")
            return
        # HTTP does not report the admission, which is a step or two before the first token.
        client.scheduled_s = client.first_s = first_s
        client.end_s, client.tokens = self._now_s(), usage["completion_tokens"]

    def _retry_s(self, response: aiohttp.ClientResponse) -> float:
        """Return the seconds until the retry that a refusal requests, 1 by default."""
        milliseconds = response.headers.get("retry-after-ms")
        if milliseconds is None or self._whole_seconds:
            return float(response.headers.get("Retry-After", 1))
        return float(milliseconds) / 1e3


def _targets(service: ServiceLevel) -> dict[str, str]:
    """Return the headers of a service level."""
    headers = {"Content-Type": "application/json"}
    for name, target_s in (("ttft", service.ttft_s), ("tpot", service.tpot_s)):
        if target_s is not None:
            headers[f"x-slo-{name}-ms"] = f"{target_s * 1e3:g}"
    return headers


@asynccontextmanager
async def _sampled(server: Server, attempts: Attempts) -> AsyncIterator[None]:
    """Record queue length and batch size once per second."""

    async def note() -> None:
        began_s = time.time()
        async with aclosing(live_samples(server)) as samples:
            async for sample in samples:
                if sample["at_s"] >= began_s:
                    attempts.queued.append(sample["queued"] + sample["waiting"])
                    attempts.running.append(sample["running"])

    task = asyncio.create_task(note())
    try:
        yield
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def _row(
    overload: Overload, server: Server, args: Namespace, rate_rps: float
) -> dict[str, Any]:
    """Return the metrics of a rate."""
    crowd = Crowd(overload, server, args)
    before_bytes = server.rss_bytes
    async with watch_server(server) as resources, _sampled(server, crowd.attempts):
        clients = await crowd.run(rate_rps)
    row = {
        **overload_metrics(overload, rate_rps, clients),
        **_server(resources, crowd.attempts),
        "rss_bytes_before": before_bytes,
        "rss_bytes_after": server.rss_bytes,
    }
    print(row, flush=True)
    return row


def _server(resources: ResourceUse, attempts: Attempts) -> dict[str, Any]:
    """Return the server's resource use and the times to refusals."""
    return {
        "refusals": len(attempts.refusal_s),
        "refusal_s": quantiles(attempts.refusal_s) if attempts.refusal_s else None,
        "queued": {"max": max(attempts.queued, default=0)},
        "running": {"max": max(attempts.running, default=0)},
        "refusals_without_retry_after": attempts.without_delay,
        "broken": attempts.broken,
        "error_events": len(attempts.error_s),
        "error_events_within_5_s": sum(one < COMMITTED_S for one in attempts.error_s),
        "server": resources.metrics(),
    }


async def measure(overload: Overload, server: Server, args: Namespace) -> dict[str, Any]:
    """Return the metrics of all rates, and of three times the peak of goodput."""
    factors = [float(factor) for factor in args.factors.split(",")]
    rows = [await _row(overload, server, args, factor * args.rate) for factor in factors]
    peak = max(rows, key=lambda row: row["goodput_rps"])
    over = await _row(overload, server, args, TIMES * peak["goodput_rps"])
    refusal_s = over["refusal_s"]
    return {
        "rates": rows,
        "peak": {key: peak[key] for key in ("rate_rps", "goodput_rps")},
        "overload": {**over, "goodput_of_peak": over["goodput_rps"] / peak["goodput_rps"]},
        "refused_in_time": refusal_s is not None and refusal_s["p99"] <= REFUSAL_GOAL_S,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench overload --real`."""
    parser = bench_parser("overload", __doc__)
    parser.add_argument("--real", action="store_true", help="measure in real time over HTTP")
    parser.add_argument("--rate", type=float, default=24.0, help="nominal requests per second")
    parser.add_argument(
        "--factors", default=REAL_FACTORS, help="multiples of --rate to find the peak of goodput"
    )
    parser.add_argument("--workload", default="chat")
    parser.add_argument("--seats", type=int, default=32)
    parser.add_argument("--ttft-ms", type=float, default=2000.0)
    parser.add_argument("--tpot-ms", type=float, default=None)
    parser.add_argument("--priorities", default="-1,0,1", help="priorities of the classes")
    parser.add_argument("--admission", default="deadline")
    parser.add_argument(
        "--whole-seconds",
        action="store_true",
        help="wait for Retry-After and ignore retry-after-ms",
    )
    parser.add_argument("--seed", type=int, default=0)
    args = parser.parse_args(arguments)
    allow_many_files(FILES)
    tpot_s = None if args.tpot_ms is None else args.tpot_ms / 1e3
    services = tuple(
        ServiceLevel(args.ttft_ms / 1e3, tpot_s, int(priority))
        for priority in args.priorities.split(",")
    )
    config = WorkerConfig(profile=args.profile, max_num_seqs=args.seats, max_model_len=16_384)
    overload = Overload(config, services, args.workload, args.seed, 1, args.admission)
    flags = [
        *("--profile", args.profile, "--max-num-seqs", str(args.seats)),
        *("--max-model-len", str(config.max_model_len), "--admission", args.admission),
    ]
    server_core, client_core = two_cores()
    results: dict[str, Any] = {
        "format": "overload-real/1",
        **simulated_provenance("overload", arguments),
        "device": collect_environment()["cpu"],
        "load_before": os.getloadavg()[0],
    }
    with (
        tempfile.TemporaryDirectory() as scratch,
        run_server(flags, Path(scratch), server_core) as server,
        on_core(client_core),
        asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
    ):
        results |= runner.run(measure(overload, server, args))
    write_results(args, results, "Overload over HTTP", ())


if __name__ == "__main__":
    main()
