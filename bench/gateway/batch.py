"""Measure what a batch of 2,000 lines costs the online requests of a real server.

    draftgate bench batch --model smollm2 --json OUT

A server on one core gets chats as a Poisson process. In each round, the same chats arrive once on
their own, and once while a batch runs, and the order alternates. A number before each message keeps
the second run from finding its prompts in the prefix cache. The batch of a round is cancelled at
its end. Events of a stream come with steps, so the gaps between them show how long a step takes.
"""

from __future__ import annotations

import asyncio
import json
import tempfile
import time
from collections.abc import AsyncIterator, Sequence
from itertools import pairwise
from pathlib import Path
from statistics import fmean, median
from typing import Any, Final

import httpx
from openai import AsyncOpenAI
from openai.types import Batch

from bench.cpu.chats import chats
from bench.engine.bound import ratio_of
from bench.harness.processes import free_port, start, stop, two_cores, wait_until_up
from bench.harness.provenance import bench_parser, provenance, write_results
from bench.harness.servers import SERVE
from bench.harness.streams import event_times_s
from draftgate.loadgen.measuring.metrics import percentile
from draftgate.loadgen.planning.arrivals import gamma

ARMS: Final = ("alone", "batch")
LINES: Final = 2000
MESSAGES: Final = 200
"""Different messages of a batch."""

LINE_TOKENS: Final = 64
CHAT_TOKENS: Final = 48
RUNNING: Final = 16
"""Lines that are done before the chats begin."""

POLL_S: Final = 0.2


def _chat(model: str, message: str, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": message}],
        "max_tokens": tokens,
        "temperature": 0,
    }


def input_file(model: str) -> bytes:
    """Return the batch as JSON Lines."""
    messages = chats(MESSAGES, seed=1)
    rows = (
        {
            "custom_id": str(number),
            "method": "POST",
            "url": "/v1/chat/completions",
            "body": _chat(model, f"{number}. {messages[number % MESSAGES]}", LINE_TOKENS),
        }
        for number in range(LINES)
    )
    return "\n".join(map(json.dumps, rows)).encode()


async def send_chats(url: str, options: Any, number: int, arm: str) -> dict[str, Any]:
    """Send the chats of a round as a Poisson process, and return their latencies."""
    messages, tasks = chats(options.requests, seed=1000 + number), []
    begin_s, arrivals_s = time.perf_counter(), gamma(options.rate, number)
    async with httpx.AsyncClient(timeout=600) as http, asyncio.TaskGroup() as group:
        for (place, message), at_s in zip(enumerate(messages), arrivals_s, strict=False):
            await asyncio.sleep(begin_s + at_s - time.perf_counter())
            numbered = f"{2 * place + ARMS.index(arm)}. {message}"
            body = _chat(options.model, numbered, CHAT_TOKENS)
            send = event_times_s(http, f"{url}/v1/chat/completions", body)
            tasks.append(group.create_task(send))
    streams = [task.result() for task in tasks]
    ttfts_s = sorted(times_s[0] for times_s in streams)
    gaps_s = sorted(late - early for times_s in streams for early, late in pairwise(times_s))
    return {
        "ttft_p50_s": median(ttfts_s),
        "ttft_mean_s": fmean(ttfts_s),
        "ttft_p99_s": percentile(ttfts_s, 0.99),
        "gap_p50_s": median(gaps_s),
        "gap_p99_s": percentile(gaps_s, 0.99),
        "ttfts_s": ttfts_s,
    }


async def run_arm(url: str, options: Any, number: int, arm: str, file_id: str) -> dict[str, Any]:
    """Run the chats of a round, alone or beside a batch."""
    send = send_chats(url, options, number, arm)
    if arm == "alone":
        return await send
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as api:
        batch = await api.batches.create(
            input_file_id=file_id, endpoint="/v1/chat/completions", completion_window="24h"
        )

        before, begin_s = await _lines(api, batch.id, RUNNING), time.perf_counter()
        found = await send
        lines, seconds = await _lines(api, batch.id) - before, time.perf_counter() - begin_s
        await api.batches.cancel(batch.id)
        async for state in _polled(api, batch.id):
            if state.status == "cancelled":
                break
    return {**found, "lines": lines, "lines_per_s": lines / seconds}


async def _polled(api: AsyncOpenAI, batch_id: str) -> AsyncIterator[Batch]:
    """Yield the state of a batch at intervals."""
    while True:
        yield await api.batches.retrieve(batch_id)
        await asyncio.sleep(POLL_S)


async def _lines(api: AsyncOpenAI, batch_id: str, least: int = 0) -> int:
    """Wait until a batch has done some lines, and return how many it has."""
    async for state in _polled(api, batch_id):
        done = state.request_counts.completed if state.request_counts is not None else 0
        if done >= least:
            return done
    raise AssertionError


async def upload(url: str, model: str) -> str:
    """Upload the lines of the batches, and return the id of the file."""
    async with AsyncOpenAI(base_url=f"{url}/v1", api_key="unused") as api:
        return (await api.files.create(file=("in.jsonl", input_file(model)), purpose="batch")).id


def summary(rounds: Sequence[dict[str, dict[str, Any]]]) -> dict[str, Any]:
    """Return the latencies beside a batch relative to those without, over all requests."""
    together = {
        arm: percentile(sorted(one for found in rounds for one in found[arm]["ttfts_s"]), 0.99)
        for arm in ARMS
    }
    names = "ttft_p50_s", "ttft_mean_s", "ttft_p99_s", "gap_p50_s"
    return {
        "ttft_p99_s": together,
        "step_s": median(found["batch"]["gap_p50_s"] for found in rounds),
        "lines_per_s": fmean(found["batch"]["lines_per_s"] for found in rounds),
        "relative": {
            name: ratio_of(*([found[arm][name] for found in rounds] for arm in reversed(ARMS)))
            for name in names
        },
    }


def main(arguments: list[str] | None = None) -> None:
    """Run the rounds, and write the JSON after each."""
    parser = bench_parser("batch", __doc__)
    parser.add_argument("--model", default="smollm2", help="a known model or a path")
    parser.add_argument("--requests", type=int, default=150, help="chats of a round")
    parser.add_argument("--rate", type=float, default=2.0, help="chats per second")
    parser.add_argument("--rounds", type=int, default=4)
    options = parser.parse_args(arguments)
    facts, rounds = provenance(), list[dict[str, dict[str, Any]]]()
    with tempfile.TemporaryDirectory() as folder:
        port = free_port()
        url = f"http://127.0.0.1:{port}"
        command = [*SERVE, options.model, "--host", "127.0.0.1", "--port", str(port)]
        command += ["--threads", "1", "--files", f"{folder}/files"]
        process = start(command, two_cores().servers, Path(folder) / "server.log", {})
        try:
            wait_until_up(process, f"{url}/ready", None)
            model = httpx.get(f"{url}/v1/models").json()["data"][0]["id"]
            options.model = model
            file_id = asyncio.run(upload(url, model))
            for number in range(options.rounds):
                order = ARMS if number % 2 == 0 else ARMS[::-1]
                found = {
                    arm: asyncio.run(run_arm(url, options, number, arm, file_id)) for arm in order
                }
                rounds.append(found)
                for arm, one in found.items():
                    shown = {key: value for key, value in one.items() if key != "ttfts_s"}
                    print(f"round {number}, {arm}: {shown}", flush=True)
                write_results(options.json, {**facts, **summary(rounds), "rounds": rounds})
        finally:
            stop(process)


if __name__ == "__main__":
    main()
