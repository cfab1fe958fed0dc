"""Measure two models on one device, with turns and without.

    python -m bench.engine.turns --json OUT --encoder DIR [--threads N]

The shipped model generates, and the encoder embeds queries and documents. Generations and queries
arrive at random times, and a fixed number of documents is always in flight, as batch work. Rounds
with turns and without alternate. Without turns, the threads of both engines run at the same time.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from dataclasses import dataclass, field, replace
from itertools import count
from pathlib import Path
from typing import Any, Final

import numpy as np

from bench.harness.prompts import held_out_prompts
from bench.harness.provenance import provenance, require_quiet
from draftgate.backends.engine.device_turns import DeviceTurns
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.loop import EngineLoop
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.token_ids import compact
from draftgate.backends.types import Delta, GenerationRequest, SamplingParams, Task
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import BATCH_PRIORITY, RequestView, ServiceLevel, WorkerLoad

NEW_TOKENS: Final = 96
QUERY_TOKENS: Final = 16
DOCUMENT_TOKENS: Final = 100
DOCUMENTS: Final = 16
"""Number of documents in flight."""

ARMS: Final = ("turns", "no_turns")


@dataclass
class Samples:
    """The measurements of an arm.

    Attributes:
        query_s: seconds from the arrival of each query to its vector.
        first_token_s: seconds from the arrival of each generation to its first token.
        tokens_per_s: rate of each generation after its first token.
        documents: number of embedded documents.
        seconds: duration of all rounds.
    """

    query_s: list[float] = field(default_factory=list)
    first_token_s: list[float] = field(default_factory=list)
    tokens_per_s: list[float] = field(default_factory=list)
    documents: int = 0
    seconds: float = 0.0

    def summary(self) -> dict[str, Any]:
        """Return the results as JSON values."""

        def milliseconds(values_s: list[float], percent: float) -> float:
            return round(1e3 * float(np.percentile(values_s, percent)), 1)

        return {
            "queries": len(self.query_s),
            "query_ms": {f"p{p}": milliseconds(self.query_s, p) for p in (50, 99)},
            "generations": len(self.tokens_per_s),
            "first_token_ms": {f"p{p}": milliseconds(self.first_token_s, p) for p in (50, 99)},
            "stream_tokens_per_s": round(float(np.mean(self.tokens_per_s)), 1),
            "documents_per_s": round(self.documents / self.seconds, 2),
        }


class Client:
    """Runs an engine in its thread and awaits its requests. Implements `loop.LoopEvents`."""

    def __init__(self, engine: LoadedEngine, turns: DeviceTurns) -> None:
        """Prepare the engine's thread. Call this in the event loop."""
        engine = replace(engine, turns=turns)
        self.thread = EngineLoop(lambda _progress: engine, self)
        self._event_loop = asyncio.get_running_loop()
        self._deltas: dict[str, asyncio.Queue[tuple[float, Delta] | BaseException]] = {}

    async def run(self, request: GenerationRequest) -> list[tuple[float, Delta]]:
        """Run a request, and return its deltas with their times in seconds.

        Raises:
            BaseException: the error that ended the engine.
        """
        queue = self._deltas[request.request_id] = asyncio.Queue()
        self.thread.submit(request)
        received: list[tuple[float, Delta]] = []
        try:
            while not received or received[-1][1].finish_reason is None:
                news = await queue.get()
                if isinstance(news, BaseException):
                    raise news
                received.append(news)
        finally:
            del self._deltas[request.request_id]
            self.thread.cancel(request.request_id)
        return received

    def loading(self, share: float) -> None:
        """Ignore progress, because the model is already loaded."""

    def ready(self, served: ServedModel) -> None:
        """Ignore the event, because the engine is ready from the start."""

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        """Pass on the deltas of a step with the time of their arrival."""
        now_s = time.perf_counter()
        for request_id, delta in batch:
            self._event_loop.call_soon_threadsafe(self._put, request_id, (now_s, delta))

    def adapter_failed(self, request_id: str, reason: str) -> None:
        """Fail, because the requests need no adapters."""
        self.failed(RuntimeError(reason))

    def failed(self, error: BaseException) -> None:
        """Pass on the error to all requests."""
        for request_id in list(self._deltas):
            self._event_loop.call_soon_threadsafe(self._put, request_id, error)

    def _put(self, request_id: str, news: tuple[float, Delta] | BaseException) -> None:
        if request_id in self._deltas:
            self._deltas[request_id].put_nowait(news)


