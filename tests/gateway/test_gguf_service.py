"""Chats with models in GGUF files over HTTP, compared with the engine that the test calls."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import httpx
import pytest
from msgspec import structs

from draftgate.backends.engine.backend import EngineBackend
from draftgate.backends.engine.operators.compiler import compiler_version
from draftgate.backends.gguf import folder
from draftgate.backends.testing import collect, make_request
from draftgate.backends.token_ids import compact
from draftgate.backends.types import SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from tests.cluster.nodes import NodeProcess
from tests.examples import grid
from tests.gateway.harness import client, events, needs_engine, running
from tests.gateway.random_gguf import write_random_gguf

pytestmark = [
    needs_engine,
    pytest.mark.skipif(compiler_version() is None, reason="needs gcc"),
]

REAL = Path(os.environ.get("REAL_MODELS", "")) / "smollm2-q4_1.gguf"
CHAT = "/v1/chat/completions"
CONFIG = WorkerConfig(threads=1, kv_bytes=48 << 20, max_model_len=512, device="cpu")
SAMPLINGS: dict[str, dict[str, Any]] = {
    "greedy": {"temperature": 0.0},
    "seeded": {"temperature": 0.8, "top_p": 0.95, "seed": 7},
}
TOKENS = 48
"""Maximum number of tokens of an answer."""

QUESTIONS = ("What is the capital of France?", "Say hello.")
PROMPT = list(range(20, 60))
PACKED = grid(("Q4_0", "Q4_1", "Q5_0", "Q5_1", "Q8_0"), quick=lambda kind: kind == "Q4_1")


@dataclass(frozen=True)
class Answer:
    """The part of a response that must depend neither on drafts nor on streaming."""

    text: str
    finish_reason: str
    tokens: int


async def answer(http: httpx.AsyncClient, body: dict[str, Any], *, stream: bool) -> Answer:
    """Ask a question, and return the answer."""
    if not stream:
        response = await http.post(CHAT, json=body)
        assert response.status_code == httpx.codes.OK, response.text
        found = response.json()
        (choice,) = found["choices"]
        text = choice["message"]["content"]
        return Answer(text, choice["finish_reason"], found["usage"]["completion_tokens"])
    options = {"stream": True, "stream_options": {"include_usage": True}}
    response = await http.post(CHAT, json={**body, **options})
    *chunks, done = events(response.text)
    assert done == "[DONE]"
    choices = [choice for chunk in chunks for choice in chunk["choices"]]
    text = "".join(choice["delta"].get("content") or "" for choice in choices)
    (reason,) = {choice["finish_reason"] for choice in choices} - {None}
    (usage,) = [chunk["usage"] for chunk in chunks if chunk.get("usage")]
    return Answer(text, reason, usage["completion_tokens"])


async def called(config: WorkerConfig, prompts: list[list[int]]) -> list[Answer]:
    """Return what an engine without a gateway and without drafts answers to each prompt, greedy
    and seeded."""
    engine = EngineBackend(config)
    await engine.start()
    try:
        answers = []
        for prompt in prompts:
            for sampling in SAMPLINGS.values():
                params = SamplingParams(TOKENS, **{"seed": 0, **sampling})
                request = make_request(engine)
                request = replace(request, prompt_ids=compact(prompt), sampling=params)
                (found,) = await collect(engine, request)
                reason = found.finish_reason.value
                answers.append(Answer(found.text, reason, len(found.token_ids)))
        return answers
    finally:
        await engine.stop()


async def check_answers(http: httpx.AsyncClient, config: WorkerConfig) -> list[Answer]:
    """Check that all ways to ask have one answer, which is that of the engine, and return them."""
    prompts, answers = [], []
    for question in QUESTIONS:
        messages = [{"role": "user", "content": question}]
        tokenized = await http.post("/tokenize", json={"messages": messages})
        prompts.append(tokenized.json()["tokens"])
        for sampling in SAMPLINGS.values():
            body = {"messages": messages, "max_tokens": TOKENS, **sampling}
            ways = [
                await answer(http, {**body, "speculation": {"mode": mode}}, stream=stream)
                for mode in ("auto", "off")
                for stream in (False, True)
            ]
            assert len(set(ways)) == 1, ways
            answers.append(ways[0])
    assert answers == await called(config, prompts)
    for one in answers:
        assert one.text.strip()
        assert one.tokens > 1
        assert one.finish_reason == "stop" or one.tokens == TOKENS
    return answers


@pytest.fixture
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Keep the settings of random files out of the user's cache."""
    monkeypatch.setattr(folder, "cache_directory", lambda: tmp_path / "cache")


@asynccontextmanager
async def serving(config: WorkerConfig) -> AsyncIterator[httpx.AsyncClient]:
    """Run a node with the settings of a worker, and yield its client."""
    given = structs.asdict(config)
    names = ("model", "quantization", "threads", "kv_bytes", "max_model_len", "device")
    settings = {name: given[name] for name in names}
    async with running(backend="engine", **settings) as gateway, client(gateway) as http:
        yield http


@pytest.mark.usefixtures("_own_cache")
@pytest.mark.parametrize("kind", PACKED)
async def test_random_files_answer_like_their_unpacked_weights(kind: str, tmp_path: Path) -> None:
    """Answers of a file are never empty. They are those of a file with the unpacked weights if
    all weights are unpacked, and close to them if the weights stay packed."""
    path, plain = tmp_path / "packed.gguf", tmp_path / "plain.gguf"
    write_random_gguf(path, kind=kind)
    write_random_gguf(plain, kind=kind, unpacked=True)
    expected = await called(structs.replace(CONFIG, model=str(plain)), [PROMPT])
    firsts = {}
    for name in ("none", "auto"):
        config = structs.replace(CONFIG, model=str(path), quantization=name)
        async with serving(config) as http:
            await check_answers(http, config)
            firsts[name] = await first_logprobs(http)
        if name == "none":
            assert await called(config, [PROMPT]) == expected
    (token, value), *_ = firsts["none"].items()
    assert firsts["auto"][token] == max(firsts["auto"].values()) == pytest.approx(value, abs=0.3)


async def first_logprobs(http: httpx.AsyncClient) -> dict[str, float]:
    """Return the likeliest first tokens of an answer with their log probabilities."""
    body = {"prompt": PROMPT, "max_tokens": 1, "temperature": 0, "logprobs": 3}
    (choice,) = (await http.post("/v1/completions", json=body)).json()["choices"]
    (found,) = choice["logprobs"]["top_logprobs"]
    return found


@pytest.mark.parametrize("quantization", ["none", "auto"])
async def test_a_real_model_answers(quantization: str, tmp_path: Path) -> None:
    """`draftgate serve` of SmolLM2 in Q4_1 answers questions, and ends its answers itself."""
    if not REAL.is_file():
        pytest.skip("no real models")
    config = structs.replace(CONFIG, model=str(REAL), quantization=quantization)
    given = structs.asdict(config)
    names = ("quantization", "threads", "max_model_len", "kv_bytes", "device")
    flags = (f"--{name.replace('_', '-')}={given[name]}" for name in names)
    node = NodeProcess("node", tmp_path, str(REAL), *flags)
    try:
        await node.start()
        await node.until_ready()
        async with httpx.AsyncClient(base_url=node.url, timeout=60) as http:
            answers = await check_answers(http, config)
    finally:
        await node.close()
    assert any(one.finish_reason == "stop" for one in answers)
    assert any("Paris" in one.text for one in answers) or quantization == "auto"
