"""Measure routing by prefixes in front of two vLLM servers that share documents.

    draftgate bench prefix-routing --models DIR --json OUT

Each arm is a routing policy of its own gateways. `events` follows the KV cache events of the
servers, and `approximate` counts earlier placements. Clients ask short questions about documents,
of which each server can cache only some. A round sends the same sequence of documents to every arm
in turn, with texts that no other arm has sent. The study compares the times to the first token
(TTFT) of equal requests, and resamples whole rounds for the intervals. It also compares the hit
rate that the gateways predict with the servers' own counters.

With two gateways, the requests alternate between them, so each sees the placements of only half.
"""

from __future__ import annotations

import asyncio
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from tempfile import TemporaryDirectory
from typing import Any, Final

import httpx
import numpy as np
import yaml

from bench.harness.processes import free_port, start, stop, wait_until_up
from bench.harness.provenance import bench_parser, command_line, provenance, write_results
from bench.harness.servers import SERVE
from bench.harness.vllm import MODEL, VllmServer, vllm_server

ARMS: Final = {
    "round_robin": "round_robin",
    "least_loaded": "least_loaded",
    "approximate": "least_cost",
    "events": "least_cost",
}
"""The routing policy of each arm."""

BLOCK_TOKENS: Final = 32  # the smallest block of vLLM on a CPU
DOCUMENT_TOKENS: Final = 768
QUESTION_TOKENS: Final = 24
OUTPUT_TOKENS: Final = 4
CACHED_DOCUMENTS: Final = 5
"""Number of documents that a server can cache beside the running requests."""

DOCUMENTS: Final = 8
CLIENTS: Final = 2
RESAMPLES: Final = 2000
VOCABULARY: Final = range(1000, 40_000)


@dataclass(frozen=True, slots=True)
class CachingVllm:
    """A vLLM server, and the addresses of its events."""

    server: VllmServer
    events: str
    replays: str

    def counters(self) -> tuple[float, float]:
        """Return the prompt tokens that were looked up and found in its cache."""
        return tuple(  # type: ignore[return-value]
            read_counter(self.server.url, f"vllm:prefix_cache_{name}_total")
            for name in ("queries", "hits")
        )


@dataclass(slots=True)
class RoundResult:
    """The requests of one arm in a round.

    Attributes:
        ttft_s: times to the first token in seconds, in the order of the requests.
        queries, hits, predicted: prompt tokens that the servers have looked up and found, and that
            the gateways expected to be found.
    """

    ttft_s: list[float] = field(default_factory=list)
    queries: float = 0.0
    hits: float = 0.0
    predicted: float = 0.0


def read_counter(url: str, name: str) -> float:
    """Return the sum of a metric's series on the page of a server."""
    lines = httpx.get(f"{url}/metrics", timeout=60).text.splitlines()
    return sum(
        float(line.split()[-1]) for line in lines if line.startswith((f"{name}{{", name + " "))
    )


@contextmanager
def caching_servers(models: Path, folder: Path, number: int = 2) -> Iterator[list[CachingVllm]]:
    """Run servers with small caches that publish their events."""
    blocks = CACHED_DOCUMENTS * DOCUMENT_TOKENS // BLOCK_TOKENS + 8 * CLIENTS
    with ExitStack() as stack, ThreadPoolExecutor() as threads:
        starting = []
        for index in range(number):
            events, replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
            config = {
                "enable_kv_cache_events": True,
                "publisher": "zmq",
                "endpoint": events.replace("127.0.0.1", "*"),  # vLLM connects to other addresses
                "replay_endpoint": replays,
            }
            options = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)]
            options += ["--kv-events-config", json.dumps(config), "--dtype", "bfloat16"]
            server = vllm_server(models, folder / f"vllm-{index}.log", *options)
            starting.append((threads.submit(stack.enter_context, server), events, replays))
        yield [CachingVllm(one.result(), *addresses) for one, *addresses in starting]


