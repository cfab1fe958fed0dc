"""Compare resuming a request on transferred KV blocks with computing its context again.

    draftgate bench kv --json OUT

Two engines run in this process, or each in its own process. The first engine runs a request with a
random prompt. The second engine resumes the request in two ways, in turns: it computes the context,
or it pulls the blocks from the first engine and computes the last block. The time ends with the
first new token.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from contextlib import aclosing
from dataclasses import replace
from pathlib import Path
from random import Random
from statistics import median
from typing import Any, Final

from bench.harness.provenance import provenance, require_quiet
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.kv_transfer.transfer import Transfer
from draftgate.backends.testing import make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.backends.worker_config import WorkerConfig

CONTEXTS: Final = (256, 1000, 4000, 8000)
ROUNDS: Final = 5
KEPT_TOKENS: Final = 20
"""Output tokens before the move."""


async def measure(contexts: tuple[int, ...], rounds: int, *, own_process: bool) -> dict[str, Any]:
    """Return the seconds of both ways for each context length, and the bandwidths of the pulls."""
    config = WorkerConfig(
        speculation="off",
        threads=1,
        max_model_len=8192,
        kv_bytes=128 << 20,
        own_process=own_process,
    )
    source, sink = EngineBackend(config), EngineBackend(config)
    await asyncio.gather(source.start(), sink.start())
    try:
        return {
            str(tokens): await _measure_context(source, sink, tokens, rounds) for tokens in contexts
        }
    finally:
        await asyncio.gather(source.stop(), sink.stop())


async def _measure_context(
    source: EngineBackend, sink: EngineBackend, tokens: int, rounds: int
) -> dict[str, Any]:
    draw = Random(tokens)
    seconds: dict[str, list[float]] = {"compute_s": [], "pull_s": [], "transfer_s": []}
    num_bytes = 0
    for turn in range(rounds):
        for pulls in (True, False) if turn % 2 else (False, True):
            prompt = [draw.randrange(300, 2000) for _ in range(tokens)]
            request = replace(make_request(source, max_tokens=60), prompt_ids=compact(prompt))
            kept, _ = await _first_tokens(source, request, KEPT_TOKENS)
            began_s = time.perf_counter()
            if pulls:
                num_bytes = await _pull(source, sink, [*prompt, *kept])
                seconds["transfer_s"].append(time.perf_counter() - began_s)
            rest = replace(request, request_id=f"{request.request_id}.1")
            rest = replace(rest, resumed=(ResumedChoice(0, kept),))
            _, ended_s = await _first_tokens(sink, rest, 1)
            seconds["pull_s" if pulls else "compute_s"].append(ended_s - began_s)
    medians = {name: median(taken) for name, taken in seconds.items()}
    return {
        **{name: [round(one, 5) for one in taken] for name, taken in seconds.items()},
        "compute_over_pull": round(medians["compute_s"] / medians["pull_s"], 2),
        "gb_per_s": round(num_bytes / medians["transfer_s"] / 1e9, 3),
    }


async def _first_tokens(
    backend: EngineBackend, request: GenerationRequest, tokens: int
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


async def _pull(source: EngineBackend, sink: EngineBackend, tokens: list[int]) -> int:
    """Transfer the blocks of a context, and return their bytes."""
    form = source.card.kv_format
    assert form is not None
    hashes: list[bytes] = []
    extend_chain(hashes, "", tokens[:-1], form.block_tokens)
    first = await sink.begin_import(hashes)
    transfer = Transfer(source, sink, hashes, first)
    await transfer.run()
    return transfer.blocks * form.block_bytes


def main(arguments: list[str] | None = None) -> None:
    """Measure engines in one process and in their own processes, and write the JSON."""
    parser = argparse.ArgumentParser(prog="draftgate bench kv", description=__doc__)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--contexts", type=int, nargs="+", default=CONTEXTS)
    parser.add_argument("--rounds", type=int, default=ROUNDS)
    parser.add_argument("--allow-busy", action="store_true")
    args = parser.parse_args(arguments)
    facts = provenance()
    require_quiet(facts, allow_busy=args.allow_busy)
    contexts, found = tuple(args.contexts), {}
    for name, own_process in (("one_process", False), ("own_processes", True)):
        found[name] = asyncio.run(measure(contexts, args.rounds, own_process=own_process))
        for tokens, result in found[name].items():
            ratio, speed = result["compute_over_pull"], result["gb_per_s"]
            print(f"{name}: {tokens} tokens, {ratio} times as fast, {speed} GB/s", flush=True)
    if args.json:
        args.json.parent.mkdir(parents=True, exist_ok=True)
        text = json.dumps({**facts, "contexts": found}, indent=1)
        args.json.write_text(text + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
