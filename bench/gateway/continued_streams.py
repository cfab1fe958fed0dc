"""Streams of two vLLM servers, one of which is killed or stopped meanwhile.

    python -m bench.gateway.continued_streams MODELS [--json FILE]

MODELS is a folder with vLLM for the processor in `vllm/` and a checkpoint in `smollm2/`. A gateway
with the two servers gets 32 greedy streams of different lengths. Once all of them have begun, one
server gets SIGSTOP or SIGKILL. Each fault is measured without continuation
(`--upstream-kept-bytes 0`) and with it. The texts are compared with those of an undisturbed run.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import signal
import sys
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx

from bench.harness.processes import free_port, start, stop, wait_until_up
from bench.harness.provenance import bench_parser, commit, cpu_name, write_results
from bench.harness.servers import SERVE
from bench.harness.vllm import MODEL, VllmServer, vllm_servers
from draftgate import __version__

STREAMS: Final = 32
LEAST_TOKENS: Final = 24
STALL_S: Final = 10.0
"""The `--upstream-stall-s` of these runs, well above the time of a step with 32 sequences on a core
of the processor."""

PATIENCE_S: Final = 240.0
"""Time that the streams have. One that has not ended by then has failed."""

_TOPICS: Final = ("bees", "the sea", "a lighthouse", "bread", "chess", "rain", "an owl", "clocks")


@dataclass
class Stream:
    """A stream as its client sees it.

    Attributes:
        kind: the form of its request.
        ids: number of different ids of its chunks.
        dones: number of `[DONE]`.
        tokens: completion tokens by its usage.
        error: the code of its error event, or another reason why it has not ended.
        metrics: the field `metrics` of its last chunk, or None without one.
    """

    kind: str
    max_tokens: int
    text: str = ""
    ids: int = 0
    dones: int = 0
    tokens: int = 0
    finish_reasons: list[str] = field(default_factory=list)
    error: str | None = None
    metrics: dict[str, Any] | None = None
    longest_gap_s: float = 0.0

    @property
    def is_whole(self) -> bool:
        """Whether the client got one complete stream."""
        ended = self.dones == 1 and self.finish_reasons == ["length"]
        return ended and self.error is None and self.ids == 1


def requests(count: int = STREAMS) -> list[tuple[Stream, str, dict[str, Any]]]:
    """Return the streams with their paths and bodies: texts, tokens and chats of many lengths."""
    found = []
    for number in range(count):
        kind = ("text", "ids", "chat")[number % 3]  # so that each server gets all kinds
        most = LEAST_TOKENS + 2 * number
        body: dict[str, Any] = {
            "model": MODEL,
            "max_tokens": most,
            "temperature": 0,
            "ignore_eos": True,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        words = f"Story {number} about {_TOPICS[number % len(_TOPICS)]}:"
        if kind == "chat":
            body["messages"] = [{"role": "user", "content": words}]
        else:
            body["prompt"] = words
        if kind == "ids":
            body["return_token_ids"] = True
        path = "/v1/chat/completions" if kind == "chat" else "/v1/completions"
        found.append((Stream(kind, most), path, body))
    return found


async def run_streams(
    url: str, disturb: Callable[[], None] | None = None, patience_s: float = PATIENCE_S
) -> list[Stream]:
    """Run the streams at a gateway, and call a function once all of them have begun."""
    begun, streams = 0, requests()
    all_begun = asyncio.Event()

    def note_begin() -> None:
        nonlocal begun
        begun += 1
        if begun == len(streams):
            all_begun.set()

    async with httpx.AsyncClient(base_url=url, timeout=None, limits=httpx.Limits()) as http:  # noqa: S113
        tasks = [
            asyncio.create_task(_read(http, stream, path, body, note_begin, patience_s))
            for stream, path, body in streams
        ]
        await all_begun.wait()
        if disturb is not None:
            disturb()
        return list(await asyncio.gather(*tasks))


async def _read(
    http: httpx.AsyncClient,
    stream: Stream,
    path: str,
    body: dict[str, Any],
    note_begin: Callable[[], None],
    patience_s: float,
) -> Stream:
    """Read a stream to its end, or for a limited time."""
    ids: set[str] = set()
    try:
        async with (
            asyncio.timeout(patience_s),
            http.stream("POST", path, json=body) as response,
        ):
            last_s, has_begun = time.monotonic(), False
            async for data in _events(response):
                now_s = time.monotonic()
                stream.longest_gap_s = max(stream.longest_gap_s, now_s - last_s)
                last_s = now_s
                _add(stream, ids, data)
                if stream.text and not has_begun:
                    has_begun = True
                    note_begin()
    except TimeoutError:
        stream.error = "no end"
    except httpx.HTTPError as error:
        stream.error = type(error).__name__
    stream.ids = len(ids)
    return stream


async def _events(response: httpx.Response) -> AsyncIterator[str]:
    async for line in response.aiter_lines():
        if line.startswith("data: "):
            yield line.removeprefix("data: ")


def _add(stream: Stream, ids: set[str], data: str) -> None:
    """Add an event to a stream."""
    if data == "[DONE]":
        stream.dones += 1
        return
    chunk = json.loads(data)
    if "error" in chunk:
        stream.error = str(chunk["error"].get("code"))
        return
    ids.add(chunk["id"])
    stream.metrics = chunk.get("metrics") or stream.metrics
    if chunk.get("usage"):
        stream.tokens = chunk["usage"]["completion_tokens"]
    for choice in chunk["choices"]:
        stream.text += choice.get("text") or choice.get("delta", {}).get("content") or ""
        if choice["finish_reason"] is not None:
            stream.finish_reasons.append(choice["finish_reason"])


def figures(streams: Sequence[Stream], expected: Sequence[Stream]) -> dict[str, Any]:
    """Return what happened to the streams, compared with those of an undisturbed run."""
    resumed = [one.metrics is not None and bool(one.metrics.get("resumes")) for one in streams]
    pairs = list(zip(streams, expected, resumed, strict=True))
    kinds = sorted({one.kind for one in streams})
    return {
        "streams": len(streams),
        "failed": sum(not one.is_whole for one in streams),
        "errors": sorted({one.error for one in streams if one.error}),
        "continued": sum(resumed),
        "continued_by_kind": {
            kind: sum(again for one, _, again in pairs if one.kind == kind) for kind in kinds
        },
        "continued_with_equal_text_by_kind": {
            kind: sum(
                again and one.text == other.text for one, other, again in pairs if one.kind == kind
            )
            for kind in kinds
        },
        "others_with_equal_text": sum(
            not again and one.is_whole and one.text == other.text for one, other, again in pairs
        ),
        "with_right_usage": sum(one.tokens == one.max_tokens for one in streams),
        "longest_gap_s": round(max(one.longest_gap_s for one in streams), 3),
    }


@contextmanager
def gateway(servers: Sequence[VllmServer], log: Path, *options: str) -> Iterator[str]:
    """Run a gateway with two servers, and return its address."""
    port = free_port()
    command = [*SERVE, "--backend", "openai", "--port", str(port), "--upstream-concurrency", "64"]
    for name, server in zip(("one", "other"), servers, strict=True):
        command += ["--upstream", f"{name}={server.url}"]
    command += ["--routing", "round_robin", "--upstream-stall-s", str(STALL_S), *options]
    process = start(command, None, log, {})
    try:
        url = f"http://127.0.0.1:{port}"
        wait_until_up(process, f"{url}/ready", None)
        yield url
    finally:
        stop(process)


def run(
    servers: Sequence[VllmServer],
    folder: Path,
    number: signal.Signals | None = None,
    *options: str,
    patience_s: float = PATIENCE_S,
) -> list[Stream]:
    """Run the streams at a new gateway, and send a signal to the first server meanwhile.

    A server that was stopped continues after the run.
    """

    def disturb() -> None:
        if number is not None:
            servers[0].signal(number)

    with gateway(servers, folder / "gateway.log", *options) as url:
        try:
            return asyncio.run(run_streams(url, disturb, patience_s))
        finally:
            if number is signal.SIGSTOP:
                servers[0].signal(signal.SIGCONT)


def measure(models: Path, folder: Path) -> dict[str, Any]:
    """Return the figures of each fault, without and with continuation."""
    found: dict[str, Any] = {}
    without = ("--upstream-kept-bytes", "0")
    logs = [folder / "one.log", folder / "other.log"]
    with vllm_servers(models, logs) as servers:
        expected = run(servers, folder)
        found["undisturbed"] = figures(run(servers, folder), expected)
        found["stopped_before"] = figures(
            run(servers, folder, signal.SIGSTOP, *without, patience_s=60.0), expected
        )
        found["stopped"] = figures(run(servers, folder, signal.SIGSTOP), expected)
        found["killed"] = figures(run(servers, folder, signal.SIGKILL), expected)
    with vllm_servers(models, logs) as servers:
        found["killed_before"] = figures(run(servers, folder, signal.SIGKILL, *without), expected)
    return found


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure, print the figures, and write them."""
    parser: argparse.ArgumentParser = bench_parser("continued-streams", __doc__)
    parser.add_argument("models", type=Path, help="folder with vllm/ and smollm2/")
    parsed = parser.parse_args(arguments)
    with TemporaryDirectory() as folder:
        found = measure(parsed.models.resolve(), Path(folder))
    facts = {
        "format": "continued-streams/1",
        "command": "python -m bench.gateway.continued_streams MODELS",
        "commit": commit(),
        "device": cpu_name(),
        "servers": "2 x vLLM 0.32 for CPUs, SmolLM2-135M-Instruct, float32, 1 thread each",
        "draftgate": __version__,
        "date": time.strftime("%Y-%m-%d", time.gmtime()),
        "stall_s": STALL_S,
    }
    json.dump(found, sys.stdout, indent=1)
    write_results(parsed.json, {**facts, **found})


if __name__ == "__main__":
    main()
