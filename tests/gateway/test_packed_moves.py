"""Streams of engines with packed weights on other engines: moves, failover, and other packings."""

from __future__ import annotations

import os
from dataclasses import replace
from itertools import repeat
from pathlib import Path
from typing import Any

import pytest
from msgspec import structs

from draftgate.backends.checkpoints import find_checkpoint
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.operators.compiler import compiler_version
from draftgate.backends.gguf import folder
from draftgate.backends.kv_transfer.format import format_refusal
from draftgate.backends.kv_transfer.transfer import TransferEnd
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.moves import MoveEnd
from tests.gateway.harness import needs_engine
from tests.gateway.moving_streams import (
    CONFIG,
    SteppingEngine,
    drain_worker_of,
    job_of,
    move_streams,
    quick_moves,
)
from tests.gateway.random_gguf import write_random_gguf
from tests.gateway.test_kv_fetch import CutOffEngine, resumed
from tests.gateway.troubles import Choice, RecordingWatch, dispatching, run_job

pytestmark = [
    needs_engine,
    pytest.mark.skipif(compiler_version() is None, reason="needs gcc"),
]

REAL = Path(os.environ.get("REAL_MODELS", "")) / "smollm2-q4_1.gguf"
PACKED = structs.replace(CONFIG, quantization="q8_0")


@pytest.fixture(autouse=True)
def _quick_moves(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let moves end within few steps."""
    quick_moves(monkeypatch)


@pytest.fixture
def random_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> WorkerConfig:
    """The settings of workers with a random model in Q4_1."""
    monkeypatch.setattr(folder, "cache_directory", lambda: tmp_path / "cache")
    write_random_gguf(tmp_path / "random.gguf", kind="Q4_1")
    return structs.replace(CONFIG, model=str(tmp_path / "random.gguf"))


async def test_moved_streams_of_a_packed_file_keep_their_text(random_model: WorkerConfig) -> None:
    """Texts, log probabilities and blocks of streams that move between workers with the packed
    blocks of a file equal those of undisturbed runs."""
    ends = await move_streams(["several", "logprobs", "ngram", "sparse_self"], config=random_model)
    check_moved(ends)


async def test_moved_streams_of_quantised_weights_keep_their_text() -> None:
    """The same holds for weights that are quantised at load, with drafts of a draft model."""
    check_moved(await move_streams(["penalties", "draft_model"], config=PACKED))


async def test_moved_streams_of_a_real_model_keep_their_text() -> None:
    """The same holds for SmolLM2 in Q4_1."""
    if not REAL.is_file():
        pytest.skip("no real models")
    config = structs.replace(CONFIG, model=str(REAL), kv_bytes=64 << 20)
    check_moved(await move_streams(repeat("logprobs", 6), enough=1, config=config))


def check_moved(ends: Any) -> None:
    """Check that streams have moved, and that no destination computed other tokens."""
    assert ends[MoveEnd.MOVED]
    assert not ends[MoveEnd.REJECTED]
    assert not ends[MoveEnd.FAILED]


@pytest.mark.usefixtures("_always_pulls")
async def test_resumed_streams_of_packed_workers_keep_their_text(
    random_model: WorkerConfig,
) -> None:
    """A stream that loses its worker continues with its blocks on a worker of its class."""
    job = job_of("logprobs", 3, model=find_checkpoint(random_model.model))
    outcome = await resumed(job, CutOffEngine, random_model, cut_after=2)
    async with dispatching(EngineBackend, 1, config=random_model) as dispatched:
        assert outcome.choices == await run_job(dispatched.dispatcher, job)
    (change,) = outcome.watch.resumes
    assert change.same_numerics_class
    assert outcome.fetch.end is TransferEnd.COMPLETE
    assert outcome.fetch.blocks == (len(job.prompts[0]) + change.kept_tokens - 1) // BLOCK_TOKENS


class OtherPacking(CutOffEngine):
    """The second worker packs its weights, and the first one does not."""

    def __init__(self, config: WorkerConfig, *args: Any) -> None:
        name = ("none", "q8_0")[config.device_index]
        super().__init__(structs.replace(config, quantization=name), *args)


class SteppingOtherPacking(OtherPacking, SteppingEngine):
    """Such workers, which wait for the event loop after each step."""


async def test_streams_never_move_to_another_packing() -> None:
    """A stream stays on its worker if only workers of another packing could take it."""
    job = job_of("logprobs", 1)
    async with dispatching(SteppingOtherPacking, 2, config=CONFIG) as dispatched:
        first, second = dispatched.fleet.workers
        assert "numerics_class" in str(format_refusal(first.kv_format, second.kv_format))
        watch, choice = RecordingWatch(), Choice()
        second.drained = True  # so that the stream begins on the first worker
        async with dispatched.dispatcher.run(job, watch=watch) as run:
            async for delta in run.deltas:
                choice.append(delta)
                drain_worker_of(run, dispatched)
        assert not watch.moves
        assert not watch.resumes
        first.drained, second.drained = False, True
        plain = replace(job, request_id="plain", tenant="plain")
        assert [choice] == await run_job(dispatched.dispatcher, plain)


@pytest.mark.usefixtures("_always_pulls")
async def test_resume_on_another_packing_is_reported_and_takes_no_blocks() -> None:
    """A stream that continues on a worker of another packing is reported as one of another
    class, and its new worker computes the context itself."""
    job = job_of("greedy", 2)
    outcome = await resumed(job, OtherPacking, CONFIG, cut_after=2)
    (change,) = outcome.watch.resumes
    assert not change.same_numerics_class
    assert not outcome.watch.fetches
    assert len(outcome.choices[0].token_ids) == job.max_tokens
    assert outcome.cached_tokens == 0
