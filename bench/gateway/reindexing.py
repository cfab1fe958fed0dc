"""Measure queries beside a re-indexing of documents and generation, on one server.

    draftgate bench reindexing --json OUT
    draftgate bench reindexing --documents m --queries m --serve-flags '--embedder m=DIRECTORY'

The server has the shipped language model and the embedding models, on one core. The client runs on
another core. Queries arrive at random times, whether or not earlier queries have ended. Documents
and generation are closed loops, so they use what the queries leave. The arms alternate within a
round, and the cache of embeddings is off. A single document of a bounded step, alone on the server,
shows how long a query may wait for the step in progress.
"""

from __future__ import annotations

import asyncio
import os
import shlex
import tempfile
import time
from argparse import Namespace
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import count
from pathlib import Path
from random import Random
from statistics import fmean, median
from typing import Any, Final

import aiohttp
import uvloop

from bench.harness.processes import on_core, two_cores
from bench.harness.provenance import bench_parser, simulated_provenance, write_results
from bench.harness.servers import Server, fresh_cache, run_server
from draftgate.backends.engine.encoder.load import BATCH_STEP_TOKENS
from draftgate.gateway.cli.environment import collect_environment
from draftgate.loadgen.measuring.metrics import percentile
from draftgate.loadgen.planning.corpus import open_corpus
from draftgate.loadgen.report.html import html_table

ARMS: Final[Mapping[str, frozenset[str]]] = {
    "queries": frozenset({"queries"}),
    "queries + documents": frozenset({"queries", "documents"}),
    "queries + documents + generation": frozenset({"queries", "documents", "generation"}),
    "documents": frozenset({"documents"}),
}
"""The loads of each arm."""

EMBEDDINGS: Final = "/v1/embeddings"
DOCUMENT_CHARACTERS: Final = 400
"""Length of a document, about 100 tokens. Models refuse texts beyond their context."""
TEXTS: Final = 16
"""Documents of a request. Two requests are under way, so the worker never waits for the client."""

REINDEXED: Final = 20_000
"""Documents of the index, for which the report computes the time."""

KV_BYTES: Final = 128 << 20


@dataclass(slots=True)
class Counts:
    """What an arm completed in one round.

    Attributes:
        query_s: latencies of the queries.
        failed: number of requests without status 200.
    """

    query_s: list[float] = field(default_factory=list)
    documents: int = 0
    tokens: int = 0
    failed: int = 0
    seconds: float = 0.0


class Client:
    """Sends the loads of an arm."""

    def __init__(self, session: aiohttp.ClientSession, args: Namespace) -> None:
        self._session = session
        self._args = args
        corpus = open_corpus()
        self._questions = [pair.question for pair in corpus.pairs]
        self._prose = corpus.prose

    async def run(self, loads: frozenset[str], seed: int) -> Counts:
        """Run the loads of an arm for the time of a round."""
        counts, rng = Counts(), Random(seed)
        sending = []
        if "documents" in loads:
            sending += [self._documents(counts, Random(f"{seed}/{n}")) for n in range(2)]
        if "generation" in loads:
            sending.append(self._generation(counts, seed))
        tasks = [asyncio.create_task(work) for work in sending]
        began_s = time.perf_counter()
        if "queries" in loads:
            await self._queries(counts, rng)
        else:
            await asyncio.sleep(self._args.seconds)
        counts.seconds = time.perf_counter() - began_s
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        return counts

    async def step_s(self) -> float:
        """Return the median time of a document that fills a bounded step, alone on the server."""
        text = " ".join(["word"] * (BATCH_STEP_TOKENS - 2))
        body = {"model": self._args.documents, "input": text, "input_type": "document"}
        times = []
        for _ in range(20):
            began_s = time.perf_counter()
            await self._post(EMBEDDINGS, body, Counts())
            times.append(time.perf_counter() - began_s)
        return median(times)

    async def _queries(self, counts: Counts, rng: Random) -> None:
        """Send queries at random times for the time of a round, and wait for all of them."""
        tasks, at_s = [], time.perf_counter()
        end_s = at_s + self._args.seconds
        while (at_s := at_s + rng.expovariate(self._args.rate)) < end_s:
            await asyncio.sleep(max(at_s - time.perf_counter(), 0.0))
            tasks.append(asyncio.create_task(self._query(counts, rng.choice(self._questions))))
        await asyncio.gather(*tasks)

    async def _query(self, counts: Counts, question: str) -> None:
        began_s = time.perf_counter()
        body = {"model": self._args.queries, "input": question, "input_type": "query"}
        if await self._post(EMBEDDINGS, body, counts) is not None:
            counts.query_s.append(time.perf_counter() - began_s)

    async def _documents(self, counts: Counts, rng: Random) -> None:
        while True:
            texts = [
                self._prose.read(self._prose.random_position(rng), DOCUMENT_CHARACTERS)
                for _ in range(TEXTS)
            ]
            body = {"model": self._args.documents, "input": texts, "input_type": "document"}
            body["encoding_format"] = "base64"
            if await self._post(EMBEDDINGS, body, counts) is not None:
                counts.documents += TEXTS

    async def _generation(self, counts: Counts, seed: int) -> None:
        for number in count():
            body = {"prompt": f"# {seed}.{number}\ndef ", "max_tokens": 64, "ignore_eos": True}
            found = await self._post("/v1/completions", body, counts)
            if found is not None:
                counts.tokens += found["usage"]["completion_tokens"]

    async def _post(self, path: str, body: Mapping[str, Any], counts: Counts) -> Any:
        """Send a request, and return its response, or None if it failed."""
        async with self._session.post(path, json=body) as response:
            found = await response.json()
            if response.status == 200:
                return found
            counts.failed += 1
            return None


