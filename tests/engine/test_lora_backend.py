"""Adapters of the engine backend: mixed batches, the prefix cache, resumes and eviction."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import AsyncIterator, Iterable, Iterator
from contextlib import aclosing
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import pytest_asyncio
import torch
from msgspec import structs

from bench.harness.prompts import held_out_prompts
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.lora.weights import LayerPairs, LoraCheckpoint
from draftgate.backends.errors import BackendFailed, CheckpointError, RequestRejected
from draftgate.backends.types import GenerationRequest, ResumedChoice
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import SpeculationMode
from draftgate.policies.values import replace
from tests.engine.harness import request
from tests.engine.random_adapters import write_adapter, write_demo_adapters
from tests.gateway.harness import PATIENCE_S, until

TOKENS = 24
MODES = (SpeculationMode.NGRAM, SpeculationMode.SPARSE_SELF, SpeculationMode.DRAFT_MODEL)

pytestmark = pytest.mark.asyncio(loop_scope="module")


@dataclass
class Result:
    """The output of a request."""

    tokens: list[int] = field(default_factory=list)
    cached_tokens: int = 0
    accepted: int = 0


def config(adapters: Iterable[Path], **changes: object) -> WorkerConfig:
    base = WorkerConfig(device="cpu", max_model_len=512, kv_bytes=3 << 20, threads=1, max_loras=2)
    return structs.replace(base, loras=tuple(map(str, adapters)), **changes)


@pytest.fixture(scope="module")
def adapters(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    return write_demo_adapters(tmp_path_factory.mktemp("adapters"))


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def backend(adapters: list[Path]) -> AsyncIterator[EngineBackend]:
    """An engine with three adapters, of which two fit into memory, and 32 KV blocks."""
    engine = EngineBackend(config(adapters))
    await engine.start()
    try:
        yield engine
    finally:
        await engine.stop()


def digests(backend: EngineBackend) -> list[str]:
    """Return an empty digest, for the model alone, then those of the adapters."""
    return ["", *(adapter.digest for adapter in backend.card.capabilities.adapters)]


async def run(backend: EngineBackend, generation: GenerationRequest) -> Result:
    backend.check(generation)
    result = Result()
    async with aclosing(generate(backend, generation)) as deltas:
        async for delta in deltas:
            result.tokens.extend(delta.token_ids)
            result.cached_tokens += delta.cached_tokens
            if delta.outcome is not None:
                result.accepted += delta.outcome.num_accepted_tokens
    return result


def generation(
    backend: EngineBackend, name: str, adapter: str, prompt: str, policy: str, **more: object
) -> GenerationRequest:
    made = request(
        *(name, backend.tokenizer.encode(prompt), speculation_policy(policy)),
        **{"max_tokens": TOKENS, **more},
    )
    return replace(made, adapter=adapter)


async def test_mixed_batch_gives_each_request_its_own_text(backend: EngineBackend) -> None:
    """Requests with and without adapters have the text that they have alone and without drafts,
    although some wait for a slot."""
    prompts = [
        backend.tokenizer.decode(ids) for ids in held_out_prompts(backend.tokenizer, 2, most=80)
    ]
    names = digests(backend)

    def requests(policy: str, tenant: str) -> list[GenerationRequest]:
        return [
            replace(
                generation(
                    backend,
                    f"{policy}-{index}",
                    names[index % 4],
                    prompts[index // 4],
                    policy,
                    seed=index,
                    temperature=0.8 if index % 3 else 0.0,
                    mode=SpeculationMode.OFF if policy == "off" else MODES[index // 4],
                ),
                tenant=tenant,
            )
            for index in range(8)
        ]

    alone = [await run(backend, each) for each in requests("off", "alone")]
    mixed = await asyncio.gather(*(run(backend, each) for each in requests("fixed:4", "mixed")))
    assert [one.tokens for one in mixed] == [one.tokens for one in alone]
    assert sum(one.accepted for one in mixed) > 0
    assert len({tuple(one.tokens) for one in alone}) == len(alone)


async def test_prefixes_are_shared_only_within_an_adapter(backend: EngineBackend) -> None:
    """A prompt that is cached for an adapter is computed again for another one."""
    prompt = "def area(width, height):\n    return width * height\n" * 4
    first, second = digests(backend)[1:3]
    results = [
        await run(backend, generation(backend, f"cached-{place}", adapter, prompt, "off"))
        for place, adapter in enumerate((first, "", second, first, "", second))
    ]
    assert [one.cached_tokens > 0 for one in results] == [False] * 3 + [True] * 3
    assert [one.tokens for one in results[:3]] == [one.tokens for one in results[3:]]


async def test_resumed_request_continues_with_its_adapter(backend: EngineBackend) -> None:
    """The tokens after a resume are those of an undisturbed run."""
    adapter = digests(backend)[3]
    whole = generation(backend, "whole", adapter, "import os\n", "off", temperature=0.8)
    expected = (await run(backend, whole)).tokens
    resumed = (ResumedChoice(0, tuple(expected[:15])),)
    rest = await run(backend, replace(whole, request_id="rest", resumed=resumed))
    assert expected[15:] == rest.tokens


async def test_unknown_adapter_is_rejected(backend: EngineBackend) -> None:
    """A worker rejects a request for an adapter that it does not have."""
    with pytest.raises(RequestRejected, match="lacks the LoRA adapter"):
        backend.check(generation(backend, "unknown", "0123", "x = 1\n", "off"))


async def test_adapter_that_cannot_be_loaded_ends_only_its_requests(tmp_path: Path) -> None:
    """Requests for other adapters, and for the model alone, run as before. The error names the
    adapter. The engine runs in its own process."""
    written = write_demo_adapters(tmp_path)
    engine = EngineBackend(config(written, own_process=True))
    await engine.start()
    try:
        (written[0] / "adapter_model.safetensors").unlink()
        plain, lost, other = (
            generation(engine, str(place), digest, "x = 1\n", "off")
            for place, digest in enumerate(digests(engine)[:3])
        )
        results = await asyncio.gather(
            *(run(engine, one) for one in (plain, lost, other)), return_exceptions=True
        )
        assert isinstance(results[1], BackendFailed)
        assert "adapter-0" in str(results[1])
        assert [len(results[place].tokens) for place in (0, 2)] == [TOKENS, TOKENS]
        assert engine.failure is None
    finally:
        await engine.stop()


async def test_slow_load_delays_only_its_requests(
    adapters: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While an adapter is read, other requests run, and the worker does not seem to hang. A stop
    does not wait for the load."""
    go_on, read = threading.Event(), LoraCheckpoint.read

    def held(checkpoint: LoraCheckpoint, dtype: torch.dtype) -> Iterator[LayerPairs]:
        go_on.wait()
        return read(checkpoint, dtype)

    monkeypatch.setattr(LoraCheckpoint, "read", held)
    engine = EngineBackend(config(adapters))
    await engine.start()
    try:
        plain, slow, lost = (
            generation(engine, str(place), digest, "x = 1\n", "off")
            for place, digest in enumerate(digests(engine)[:3])
        )
        waiting = asyncio.create_task(run(engine, slow))
        await until(lambda: engine.load().adapter_waiting == 1)
        assert engine.load().steps is None
        assert len((await run(engine, plain)).tokens) == TOKENS
        go_on.set()
        assert len((await waiting).tokens) == TOKENS
        await until(lambda: engine.load().steps is not None)
        go_on.clear()
        waiting = asyncio.create_task(run(engine, lost))
        await until(lambda: engine.load().adapter_waiting == 1)
        async with asyncio.timeout(PATIENCE_S):
            await engine.stop()
        with pytest.raises(BackendFailed):
            await waiting
    finally:
        go_on.set()
        await engine.stop()


async def test_adapter_of_another_model_fails_the_start(tmp_path: Path) -> None:
    """The error names the tensor whose shape does not fit the model."""
    write_adapter(tmp_path, {"model.layers.0.self_attn.q_proj": (8, 8)}, layers_to_transform=0)
    engine = EngineBackend(config([tmp_path]))
    with pytest.raises(CheckpointError, match=r"q_proj.lora_A.weight has shape \(4, 8\)"):
        await engine.start()
    await engine.stop()
