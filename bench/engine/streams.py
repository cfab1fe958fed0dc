"""Measure how 256 open SSE streams slow down the engine's steps.

    draftgate bench streams --json OUT

Each round decodes the same requests in three ways: in the engine alone, over HTTP with the server
in this process, and over HTTP with a separate server process. All requests begin in the same step
and have the same length. The step time is the time between the first token of the last stream and
the end of all streams, divided by the number of steps. The clients are sockets in this process that
count bytes without parsing.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path
from statistics import median
from typing import Any, Final

from bench.harness.provenance import provenance
from draftgate.backends.engine.load import load_engine
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView

STREAMS: Final = 256
TOKENS: Final = 160
ROUNDS: Final = 5
PROMPT: Final = "def f(x):"
TIMEOUT_S: Final = 300.0
READY_S: Final = 120.0
_SERVE: Final = (
    "import sys; from draftgate.gateway.cli import main; sys.argv[1:1] = ['serve']; main()"
)
_DONE: Final = b"data: [DONE]"
_FIRST: Final = b'"text"'


class _Client(asyncio.Protocol):
    """A connection that posts a completion and records the times of its first and last event."""

    def __init__(self, request: bytes, finished: asyncio.Event) -> None:
        self._request = request
        self._finished = finished
        self._tail = b""
        self.first_s = 0.0
        self.last_s = 0.0

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        assert isinstance(transport, asyncio.Transport)
        self._transport = transport
        transport.write(self._request)

    def data_received(self, data: bytes) -> None:
        received = self._tail + data
        if not self.first_s and _FIRST in received:
            self.first_s = time.perf_counter()
        if _DONE in received:
            self.last_s = time.perf_counter()
            self._finished.set()
            self._transport.close()
        self._tail = data[-len(_DONE) :]

    def connection_lost(self, exc: Exception | None) -> None:
        self._finished.set()


async def served_step_s(port: int, streams: int, tokens: int) -> float:
    """Return the seconds of a step of a server with `streams` open streams.

    Raises:
        RuntimeError: a stream was cut off.
    """
    loop = asyncio.get_running_loop()
    clients = []
    for index in range(streams):
        finished = asyncio.Event()
        client = _Client(_post(port, index, tokens), finished)
        clients.append((client, finished))
    await asyncio.gather(
        *(loop.create_connection(lambda c=c: c, "127.0.0.1", port) for c, _ in clients)  # type: ignore[misc]
    )
    async with asyncio.timeout(TIMEOUT_S):
        await asyncio.gather(*(finished.wait() for _, finished in clients))
    if not all(client.last_s for client, _ in clients):
        raise RuntimeError("a stream was cut off before its end")
    began_s = max(client.first_s for client, _ in clients)
    return (max(client.last_s for client, _ in clients) - began_s) / (tokens - 1)


def _post(port: int, index: int, tokens: int) -> bytes:
    body = {
        "model": "draftgate-demo",
        "prompt": PROMPT,
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0.8,
        "seed": index,
        "stream": True,
        "speculation": {"mode": "off"},
    }
    data = json.dumps(body).encode()
    head = (
        f"POST /v1/completions HTTP/1.1\r\nHost: 127.0.0.1:{port}\r\n"
        f"Content-Type: application/json\r\nContent-Length: {len(data)}\r\n\r\n"
    )
    return head.encode() + data


def bare_step_s(streams: int, tokens: int, threads: int) -> float:
    """Return the seconds of a step of the engine alone, in this process and thread."""
    engine = load_engine(worker_config(streams, threads))
    worker, executor = engine.worker, engine.executor
    prompt = compact(engine.served.admission.tokenizer.encode(PROMPT))
    off = speculation_policy("off").decide(RequestView(len(prompt), tokens, 0.8), worker.load())
    for index in range(streams):
        sampling = SamplingParams(tokens, index, 0.8, ignore_eos=True)
        worker.submit(GenerationRequest(str(index), prompt, sampling, off))
    times: list[float] = []
    while (plan := worker.plan()) is not None:
        worker.render(worker.apply(plan, executor.execute(plan)))
        if plan.num_sampling == streams:
            times.append(time.perf_counter())
    return (times[-1] - times[0]) / (len(times) - 1)


def worker_config(streams: int, threads: int) -> WorkerConfig:
    """Return a worker whose batch holds all streams and whose step holds all prompts."""
    return WorkerConfig(
        speculation="off", max_num_seqs=streams, max_step_tokens=32 * streams, threads=threads
    )


async def _served(streams: int, tokens: int, threads: int, *, own_process: bool) -> float:
    config = worker_config(streams, threads)
    arguments = [
        *("--port", "0", "--threads", str(threads), "--speculation", "off"),
        *("--max-num-seqs", str(config.max_num_seqs)),
        *("--max-step-tokens", str(config.max_step_tokens)),
        *(["--own-process"] if own_process else []),
    ]
    server = await asyncio.create_subprocess_exec(
        *(sys.executable, "-c", _SERVE, *arguments),
        stdout=asyncio.subprocess.PIPE,
        stderr=asyncio.subprocess.DEVNULL,
    )
    try:
        port = await asyncio.wait_for(_port(server), READY_S)
        await served_step_s(port, streams, 8)  # warm up connections, caches and shapes
        return await served_step_s(port, streams, tokens)
    finally:
        server.send_signal(signal.SIGTERM)
        await server.wait()


async def _port(server: asyncio.subprocess.Process) -> int:
    assert server.stdout is not None
    async for line in server.stdout:
        if found := re.search(rb"http://127\.0\.0\.1:(\d+)", line):
            return int(found[1])
    raise RuntimeError("the server did not start in time")


async def _bare(streams: int, tokens: int, threads: int) -> float:
    command = (
        sys.executable,
        "-m",
        __spec__.name,
        "--bare",
        str(streams),
        str(tokens),
        str(threads),
    )
    process = await asyncio.create_subprocess_exec(*command, stdout=asyncio.subprocess.PIPE)
    output, _ = await process.communicate()
    return float(output)


def measure(streams: int, tokens: int, threads: int, rounds: int) -> dict[str, Any]:
    """Return the step times of all rounds and their medians, in milliseconds."""
    ways: dict[str, Callable[[], Any]] = {
        "bare": lambda: _bare(streams, tokens, threads),
        "one_process": lambda: _served(streams, tokens, threads, own_process=False),
        "own_process": lambda: _served(streams, tokens, threads, own_process=True),
    }
    step_ms: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds):
        for name in list(ways)[:: -1 if turn % 2 else 1]:
            step_ms[name].append(round(1e3 * asyncio.run(ways[name]()), 3))
        print({name: taken[-1] for name, taken in step_ms.items()}, flush=True)
    bare = median(step_ms["bare"])
    return {
        "streams": streams,
        "tokens": tokens,
        "step_ms": step_ms,
        "over_bare": {name: round(median(taken) / bare, 3) for name, taken in step_ms.items()},
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure the step times, and write the JSON."""
    parser = argparse.ArgumentParser(prog="draftgate bench streams", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--streams", type=int, default=STREAMS)
    parser.add_argument("--tokens", type=int, default=TOKENS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--threads", type=int, default=max(1, (os.cpu_count() or 2) - 1))
    parser.add_argument("--bare", nargs=3, type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    if args.bare:
        print(bare_step_s(*args.bare))
        return
    facts = provenance()
    result = {**facts, **measure(args.streams, args.tokens, args.threads, args.rounds)}
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