class Requests:
    """Creates the requests of the workload."""

    def __init__(self, writer: LoadedEngine) -> None:
        """Take the prompts from held-out code."""
        self._prompts = held_out_prompts(writer.worker.tokenizer, 32)
        self._ids = count()
        self._plan = speculation_policy("off").decide(
            RequestView(1, NEW_TOKENS, 0.0), writer.worker.load()
        )

    def generation(self) -> GenerationRequest:
        """Return a generation of `NEW_TOKENS` tokens."""
        number = next(self._ids)
        sampling = SamplingParams(NEW_TOKENS, number, ignore_eos=True)
        prompt = compact(self._prompts[number % len(self._prompts)])
        return GenerationRequest(f"r{number}", prompt, sampling, self._plan)

    def text(self, tokens: int, priority: int) -> GenerationRequest:
        """Return a text of this many tokens."""
        number = next(self._ids)
        ids = compact(tuple(2000 + (number + place) % 5000 for place in range(tokens)))
        sampling, service = SamplingParams(0, 0), ServiceLevel(priority=priority)
        return GenerationRequest(
            f"r{number}", ids, sampling, self._plan, task=Task.EMBED, service=service
        )


@asynccontextmanager
async def clients(engines: list[LoadedEngine], *, turns: bool) -> AsyncIterator[list[Client]]:
    """Run the engines, on one device if they take turns."""
    shared = DeviceTurns()
    running = [Client(each, shared if turns else DeviceTurns()) for each in engines]
    for client in running:
        client.thread.start()
    try:
        yield running
    finally:
        for client in running:
            client.thread.stop()
        for client in running:
            await asyncio.to_thread(client.thread.join)


async def arrivals(
    rate: float, until_s: float, seed: int, arrive: Callable[[], asyncio.Task[None]]
) -> None:
    """Start tasks at random times, as a Poisson process, and wait for their ends."""
    rng, tasks = random.Random(seed), []
    at_s = time.perf_counter() + rng.expovariate(rate)
    while at_s < until_s:
        await asyncio.sleep(at_s - time.perf_counter())
        tasks.append(arrive())
        at_s += rng.expovariate(rate)
    await asyncio.gather(*tasks)


async def run_round(
    engines: list[LoadedEngine], args: argparse.Namespace, number: int, arm: str, samples: Samples
) -> None:
    """Run one round of an arm, and add its measurements."""
    requests = Requests(engines[0])
    async with (
        clients(engines, turns=arm == "turns") as (writer, encoder),
        asyncio.TaskGroup() as g,
    ):
        begun_s = time.perf_counter()
        until_s = begun_s + args.seconds

        async def generate() -> None:
            arrived_s = time.perf_counter()
            deltas = await writer.run(requests.generation())
            (first_s, first), (last_s, _) = deltas[0], deltas[-1]
            samples.first_token_s.append(first_s - arrived_s)
            later = NEW_TOKENS - len(first.token_ids)
            samples.tokens_per_s.append(later / (last_s - first_s))

        async def query() -> None:
            arrived_s = time.perf_counter()
            ((ended_s, _),) = await encoder.run(requests.text(QUERY_TOKENS, 0))
            samples.query_s.append(ended_s - arrived_s)

        async def embed() -> None:
            while time.perf_counter() < until_s:
                ((ended_s, _),) = await encoder.run(requests.text(DOCUMENT_TOKENS, BATCH_PRIORITY))
                samples.documents += ended_s < until_s

        for _ in range(DOCUMENTS):
            g.create_task(embed())
        g.create_task(
            arrivals(args.generations, until_s, number, lambda: g.create_task(generate()))
        )
        g.create_task(arrivals(args.queries, until_s, ~number, lambda: g.create_task(query())))
    samples.seconds += args.seconds


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return the results of both arms."""
    shared = {"device": args.device, "threads": args.threads, "speculation": "off"}
    engines = [
        load_engine(WorkerConfig(model=model, kv_bytes=args.kv_bytes, **shared))
        for model in (None, args.encoder)
    ]
    samples = {arm: Samples() for arm in ARMS}
    for number in range(args.rounds):
        for arm in ARMS[:: -1 if number % 2 else 1]:
            asyncio.run(run_round(engines, args, number, arm, samples[arm]))
            print(number, arm, samples[arm].summary(), flush=True)
    return {
        "seconds": args.seconds,
        "rounds": args.rounds,
        "generations_per_s": args.generations,
        "queries_per_s": args.queries,
        "documents_in_flight": DOCUMENTS,
        **{arm: each.summary() for arm, each in samples.items()},
    }


def parser() -> argparse.ArgumentParser:
    """Return the parser of the command line."""
    made = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = made.add_argument
    add("--json", type=Path, required=True)
    add("--encoder", required=True, help="checkpoint of an embedding model, such as MiniLM")
    add("--device", default="auto")
    add("--threads", type=int, default=os.cpu_count(), help="threads of each engine")
    add("--kv-bytes", type=int, default=64 << 20)
    add("--rounds", type=int, default=3)
    add("--seconds", type=float, default=15.0, help="duration of a round of an arm")
    add("--generations", type=float, default=1.5, help="generations that arrive per second")
    add("--queries", type=float, default=4.0, help="queries that arrive per second")
    add("--allow-busy", action="store_true", help="measure even on a busy machine")
    return made


def main(arguments: list[str] | None = None) -> None:
    """Measure both arms, and write the JSON."""
    args = parser().parse_args(arguments)
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    result = {**facts, "threads": args.threads, **measure(args)}
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
