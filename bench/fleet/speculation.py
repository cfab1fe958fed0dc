"""The choice between a vLLM server with n-gram drafts and one without, for each request.

Each arm is a gateway with the two servers:

- `auto` chooses by the price and by the measured times per token.
- `round_robin` sends requests to both servers in turns.
- `on` (`fixed:4`) and `off` send all requests to the server with drafts and to the plain one, while
  it has capacity. They therefore use one of the two servers.

Half of the requests edit code, so that the answer repeats the prompt, and half are chats. A turn
runs the requests of a round with a number of streams at one arm. The arms take turns with the same
requests, and the first arm changes from round to round. vLLM reports the drafts of each request
(`--per-request-spec-decode-metrics`), which the section compares with the decisions of the gateway.
"""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Final, NamedTuple

import httpx

from bench.cpu.chats import chats
from bench.engine.recorded_tasks import templated
from bench.fleet.nodes import gateway
from bench.harness.vllm import MODEL, VllmServer, cores_of, started_together, vllm_server
from draftgate.loadgen.measuring.confidence import mean_ratio

DRAFTS: Final = {"method": "ngram", "num_speculative_tokens": 4, "prompt_lookup_max": 4}
ARMS: Final[dict[str, dict[str, Any]]] = {
    "auto": {"speculation": "auto"},
    "round_robin": {"routing": "round_robin"},
    "on": {"speculation": "fixed:4"},
    "off": {"speculation": "off"},
}
"""The settings of each gateway."""

LOADS: Final = (1, 4, 16)
ROUNDS: Final = 3
LEAST_REQUESTS: Final = 4
REQUESTS_OF_STREAM: Final = 1
OUTPUT_TOKENS: Final = 96
KINDS: Final = ("code", "chat")
TIMEOUT_S: Final = 600.0


class Reply(NamedTuple):
    """A request as its client sees it.

    Attributes:
        request_id: the id of the gateway's decision.
        pool: the kind of its server by the gateway, or empty.
        drafted, accepted: the draft tokens by the server's own report, or None without one.
    """

    kind: str
    request_id: str
    upstream: str
    pool: str
    tokens: int
    ttft_s: float
    tpot_s: float | None
    drafted: int | None
    accepted: int | None


class Turn(NamedTuple):
    """The requests of one arm in a round, with a number of streams.

    Attributes:
        seconds: seconds from the first request to the end of the last response.
    """

    arm: str
    streams: int
    round: int
    seconds: float
    replies: list[Reply]

    @property
    def tokens_per_s(self) -> float:
        """Output tokens per second of all streams."""
        return sum(reply.tokens for reply in self.replies) / self.seconds


