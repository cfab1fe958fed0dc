"""Compare requests on transferred KV blocks with requests that compute their context.

    draftgate bench kv --json OUT

Two engines run in this process, each in its own process, or each on its own node. The first engine
runs a request with a random prompt. The second engine continues in one of two cases:

- `resume`: it resumes the request.
- `prefix_fetch`: it gets a new request, whose prompt is the same except for its last tokens.

It does so in two ways, in turns: it computes the context, or it pulls the blocks from the first
engine and computes the rest. The time ends with the first new token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import ExitStack, aclosing, asynccontextmanager
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

from msgspec import structs

from bench.harness.provenance import provenance, require_quiet
from bench.harness.servers import run_server
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.kv_transfer.transfer import Transfer
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.testing import make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.backends.worker_config import WorkerConfig

CONTEXTS: Final = (256, 1000, 4000, 8000)
PREFIXES: Final = (1000, 4000)
ROUNDS: Final = 5
KEPT_TOKENS: Final = 20
"""Output tokens before the move."""

TOUCHED_TOKENS: Final = 1000
"""Tokens of each prompt that fills the KV memory before the measurement."""

TAIL_TOKENS: Final = 40
"""Tokens of a prompt after the prefix that it shares."""

PLACES: Final = ("one_process", "own_processes", "nodes")

CONFIG: Final = WorkerConfig(speculation="off", threads=1, max_model_len=8192, kv_bytes=128 << 20)
SERVE: Final = (
    *("--speculation", "off", "--threads", "1"),
    *("--max-model-len", "8192", "--kv-bytes", str(128 << 20)),
)
"""Flags of `draftgate serve` with the settings of `CONFIG`."""

Worker = EngineBackend | PeerBackend


Continuation = Callable[
    [GenerationRequest, tuple[int, ...], Random], tuple[GenerationRequest, list[int]]
]
"""Returns the second request and the tokens whose blocks it can pull, from the first request and
its output."""


def resumed(
    request: GenerationRequest, kept: tuple[int, ...], _draw: Random
) -> tuple[GenerationRequest, list[int]]:
    """Continue a request after its output."""
    rest = replace(request, resumed=(ResumedChoice(0, kept),))
    return rest, [*request.prompt_ids, *kept][:-1]  # the last token is always computed


def new_tail(
    request: GenerationRequest, _kept: tuple[int, ...], draw: Random
) -> tuple[GenerationRequest, list[int]]:
    """Return a new request that shares the prompt, and adds a tail."""
    prefix = list(request.prompt_ids)
    return replace(request, prompt_ids=compact([*prefix, *_tokens(draw, TAIL_TOKENS)])), prefix


async def measure(
    contexts: Sequence[int],
    prefixes: Sequence[int],
    rounds: int,
    place: str,
    *,
    touches: bool = False,
) -> dict[str, dict[str, Any]]:
    """Return the seconds of both ways and the bandwidths of the pulls, by case and length.

    Args:
        contexts: lengths of resumed prompts, in tokens.
        prefixes: lengths of shared prefixes, in tokens.
        place: where the engines run, one of `PLACES`.
        touches: whether to use all KV memory beforehand, as an engine that has run for a while.
    """
    async with _engines(place) as (source, sink):
        if touches:
            await _touch(source)
            await _touch(sink)
        found: dict[str, dict[str, Any]] = {}
        for case, lengths, continuation in (
            ("resume", contexts, resumed),
            ("prefix_fetch", prefixes, new_tail),
        ):
            found[case] = {
                str(tokens): await _measure_case(source, sink, tokens, rounds, continuation)
                for tokens in lengths
            }
        return found


@asynccontextmanager
async def _engines(place: str) -> AsyncGenerator[tuple[Worker, Worker], None]:
    """Run two engines."""
    with ExitStack() as stack:
        backends: list[Worker] = []
        for _ in range(2):
            if place == "nodes":
                folder = Path(stack.enter_context(TemporaryDirectory()))
                server = stack.enter_context(run_server(SERVE, folder, backend="engine"))
                backends.append(PeerBackend(server.url, None))
            else:
                own_process = place == "own_processes"
                backends.append(EngineBackend(structs.replace(CONFIG, own_process=own_process)))
        try:
            await asyncio.gather(*(backend.start() for backend in backends))
            yield backends[0], backends[1]
        finally:
            await asyncio.gather(*(backend.stop() for backend in backends))


async def _touch(engine: Worker) -> None:
    """Write to all KV blocks of an engine.

    The system provides memory at its first use, which takes 2 ms for the 384 KiB of a chunk in a
    virtual machine, and thus longer than the transfer (AVX2 machine, 2026-11-23).
    """
    draw = Random("touch")
    for _ in range(engine.card.pool_tokens // TOUCHED_TOKENS + 1):
        prompt = compact(_tokens(draw, TOUCHED_TOKENS))
        await _first_tokens(engine, replace(make_request(engine), prompt_ids=prompt), 1)


async def _measure_case(
    source: Worker, sink: Worker, tokens: int, rounds: int, continuation: Continuation
) -> dict[str, Any]:
    draw = Random(f"{continuation.__name__}/{tokens}")  # no prompt is cached from another case
    seconds: dict[str, list[float]] = {"compute_s": [], "pull_s": [], "transfer_s": []}
    num_bytes = 0
    for turn in range(rounds):
        for pulls in (True, False) if turn % 2 else (False, True):
            prompt = compact(_tokens(draw, tokens))
            request = replace(make_request(source, max_tokens=60), prompt_ids=prompt)
            kept, _ = await _first_tokens(source, request, KEPT_TOKENS)
            second, known = continuation(request, kept, draw)
            began_s = time.perf_counter()
            if pulls:
                num_bytes = await _pull(source, sink, known)
                seconds["transfer_s"].append(time.perf_counter() - began_s)
            second = replace(second, request_id=f"{request.request_id}.1")
            _, ended_s = await _first_tokens(sink, second, 1)
            seconds["pull_s" if pulls else "compute_s"].append(ended_s - began_s)
    medians = {name: median(taken) for name, taken in seconds.items()}
    return {
        **{name: [round(one, 5) for one in taken] for name, taken in seconds.items()},
        "compute_over_pull": round(medians["compute_s"] / medians["pull_s"], 2),
        "gb_per_s": round(num_bytes / medians["transfer_s"] / 1e9, 3),
    }


def _tokens(draw: Random, count: int) -> list[int]:
    return [draw.randrange(300, 2000) for _ in range(count)]


async def _first_tokens(
    backend: Worker, request: GenerationRequest, tokens: int
) -> tuple[tuple[int, ...], float]:
    """Return the first tokens of a request and the time of the last of them. Cancel the rest."""
    found: list[int] = []
    async with aclosing(backend.generate(request)) as deltas:
        async for delta in deltas:
            found.extend(delta.token_ids)
            if len(found) >= tokens:
                break
    ended_s = time.perf_counter()
    while backend.load().running:  # noqa: ASYNC110 - the next measurement needs an idle engine
        await asyncio.sleep(0.001)
    return tuple(found), ended_s


async def _pull(source: Worker, sink: Worker, tokens: list[int]) -> int:
    """Transfer the blocks of a context, and return their bytes."""
    form = source.card.kv_format
    assert form is not None
    hashes: list[bytes] = []
    extend_chain(hashes, "", tokens, form.block_tokens)
    first = await sink.begin_import(hashes)
    transfer = Transfer(source, sink, hashes, first)
    await transfer.run()
    return transfer.blocks * form.block_bytes


def main(arguments: list[str] | None = None) -> None:
    """Measure engines in all places, and write the JSON."""
    parser = argparse.ArgumentParser(prog="draftgate bench kv", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--prefixes", type=int, nargs="+", default=PREFIXES)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--places", nargs="+", choices=PLACES, default=PLACES)
    parser.add_argument("--allow-busy", action="store_true")
    args = parser.parse_args(arguments)
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    found = {}
    for name in args.places:
        # Nodes run on this event loop, too.
        import uvloop

        with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
            parts = args.contexts, args.prefixes, args.rounds, name
            found[name] = runner.run(measure(*parts, touches=True))
        for case, by_length in found[name].items():
            for tokens, result in by_length.items():
                ratio, speed = result["compute_over_pull"], result["gb_per_s"]
                print(f"{name}, {case}: {tokens} tokens, {ratio} times as fast, {speed} GB/s")
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**facts, "cases": found}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
