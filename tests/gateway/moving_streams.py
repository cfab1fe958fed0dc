"""Running streams that move between engines, and the comparison with undisturbed runs."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path
from random import Random
from typing import Any

import pytest

from draftgate.backends.base import KvEndpoint
from draftgate.backends.checkpoints import SHIPPED_MODEL, find_checkpoint
from draftgate.backends.core.prefix_cache import extend_chain
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.kv_transfer import turns
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GrammarKind, GrammarSpec, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.dispatch import moves
from draftgate.gateway.dispatch.dispatcher import RunningJob
from draftgate.gateway.dispatch.job import Job
from draftgate.policies.moves import MoveEnd
from draftgate.policies.types import SpeculationMode, WorkerLoad
from tests.gateway.harness import eventually
from tests.gateway.troubles import (
    NEVER_S,
    Choice,
    Dispatched,
    RecordingWatch,
    dispatching,
    run_job,
)

CONFIG = WorkerConfig(threads=1, kv_bytes=24 << 20, max_model_len=2048, speculation="auto")
OUTPUT_TOKENS = 160
PROMPT = "class Shape:\n    def area(self):\n        return self.width * self.height\n\n\n" * 8
LETTERS = GrammarSpec(GrammarKind.REGEX, "[a-z ]{600,800}")
GREEDY: dict[str, Any] = {"temperature": 0.0}

KINDS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "greedy": (GREEDY, {}),
    "seeded": ({"temperature": 0.9, "top_p": 0.95}, {}),
    "penalties": ({"frequency_penalty": 0.7}, {}),
    "stop": ({**GREEDY, "stop": ("zzz", "self.depth")}, {}),
    "several": ({"temperature": 0.8}, {"n": 2}),
    "logprobs": ({"temperature": 0.8, "logprobs": 2}, {}),
    "grammar": ({"temperature": 0.8}, {"grammar": LETTERS}),
    "off": (GREEDY, {"mode": SpeculationMode.OFF}),
    "ngram": (GREEDY, {"mode": SpeculationMode.NGRAM}),
    "draft_model": (GREEDY, {"mode": SpeculationMode.DRAFT_MODEL}),
    "sparse_self": (GREEDY, {"mode": SpeculationMode.SPARSE_SELF}),
    "prediction": (GREEDY, {"prediction_ids": True}),
}
"""Sampling parameters and other fields of a job of each kind."""


def quick_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let moves end within few steps of the small model, however slow this machine is."""
    monkeypatch.setattr(moves, "CHECK_INTERVAL_S", 0.001)
    monkeypatch.setattr(moves, "RETRY_S", 0.0)
    monkeypatch.setattr(moves, "MOVE_S", NEVER_S)
    monkeypatch.setattr(turns, "SERVING_SHARE", 1.0)
    monkeypatch.setattr(turns, "URGENT_SHARE", 1.0)
    monkeypatch.setattr(moves, "next_move", lambda views: 0 if views else None)


class SteppingEngine(EngineBackend):
    """An engine whose thread waits after each step until the event loop has run."""

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        super().stepped(batch, load)
        ran = threading.Event()
        self._on_event_loop(lambda event: event.set(), ran)
        ran.wait(10.0)  # the event loop itself may wait for the end of the thread


def job_of(
    kind: str, seed: int, output_tokens: int = OUTPUT_TOKENS, model: Path = SHIPPED_MODEL
) -> Job:
    tokenizer = Tokenizer(model)
    ids = compact(tokenizer.encode(f"# {seed}\n{PROMPT}"))
    sampling, fields = KINDS[kind]
    if fields.get("prediction_ids"):
        fields = {"prediction_ids": tuple(ids)}
    params = SamplingParams(1, seed=seed, ignore_eos="stop" not in sampling, **sampling)
    return Job(f"r{kind}{seed}", (ids,), params, output_tokens, tenant="t", **fields)


async def moved(dispatched: Dispatched, job: Job, draw: Random) -> tuple[list[Choice], Counter]:
    """Run a job and drain its worker at random tokens.

    Returns:
        Its choices, and the number of moves by their end.
    """
    watch, choices = RecordingWatch(), [Choice() for _ in range(job.n)]
    left = draw.randint(1, 40)
    async with dispatched.dispatcher.run(job, watch=watch) as run:
        async for delta in run.deltas:
            choices[delta.choice].append(delta)
            left -= len(delta.token_ids)
            if left <= 0:
                drain_worker_of(run, dispatched)
                left = draw.randint(10, 80)
    for worker in dispatched.fleet.workers:
        worker.drained = False
    await eventually(dispatched.is_idle)
    return choices, Counter(move.end for move in watch.moves)


def drain_worker_of(run: RunningJob, dispatched: Dispatched) -> None:
    """Drain the worker of a run, and use the other worker again."""
    for worker in dispatched.fleet.workers:
        worker.drained = worker is run.holds[0].worker


async def compared_blocks(dispatched: Dispatched, job: Job, plain: Job, choices: list) -> int:
    """Compare the blocks of a moved job with those of a run that computed all of them.

    Returns:
        The number of compared blocks on all workers.
    """
    compared = 0
    for choice in choices:
        tokens = [*job.prompts[0], *choice.token_ids][:-1]
        for worker in dispatched.fleet.workers:
            found = await bytes_of(worker.kv, job.tenant, tokens)
            for other in dispatched.fleet.workers:
                computed = await bytes_of(other.kv, plain.tenant, tokens)
                size = min(len(found), len(computed))
                assert found[:size] == computed[:size]
                compared += size // worker.kv_format.block_bytes
    return compared


async def bytes_of(worker: KvEndpoint, tenant: str, tokens: list[int]) -> bytes:
    """Return the bytes of the leading blocks that a worker holds."""
    hashes: list[bytes] = []
    extend_chain(hashes, tenant, tokens, 16)
    return b"".join([bytes(chunk.data) async for chunk in worker.pull_blocks(hashes)])


async def move_streams(
    kinds: Iterable[str],
    output_tokens: int = OUTPUT_TOKENS,
    enough: int = 1000,
    *,
    config: WorkerConfig = CONFIG,
) -> Counter:
    """Move one stream of each kind until there were enough moves.

    The texts, tokens, log probabilities and blocks of moved streams must equal those of undisturbed
    runs.

    Returns:
        The number of moves by their end.
    """
    ends, compared, model = Counter[MoveEnd](), 0, find_checkpoint(config.model)
    async with dispatching(SteppingEngine, 2, config=config) as dispatched:
        for seed, kind in enumerate(kinds):
            job = job_of(kind, seed, output_tokens, model)
            choices, found = await moved(dispatched, job, Random(seed))
            plain = replace(job, request_id=f"p{seed}", tenant="plain")
            assert choices == await run_job(dispatched.dispatcher, plain), (kind, seed)
            compared += await compared_blocks(dispatched, job, plain, choices)
            ends += found
            if ends[MoveEnd.MOVED] >= enough:
                break
    assert compared
    return ends