def bodies(count: int, seed: int) -> list[tuple[str, dict[str, Any]]]:
    """Return requests, half of each kind in random order, which depend on the seed only."""
    half = count // 2
    messages = chats(half, seed)
    found = []
    for edit, message in zip(templated("code_edit", half, seed * half), messages, strict=True):
        (turn,) = edit.turns
        user = {"role": "user", "content": turn.message}
        begun = {"role": "assistant", "content": turn.begun}
        # The answer has begun, because a small model would write another file.
        continues = {"continue_final_message": True, "add_generation_prompt": False}
        found.append(("code", {"messages": [user, begun], **continues}))
        found.append(("chat", {"messages": [{"role": "user", "content": message}]}))
    # In turns, round robin would send each kind to a server of its own.
    Random(seed).shuffle(found)
    options = {
        "model": MODEL,
        "max_tokens": OUTPUT_TOKENS,
        "temperature": 0,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return [(kind, {**body, **options}) for kind, body in found]


async def send(http: httpx.AsyncClient, kind: str, body: Mapping[str, Any]) -> Reply:
    """Return what the client of a stream sees."""
    begin_s = time.perf_counter()
    first_s = last_s = 0.0
    tokens = 0
    metrics: dict[str, Any] = {}
    async with http.stream("POST", "/v1/chat/completions", json=dict(body)) as response:
        response.raise_for_status()
        headers = response.headers
        async for line in response.aiter_lines():
            if not line.startswith("data: {"):
                continue
            now_s, chunk = time.perf_counter(), json.loads(line.removeprefix("data: "))
            metrics = chunk.get("metrics") or metrics
            if chunk.get("usage"):
                tokens = chunk["usage"]["completion_tokens"]
            if any(choice["delta"].get("content") for choice in chunk["choices"]):
                first_s, last_s = first_s or now_s, now_s
    first_s = first_s or time.perf_counter()  # without any text
    drafts = metrics.get("speculative_decoding") or {}
    return Reply(
        kind,
        headers["X-Request-Id"],
        headers.get("X-Draftgate-Upstream", ""),
        headers.get("X-Speculation-Pool", ""),
        tokens,
        first_s - begin_s,
        (last_s - first_s) / (tokens - 1) if tokens > 1 and last_s > first_s else None,
        drafts.get("num_draft_tokens"),
        drafts.get("num_accepted_draft_tokens"),
    )


async def run_turn(url: str, arm: str, streams: int, number: int, requests: int) -> Turn:
    """Run the requests of a round, each stream one after another."""
    waiting = iter(bodies(requests, number))
    replies: list[Reply] = []
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=TIMEOUT_S, limits=limits) as http:

        async def stream() -> None:
            for kind, body in waiting:
                replies.append(await send(http, kind, body))

        begin_s = time.perf_counter()
        await asyncio.gather(*(stream() for _ in range(streams)))
        return Turn(arm, streams, number, time.perf_counter() - begin_s, replies)


@contextmanager
def two_servers(models: Path, folder: Path) -> Iterator[dict[str, VllmServer]]:
    """Run a server with drafts and one without."""
    options = ["--dtype", "bfloat16", "--no-enable-prefix-caching"]
    drafting = ["--speculative-config", json.dumps(DRAFTS)]
    drafting += ["--per-request-spec-decode-metrics", "summary"]
    more: dict[str, list[str]] = {"drafting": drafting, "plain": []}
    servers = [
        vllm_server(models, folder / f"{name}.log", *options, *own, core=core)
        for (name, own), core in zip(more.items(), cores_of(2), strict=True)
    ]
    with started_together(servers) as running:
        yield dict(zip(more, running, strict=True))


def measure(
    models: Path,
    folder: Path,
    save: Callable[[Mapping[str, Any]], None],
    *,
    rounds: int = ROUNDS,
    loads: Sequence[int] = LOADS,
) -> None:
    """Measure all arms at all loads in turn.

    Args:
        save: gets the results so far.
    """
    workload = {
        "output_tokens": OUTPUT_TOKENS,
        "rounds": rounds,
        "drafts": DRAFTS,
        "dtype": "bfloat16",
    }
    turns: list[Turn] = []
    names = list(ARMS)
    with two_servers(models, folder) as servers, ExitStack() as stack:
        urls = {}
        for arm, settings in ARMS.items():
            upstreams = [
                {
                    "name": name,
                    "url": server.url,
                    **({"speculates": False} if arm == "round_robin" else {}),
                }
                for name, server in servers.items()
            ]
            urls[arm] = stack.enter_context(gateway(folder, upstreams, arm, **settings))
        for number in range(rounds):
            first = number % len(names)
            for streams in loads:
                requests = max(LEAST_REQUESTS, REQUESTS_OF_STREAM * streams)
                for arm in [*names[first:], *names[:first]]:
                    turn = asyncio.run(run_turn(urls[arm], arm, streams, number, requests))
                    turns.append(turn)
                    speed = f"{turn.tokens_per_s:.1f} tokens/s"
                    print(f"round {number}, {streams} streams, {arm}: {speed}")
                found = {"workload": workload, **report(turns)}
                save(found)
        found["recorded"] = {arm: _recorded(url, arm, turns) for arm, url in urls.items()}
        save(found)


