"""Measure the CPU time of tracing per request and per chunk.

    draftgate bench tracing --json OUT

Nodes in this process serve the same streams from the simulator in three modes: without traces
(`off`), with every trace dropped by the sampler (`unsampled`), and with every trace exported over
OTLP/HTTP (`on`). The collector is a separate process that discards the traces. The result is the
CPU time of this process until the last span is sent. This time includes the exporter's thread and a
plain client. Streams of 1 and of 65 chunks give the cost of a request and of an additional chunk.
"""

from __future__ import annotations

import asyncio
import gc
import json
import multiprocessing
import os
import time
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager, contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from multiprocessing.connection import Connection
from statistics import median
from typing import Any, Final

import numpy as np
import uvloop

from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from draftgate.backends.types import Delta
from draftgate.gateway.app import build_fleets, listening, start_workers
from draftgate.gateway.cli.environment import collect_environment
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.node import Node
from draftgate.gateway.state.memory import MemoryStore
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.telemetry.trace_export import open_tracing
from draftgate.gateway.telemetry.tracing import NO_SPAN, Tracing
from draftgate.gateway.telemetry.watch import RequestWatch
from draftgate.loadgen.report.html import html_table

MODES: Final = ("off", "unsampled", "on")
SHORT, LONG = 1, 65
"""Numbers of chunks per stream. Each chunk has a single token, because drafting is off."""

LANES: Final = 32
"""Number of connections, each with a single request at a time."""

_END: Final = b"\r\n0\r\n\r\n"


class _Sink(BaseHTTPRequestHandler):
    """A handler that accepts any POST."""

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.send_response(200)
        self.end_headers()

    def log_message(self, *_arguments: object) -> None:
        """Discard the log line."""


def _collect(port: Connection) -> None:
    server = HTTPServer(("127.0.0.1", 0), _Sink)
    port.send(server.server_port)
    server.serve_forever()


@contextmanager
def _collector() -> Iterator[str]:
    """Run a collector in its own process, and yield its URL."""
    context = multiprocessing.get_context("spawn")
    parent, child = context.Pipe()
    process = context.Process(target=_collect, args=(child,), daemon=True)
    process.start()
    try:
        yield f"http://127.0.0.1:{parent.recv()}"
    finally:
        process.terminate()
        process.join()


def _tracing(mode: str, url: str) -> Tracing:
    if mode == "off":
        return Tracing()
    with _variable("OTEL_TRACES_SAMPLER", "always_on" if mode == "on" else "always_off"):
        return open_tracing(url, os.environ)


@contextmanager
def _variable(name: str, value: str) -> Iterator[None]:
    """Set an environment variable while the context lasts, because the SDK reads its variables."""
    before = os.environ.get(name)
    os.environ[name] = value
    try:
        yield
    finally:
        del os.environ[name]
        if before is not None:
            os.environ[name] = before


@asynccontextmanager
async def _node(profile: str, tracing: Tracing) -> AsyncIterator[int]:
    """Serve the simulator, and yield the port."""
    config = ServeConfig(
        port=0, backend="sim", profile=profile, speculation="off", max_num_seqs=LANES
    )
    ((_, fleet),) = build_fleets(config)
    async with listening(Node(config, fleet, MemoryStore(), tracing)) as where:
        await start_workers(where.node)
        try:
            yield int(where.url.rpartition(":")[2])
        finally:
            await where.node.fleet.stop()
            await asyncio.to_thread(tracing.shutdown)


async def _lane(port: int, head: bytes, requests: int) -> None:
    reader, writer = await asyncio.open_connection("127.0.0.1", port)
    for _ in range(requests):
        writer.write(head)
        await reader.readuntil(_END)
    writer.close()
    await writer.wait_closed()