@contextmanager
def gateways(
    arm: str, servers: Sequence[CachingVllm], models: Path, folder: Path, number: int
) -> Iterator[list[str]]:
    """Run the gateways of an arm, and yield their addresses."""
    upstreams = []
    for index, one in enumerate(servers):
        upstream: dict[str, Any] = {"name": f"vllm-{index}", "url": one.server.url}
        if arm in {"approximate", "events"}:
            upstream["tokenizer"] = str(models / MODEL)
        if arm == "events":
            upstream |= {"kv_events": one.events, "kv_events_replay": one.replays}
        upstreams.append(upstream)
    config = folder / f"{arm}.yaml"
    settings = {"backend": "openai", "routing": ARMS[arm], "upstream": upstreams}
    config.write_text(yaml.safe_dump(settings))
    processes, urls = [], []
    try:
        for index in range(number):
            port = free_port()
            options = ["--config", str(config), "--host", "127.0.0.1", "--port", str(port)]
            log = folder / f"{arm}-{index}.log"
            processes.append(start([*SERVE, *options], None, log, {}))
            urls.append(f"http://127.0.0.1:{port}")
            wait_until_up(processes[-1], f"{urls[-1]}/ready", None)
        yield urls
    finally:
        for process in processes:
            stop(process)


async def run_round(
    urls: Sequence[str],
    servers: Sequence[CachingVllm],
    seed: int,
    salt: str,
    requests: int,
    clients: int = CLIENTS,
) -> RoundResult:
    """Send the requests of a round through the gateways of an arm.

    Args:
        seed: decides the sequence of documents, which is equal for all arms.
        salt: makes the texts differ from those of other arms and rounds.
    """
    before = [one.counters() for one in servers]
    predicted = [read_counter(url, "draftgate_predicted_cached_tokens_total") for url in urls]
    order, texts = Random(seed), Random(f"{seed} {salt}")
    documents = [_tokens(texts, DOCUMENT_TOKENS) for _ in range(DOCUMENTS)]
    prompts = [
        documents[order.randrange(DOCUMENTS)] + _tokens(texts, QUESTION_TOKENS)
        for _ in range(requests)
    ]
    result = RoundResult([0.0] * requests)
    places = iter(range(requests))
    async with httpx.AsyncClient(timeout=600) as http:

        async def client() -> None:
            for place in places:
                url = urls[place % len(urls)]
                result.ttft_s[place] = await _ttft_s(http, url, prompts[place])

        await asyncio.gather(*(client() for _ in range(clients)))
    after = [one.counters() for one in servers]
    result.queries = sum(new[0] - old[0] for new, old in zip(after, before, strict=True))
    result.hits = sum(new[1] - old[1] for new, old in zip(after, before, strict=True))
    totals = [read_counter(url, "draftgate_predicted_cached_tokens_total") for url in urls]
    result.predicted = sum(totals) - sum(predicted)
    return result


def _tokens(random: Random, number: int) -> list[int]:
    return [random.choice(VOCABULARY) for _ in range(number)]


async def _ttft_s(http: httpx.AsyncClient, url: str, prompt: Sequence[int]) -> float:
    """Return the seconds until the first token of a request, which is then read to its end."""
    body = {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
        "stream": True,
    }
    begin_s, first_s = time.perf_counter(), 0.0
    async with http.stream("POST", f"{url}/v1/completions", json=body) as response:
        response.raise_for_status()
        async for line in response.aiter_lines():
            if not first_s and line.startswith("data:"):
                first_s = time.perf_counter() - begin_s
    return first_s


