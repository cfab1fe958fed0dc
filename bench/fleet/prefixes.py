"""Requests with shared prefixes in front of two vLLM servers with small caches.

Each arm is a routing policy of its own gateways. `events` follows the KV cache events of the
servers, and `approximate` counts earlier placements. Clients ask short questions about documents,
of which each server can cache only some. A round sends the same sequence of documents to every arm
in turn, with texts that no other arm has sent. The section compares the times to the first token
(TTFT) of equal requests, and resamples whole rounds for the intervals. It also compares the hit
rate that the gateways predict with the servers' own counters.

With two gateways, the requests alternate between them, so each sees the placements of only half.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from statistics import fmean
from typing import Any, Final

import httpx
import numpy as np

from bench.fleet.nodes import gateway, read_counter
from bench.harness.processes import free_port
from bench.harness.streams import event_times_s
from bench.harness.vllm import MODEL, VllmServer, cores_of, started_together, vllm_server

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
GATEWAYS: Final = (1, 2)
ROUNDS: Final = 3
REQUESTS: Final = 20
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


@contextmanager
def caching_servers(models: Path, folder: Path, number: int = 2) -> Iterator[list[CachingVllm]]:
    """Run servers with small caches that publish their events."""
    blocks = CACHED_DOCUMENTS * DOCUMENT_TOKENS // BLOCK_TOKENS + 8 * CLIENTS
    servers, addresses = [], []
    for index, core in enumerate(cores_of(number)):
        events, replays = (f"tcp://127.0.0.1:{free_port()}" for _ in range(2))
        config = {
            "enable_kv_cache_events": True,
            "publisher": "zmq",
            "endpoint": events.replace("127.0.0.1", "*"),  # vLLM connects to other addresses
            "replay_endpoint": replays,
        }
        options = ["--block-size", str(BLOCK_TOKENS), "--num-gpu-blocks-override", str(blocks)]
        options += ["--kv-events-config", json.dumps(config), "--dtype", "bfloat16"]
        log = folder / f"vllm-{index}.log"
        servers.append(vllm_server(models, log, *options, core=core))
        addresses.append((events, replays))
    with started_together(servers) as running:
        yield [CachingVllm(one, *at) for one, at in zip(running, addresses, strict=True)]


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
    with ExitStack() as stack:
        yield [
            stack.enter_context(gateway(folder, upstreams, arm, routing=ARMS[arm]))
            for _ in range(number)
        ]


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
                times_s = await event_times_s(http, f"{url}/v1/completions", _body(prompts[place]))
                result.ttft_s[place] = times_s[0]

        await asyncio.gather(*(client() for _ in range(clients)))
    after = [one.counters() for one in servers]
    result.queries = sum(new[0] - old[0] for new, old in zip(after, before, strict=True))
    result.hits = sum(new[1] - old[1] for new, old in zip(after, before, strict=True))
    totals = [read_counter(url, "draftgate_predicted_cached_tokens_total") for url in urls]
    result.predicted = sum(totals) - sum(predicted)
    return result


def _tokens(random: Random, number: int) -> list[int]:
    return [random.choice(VOCABULARY) for _ in range(number)]


def _body(prompt: Sequence[int]) -> dict[str, Any]:
    return {
        "model": MODEL,
        "prompt": prompt,
        "max_tokens": OUTPUT_TOKENS,
        "ignore_eos": True,
        "temperature": 0,
    }


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


def measure(
    models: Path,
    folder: Path,
    save: Callable[[Mapping[str, Any]], None],
    *,
    rounds: int = ROUNDS,
    requests: int = REQUESTS,
) -> None:
    """Measure all arms with one gateway each, and with two.

    Args:
        save: gets the results so far.
        requests: number of requests of an arm in a round.
    """
    found: dict[str, Any] = {
        "workload": {
            "documents": DOCUMENTS,
            "document_tokens": DOCUMENT_TOKENS,
            "cached_documents_per_server": CACHED_DOCUMENTS,
            "clients": CLIENTS,
            "rounds": rounds,
            "requests": requests,
            "dtype": "bfloat16",
        }
    }
    with caching_servers(models, folder) as servers:
        for number in GATEWAYS:

            def save_round(so_far: Mapping[str, list[RoundResult]], number: int = number) -> None:
                found[f"{number} gateways"] = report(so_far)
                save(found)

            run_arms(
                models,
                folder,
                servers,
                list(ARMS),
                rounds=rounds,
                requests=requests,
                number=number,
                save=save_round,
            )


def table(found: Mapping[str, Any]) -> list[list[str]]:
    """Return the rows of a table, with its header."""
    rows = [["gateways", "arm", "hit rate", "predicted", "TTFT mean s", "P90 s", "events / arm"]]
    for number in GATEWAYS:
        one = found[f"{number} gateways"]
        for arm, figures in one["arms"].items():
            relative = one["events_relative_to"].get(arm)
            compared = (
                ""
                if relative is None
                else f"{relative['ttft_ratio']:.2f} ({relative['low']:.2f}-{relative['high']:.2f})"
            )
            rows.append(
                [
                    str(number),
                    arm,
                    f"{figures['hit_rate']:.3f}",
                    f"{figures['predicted_hit_rate']:.3f}",
                    f"{figures['ttft_mean_s']:.3f}",
                    f"{figures['ttft_p90_s']:.3f}",
                    compared,
                ]
            )
    return rows