def _recorded(url: str, arm: str, turns: Iterable[Turn]) -> dict[str, int]:
    """Return how many reported drafts the decisions of a gateway have."""
    decisions = httpx.get(f"{url}/decisions", params={"limit": 1000}, timeout=60).json()
    outcomes = {one["request_id"]: one.get("outcome") for one in decisions["decisions"]}
    counts = dict.fromkeys(("reported", "decided", "equal"), 0)
    for reply in (reply for turn in turns if turn.arm == arm for reply in turn.replies):
        if reply.drafted is None:
            continue
        outcome = outcomes.get(reply.request_id)
        counts["reported"] += 1
        counts["decided"] += reply.request_id in outcomes
        counts["equal"] += outcome is not None and (
            (outcome["drafted_tokens"], outcome["accepted_tokens"])
            == (reply.drafted, reply.accepted)
        )
    return counts


def report(turns: Sequence[Turn]) -> dict[str, Any]:
    """Return the figures of each load and arm, and those of `auto` relative to the other arms."""
    found: dict[str, Any] = {"cells": {}, "auto_relative_to": {}}
    for streams in sorted({turn.streams for turn in turns}):
        of_arm = {
            arm: [turn for turn in turns if (turn.streams, turn.arm) == (streams, arm)]
            for arm in ARMS
        }
        found["cells"][str(streams)] = {arm: _figures(own) for arm, own in of_arm.items() if own}
        found["auto_relative_to"][str(streams)] = {
            arm: _ratio(of_arm["auto"], own)
            for arm, own in of_arm.items()
            if arm != "auto" and len(own) == len(of_arm["auto"])
        }
    found["turns"] = [
        {**turn._asdict(), "replies": [reply._asdict() for reply in turn.replies]} for turn in turns
    ]
    return found


def _figures(turns: Sequence[Turn]) -> dict[str, Any]:
    replies = [reply for turn in turns for reply in turn.replies]
    found: dict[str, Any] = {
        "tokens_per_s": round(fmean(turn.tokens_per_s for turn in turns), 2),
        "requests": len(replies),
        "on_drafting_server": sum(reply.upstream == "drafting" for reply in replies),
        "ttft_p50_s": round(median(reply.ttft_s for reply in replies), 4),
    }
    for kind in KINDS:
        own = [reply for reply in replies if reply.kind == kind]
        times = [reply.tpot_s for reply in own if reply.tpot_s is not None]
        drafted = sum(reply.drafted or 0 for reply in own)
        accepted = sum(reply.accepted or 0 for reply in own)
        found[kind] = {
            "on_drafting_server": sum(reply.upstream == "drafting" for reply in own),
            "tpot_mean_s": round(fmean(times), 5),
            "drafted": drafted,
            "accepted": accepted,
            "acceptance": round(accepted / drafted, 3) if drafted else None,
        }
    return found


def _ratio(ours: Sequence[Turn], theirs: Sequence[Turn]) -> dict[str, float]:
    """Return the geometric mean of the ratios of tokens/s in each round, with its 95% interval."""
    pairs = zip(ours, theirs, strict=True)
    found = mean_ratio([one.tokens_per_s / other.tokens_per_s for one, other in pairs])
    return {name: round(value, 3) for name, value in found._asdict().items()}


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table, with its header."""
    rows = [
        [
            *("streams", "arm", "tokens/s", "auto / arm", "drafting: code", "chat"),
            *("ms/token: code", "chat", "accepted: code", "chat"),
        ]
    ]
    for streams, arms in found["cells"].items():
        relative = found["auto_relative_to"][streams]
        for arm, one in arms.items():
            ratio = relative.get(arm)
            rows.append(
                [
                    streams,
                    arm,
                    f"{one['tokens_per_s']:.1f}",
                    "" if ratio is None else "{mean:.2f} ({low:.2f}-{high:.2f})".format(**ratio),
                    *(str(one[kind]["on_drafting_server"]) for kind in KINDS),
                    *(f"{one[kind]['tpot_mean_s'] * 1e3:.1f}" for kind in KINDS),
                    *(
                        "" if (share := one[kind]["acceptance"]) is None else f"{share:.2f}"
                        for kind in KINDS
                    ),
                ]
            )
    return rows