def run_arms(  # noqa: PLR0913 - the options of the study
    models: Path,
    folder: Path,
    servers: Sequence[CachingVllm],
    arms: Sequence[str],
    *,
    rounds: int,
    requests: int,
    number: int,
    clients: int = CLIENTS,
    save: Callable[[Mapping[str, list[RoundResult]]], None] = lambda _: None,
) -> dict[str, list[RoundResult]]:
    """Run the rounds of some arms in turn, each with this number of gateways.

    Args:
        save: gets the results after each round.
    """
    found: dict[str, list[RoundResult]] = {arm: [] for arm in arms}
    with ExitStack() as stack:
        urls = {
            arm: stack.enter_context(gateways(arm, servers, models, folder, number)) for arm in arms
        }
        for seed in range(rounds):
            # Each arm is first in turn, because the first one finds other contents of the caches.
            for arm in [*arms[seed % len(arms) :], *arms[: seed % len(arms)]]:
                salt = f"{arm} {number}"
                sent = run_round(urls[arm], servers, seed, salt, requests, clients)
                found[arm].append(asyncio.run(sent))
                print(f"round {seed}, {number} gateways, {arm}: {summary(found[arm][-1:])}")
            save(found)
    return found


def summary(rounds: Sequence[RoundResult]) -> dict[str, float]:
    """Return the figures of an arm."""
    queries = sum(one.queries for one in rounds)
    times = [seconds for one in rounds for seconds in one.ttft_s]
    return {
        "hit_rate": round(sum(one.hits for one in rounds) / queries, 4),
        "predicted_hit_rate": round(sum(one.predicted for one in rounds) / queries, 4),
        "ttft_mean_s": round(fmean(times), 4),
        "ttft_p50_s": round(float(np.median(times)), 4),
        "ttft_p90_s": round(float(np.quantile(times, 0.9)), 4),
    }


def ratio(arm: Sequence[RoundResult], other: Sequence[RoundResult]) -> dict[str, float]:
    """Return the mean TTFT of an arm relative to another one, with a 95% bootstrap interval."""
    ours, theirs = (np.array([fmean(one.ttft_s) for one in rounds]) for rounds in (arm, other))
    places = np.random.default_rng(0).integers(len(ours), size=(RESAMPLES, len(ours)))
    ratios = ours[places].mean(axis=1) / theirs[places].mean(axis=1)
    low, high = np.quantile(ratios, [0.025, 0.975])
    return {
        "ttft_ratio": round(float(ours.mean() / theirs.mean()), 3),
        "low": round(float(low), 3),
        "high": round(float(high), 3),
    }


def report(found: Mapping[str, list[RoundResult]]) -> dict[str, Any]:
    """Return the figures of all arms, and those of `events` relative to the others."""
    return {
        "arms": {arm: summary(rounds) for arm, rounds in found.items()},
        "events_relative_to": {
            arm: ratio(found["events"], rounds) for arm, rounds in found.items() if arm != "events"
        },
        "rounds": {
            arm: [{**summary([one]), "ttft_s": [round(s, 4) for s in one.ttft_s]} for one in rounds]
            for arm, rounds in found.items()
        },
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Run the study."""
    parser = bench_parser("prefix-routing", __doc__)
    default = os.environ.get("REAL_MODELS")
    parser.add_argument(
        "--models", type=Path, default=default, help="folder with vllm/ and smollm2/"
    )
    parser.add_argument("--rounds", type=int, default=8)
    parser.add_argument("--requests", type=int, default=32, help="requests of an arm in a round")
    parser.add_argument("--gateways", type=int, nargs="+", default=[1, 2])
    options = parser.parse_args(arguments)
    given = sys.argv[1:] if arguments is None else arguments
    results = {**provenance(), "command": command_line("draftgate bench prefix-routing", given)}
    results["workload"] = {
        "documents": DOCUMENTS,
        "document_tokens": DOCUMENT_TOKENS,
        "cached_documents_per_server": CACHED_DOCUMENTS,
        "clients": CLIENTS,
        "rounds": options.rounds,
        "requests": options.requests,
    }
    with TemporaryDirectory() as name, caching_servers(options.models, Path(name)) as servers:
        for number in options.gateways:

            def save(found: Mapping[str, list[RoundResult]], number: int = number) -> None:
                results[f"{number} gateways"] = report(found)
                write_results(options.json, results)

            run_arms(
                options.models,
                Path(name),
                servers,
                list(ARMS),
                rounds=options.rounds,
                requests=options.requests,
                number=number,
                save=save,
            )


if __name__ == "__main__":
    main()