async def measure(server: Server, args: Namespace) -> dict[str, Any]:
    """Return the counts of each round and the report of each arm."""
    rounds: dict[str, list[Counts]] = {arm: [] for arm in ARMS}
    async with aiohttp.ClientSession(server.url) as session:
        client = Client(session, args)
        await client.run(frozenset({"queries", "documents", "generation"}), -1)  # warms up
        step_s = await client.step_s()
        for place in range(args.rounds):
            for arm in list(ARMS)[:: 1 if place % 2 == 0 else -1]:
                counts = await client.run(ARMS[arm], place)
                rounds[arm].append(counts)
                print(place, arm, report([counts]), flush=True)
    return {
        "bounded_step_s": step_s,
        "arms": {arm: report(counts) for arm, counts in rounds.items()},
        "rounds": {arm: [report([one]) for one in counts] for arm, counts in rounds.items()},
    }


def report(rounds: Sequence[Counts]) -> dict[str, Any]:
    """Return latencies over all rounds, and rates per second."""
    query_s = sorted(value for one in rounds for value in one.query_s)
    seconds = sum(one.seconds for one in rounds)
    documents_per_s = sum(one.documents for one in rounds) / seconds
    found: dict[str, Any] = {
        "queries": len(query_s),
        "failed": sum(one.failed for one in rounds),
        "documents_per_s": documents_per_s,
        "tokens_per_s": sum(one.tokens for one in rounds) / seconds,
    }
    if query_s:
        found["query_s"] = {f"p{p}": percentile(query_s, p / 100) for p in (50, 90, 99)}
        found["query_s"]["mean"] = fmean(query_s)
    if documents_per_s:
        found["reindexing_s"] = REINDEXED / documents_per_s
    return found


def body(results: Mapping[str, Any]) -> Iterator[str]:
    """Yield the parts of the page."""
    yield "<h1>Queries beside a re-indexing</h1>"
    yield f"<p>{results['command']}, {results['commit']}, {results['date']}</p>"
    rows = []
    for arm, found in results["arms"].items():
        latencies = found.get("query_s", {})
        shown = [f"{latencies[p] * 1e3:.1f} ms" if p in latencies else "" for p in ("p50", "p99")]
        rates = [f"{found[name]:.1f}" for name in ("documents_per_s", "tokens_per_s")]
        rows.append([arm, *shown, *rates])
    head = ["load", "query P50", "query P99", "documents/s", "tokens/s"]
    yield html_table(head, rows, words=(0,))
    yield f"<p>A bounded step takes {results['bounded_step_s'] * 1e3:.1f} ms.</p>"


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench reindexing`."""
    parser = bench_parser("reindexing", __doc__, device=False)
    parser.add_argument("--rate", type=float, default=50.0, help="queries per second")
    parser.add_argument("--seconds", type=float, default=20.0, help="time of an arm in a round")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--documents", default="draftgate-documents", help="model of documents")
    parser.add_argument("--queries", default="draftgate-queries", help="model of queries")
    parser.add_argument(
        "--serve-flags",
        default="--embedder draftgate-documents --embedder draftgate-queries",
        help="further flags of the server, as text",
    )
    args = parser.parse_args(arguments)
    server_core, client_core = two_cores()
    results = {
        "format": "reindexing/1",
        **simulated_provenance("reindexing", arguments),
        "device": collect_environment()["cpu"],
        "threads": 1,
        "load_before": os.getloadavg()[0],
    }
    flags = ["--threads", "1", "--kv-bytes", str(KV_BYTES), "--embedding-cache-bytes", "0"]
    with tempfile.TemporaryDirectory() as scratch:
        server = run_server(
            [*flags, *shlex.split(args.serve_flags)],
            Path(scratch),
            server_core,
            backend="engine",
            variables=fresh_cache(Path(scratch)),
        )
        runner = asyncio.Runner(loop_factory=uvloop.new_event_loop)
        with server as started, on_core(client_core), runner:
            results |= runner.run(measure(started, args))
    for arm, found in results["arms"].items():
        print(arm, found)
    write_results(args, results, "Queries beside a re-indexing", body(results))


if __name__ == "__main__":
    main()