async def cpu_per_request_s(port: int, tracing: Tracing, chunks: int, requests: int) -> float:
    """Return the CPU seconds per request, including the client and the exporter."""
    body = json.dumps(
        {"prompt": "def f(x):", "max_tokens": chunks, "stream": True, "ignore_eos": True}
    ).encode()
    length = f"Content-Length: {len(body)}\r\n"
    head = f"POST /v1/completions HTTP/1.1\r\nHost: localhost\r\n{length}\r\n".encode() + body
    lanes = [requests // LANES] * LANES
    gc.collect()
    begin_s = time.process_time()
    await asyncio.gather(*(_lane(port, head, count) for count in lanes))
    provider = getattr(tracing, "_provider", None)
    if provider is not None:
        await asyncio.to_thread(provider.force_flush)
    return (time.process_time() - begin_s) / sum(lanes)


async def _rounds(profile: str, url: str, rounds: int, requests: int) -> list[dict[str, Any]]:
    rows = []
    async with AsyncExitStack() as stack:
        nodes = {}
        for mode in MODES:
            tracing = _tracing(mode, url)
            nodes[mode] = (await stack.enter_async_context(_node(profile, tracing)), tracing)
        for number in range(-1, rounds):  # the first round is a warm-up
            for chunks in (SHORT, LONG):
                for mode in MODES[number % 3 :] + MODES[: number % 3]:
                    cpu_s = await cpu_per_request_s(*nodes[mode], chunks, requests)
                    row = {"round": number, "mode": mode, "chunks": chunks, "cpu_s": cpu_s}
                    rows += [row] if number >= 0 else []
    return rows


def observe_s(deltas: int = 100_000, repeats: int = 5) -> float:
    """Return the minimum CPU seconds to observe a delta of a stream, including metrics."""
    series = RequestSeries(Metrics(list, lambda: "m"))
    watch = RequestWatch(series, NO_SPAN, "/v1/completions", "text_completion")
    delta = Delta(0, (1,), "a")
    taken_s = []
    for _ in range(repeats):
        begin_s = time.process_time()
        for _ in range(deltas):
            watch.observe(delta)
        taken_s.append(time.process_time() - begin_s)
    return min(taken_s) / deltas


def summary(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the medians over rounds for each mode, and the paired differences to `off`.

    The cost of a chunk is the difference between a long and a short stream, divided by the
    difference in chunks.
    """
    cpu_s = {(row["mode"], row["round"], row["chunks"]): row["cpu_s"] for row in rows}
    rounds = sorted({row["round"] for row in rows})

    def of(mode: str, number: int) -> tuple[float, float]:
        short, long = (cpu_s[mode, number, chunks] for chunks in (SHORT, LONG))
        return short * 1e6, (long - short) / (LONG - SHORT) * 1e6

    found = []
    for mode in MODES:
        own = [of(mode, number) for number in rounds]
        off = [of("off", number) for number in rounds]
        added = [(a[0] - b[0], a[1] - b[1]) for a, b in zip(own, off, strict=True)]
        found.append(
            {
                "mode": mode,
                "request_us": median(one[0] for one in own),
                "chunk_us": median(one[1] for one in own),
                "added_request_us": median(one[0] for one in added),
                "added_chunk_us": median(one[1] for one in added),
                "added_request_quartiles_us": quartiles([one[0] for one in added]),
                "added_chunk_quartiles_us": quartiles([one[1] for one in added]),
            }
        )
    return found


def quartiles(values: Sequence[float]) -> list[float]:
    """Return the first and the third quartile."""
    return [float(np.percentile(values, share)) for share in (25, 75)]


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench tracing`."""
    parser = bench_parser("tracing", __doc__)
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument(
        "--requests",
        type=int,
        default=512,
        help="number of requests per round, mode and stream length",
    )
    args = parser.parse_args(arguments)
    with _collector() as url, asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        rows = runner.run(_rounds(args.profile, url, args.rounds, args.requests))
    summary_rows = summary(rows)
    for row in summary_rows:
        print(*(v if isinstance(v, str) else np.round(v, 1) for v in row.values()))
    observed_us = observe_s() * 1e6
    print(f"RequestWatch.observe: {observed_us:.2f} us per delta")
    results = {
        "format": "tracing/1",
        **simulated_provenance("tracing", arguments),
        "cpu": collect_environment()["cpu"],
        "summary": summary_rows,
        "observe_us": observed_us,
        "rounds": rows,
    }
    table = [[str(value) for value in row.values()] for row in summary_rows]
    body = ["<h1>Cost of tracing</h1>", html_table(list(summary_rows[0]), table, __doc__ or "")]
    write_results(args, results, "Cost of tracing", body)


if __name__ == "__main__":
    main()
