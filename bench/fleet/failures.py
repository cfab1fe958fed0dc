"""Streams of two equal vLLM servers, one of which stops, dies or is drained meanwhile.

A gateway with the two servers gets 32 greedy streams of different lengths. Once all of them have
begun, the first server gets a signal: SIGSTOP (nothing responds any more), SIGKILL, or SIGTERM, as
from a scheduler that drains it. Each fault is measured without continuation
(`upstream_kept_bytes: 0`) and with it. The texts are compared with those of an undisturbed run.
"""

from __future__ import annotations

import asyncio
import json
import signal
import time
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final

import httpx

from bench.fleet.nodes import gateway
from bench.harness.vllm import MODEL, VllmServer, cores_of, vllm_server

STREAMS: Final = 32
LEAST_TOKENS: Final = 24
STALL_S: Final = 10.0
"""The `upstream_stall_s` of these runs, well above the time of a step with 32 sequences."""

FAULTS: Final = {
    "stopped": signal.SIGSTOP,
    "killed": signal.SIGKILL,
    "drained": signal.SIGTERM,
}
"""The signal of each fault."""

BEFORE: Final = "_before"
ONE_SERVER: Final = (
    ("undisturbed", "stopped_before", "stopped", "killed"),
    ("drained",),
    ("drained_before",),
    ("killed_before",),
)
"""The runs with each start of the first server, which ends with its last run. Those with `_before`
are without continuation."""

PATIENCE_S: Final = 240.0
STOPPED_PATIENCE_S: Final = 40.0
"""Time limit of the streams. After SIGSTOP, a stream that is not continued would never end. Streams
that exceed the limit have failed."""

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


def run(
    servers: Sequence[VllmServer],
    folder: Path,
    number: signal.Signals | None = None,
    *,
    continues: bool = True,
) -> list[Stream]:
    """Run the streams at a new gateway, and send a signal to the first server meanwhile.

    A server that was stopped continues after the run.

    Args:
        continues: whether the gateway continues streams.
    """
    upstreams = [
        {"name": name, "url": server.url, "concurrency": 2 * STREAMS}
        for name, server in zip(("one", "other"), servers, strict=True)
    ]
    settings: dict[str, Any] = {"routing": "round_robin", "upstream_stall_s": STALL_S}
    patience_s = PATIENCE_S
    if not continues:
        settings["upstream_kept_bytes"] = 0
        if number is signal.SIGSTOP:
            patience_s = STOPPED_PATIENCE_S

    def disturb() -> None:
        if number is signal.SIGTERM:
            servers[0].process.send_signal(number)  # vLLM stops its other processes itself
        elif number is not None:
            servers[0].signal(number)

    with gateway(folder, upstreams, **settings) as url:
        try:
            return asyncio.run(run_streams(url, disturb, patience_s))
        finally:
            if number is signal.SIGSTOP:
                servers[0].signal(signal.SIGCONT)


def measure(models: Path, folder: Path, save: Callable[[Mapping[str, Any]], None]) -> None:
    """Measure each fault without and with continuation.

    Args:
        save: gets the results so far.
    """
    found: dict[str, Any] = {"stall_s": STALL_S, "dtype": "float32"}
    cores = cores_of(2)
    expected: list[Stream] = []
    with vllm_server(models, folder / "other.log", core=cores[1]) as other:
        for faults in ONE_SERVER:
            with vllm_server(models, folder / "one.log", core=cores[0]) as one:
                servers = [one, other]
                expected = expected or run(servers, folder)
                for name in faults:
                    number = FAULTS.get(name.removesuffix(BEFORE))
                    streams = run(servers, folder, number, continues=not name.endswith(BEFORE))
                    found[name] = figures(streams, expected)
                    save(found)


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table, with its header."""
    rows = [["run", "failed", "continued", "equal texts", "right usage", "longest gap s"]]
    for name, one in found.items():
        if not isinstance(one, dict):
            continue
        equal = sum(one["continued_with_equal_text_by_kind"].values())
        equal += one["others_with_equal_text"]
        values = one["failed"], one["continued"], equal, one["with_right_usage"]
        rows.append([name, *map(str, values), f"{one['longest_gap_s']:.1f}"])
    return rows
