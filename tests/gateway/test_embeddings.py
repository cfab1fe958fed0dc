"""`/v1/embeddings` through OpenAI's client: vectors of the engine, and errors."""

from __future__ import annotations

import asyncio
import base64
import importlib.util
import json
from collections.abc import AsyncIterator
from pathlib import Path

import numpy as np
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import Capabilities, Delta, FinishReason, Task
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.prompts import PROMPTS_AT_ONCE
from draftgate.gateway.http.endpoints.embeddings import MAX_INPUTS, unit_vector
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.admission.deadline import Deadline
from draftgate.policies.types import ServiceLevel, SpeculationMode
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    is_idle,
    load_of,
    post_raw,
    running,
    until,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.skipif(
        importlib.util.find_spec("torch") is None
        or not (SHIPPED_MODEL / "model.safetensors").is_file(),
        reason="needs torch and the shipped model",
    ),
]

TEXT = "def read_config(path):\n    with open("
LONGEST = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def where() -> AsyncIterator[Listening]:
    """A node with the engine and the shipped model."""
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_model_len": LONGEST}
    async with running(backend="engine", **settings) as listening:
        yield listening


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(where: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client, pointed at the node."""
    async with AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def vectors(api: AsyncOpenAI, given: object, **fields: object) -> np.ndarray:
    """The vectors of an answer, one per row, in the order of their indices."""
    answer = await api.embeddings.create(model="draftgate-demo", input=given, **fields)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data], np.float32)


async def test_text_becomes_a_vector_of_length_one(api: AsyncOpenAI, where: Listening) -> None:
    """It has the size of the hidden state, and `usage` has the prompt tokens."""
    answer = await api.embeddings.create(model="draftgate-demo", input=TEXT)
    (entry,) = answer.data
    size = where.node.fleet.card.capabilities.embedding_size
    assert len(entry.embedding) == size
    assert np.linalg.norm(entry.embedding) == pytest.approx(1.0, abs=1e-6)
    tokens = len(where.node.served.tokenizer.encode(TEXT))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert (answer.object, entry.object, answer.model) == ("list", "embedding", "draftgate-demo")


async def test_base64_and_decimals_are_the_same_numbers(api: AsyncOpenAI, where: Listening) -> None:
    """The client itself asks for base64."""
    by_default = await vectors(api, TEXT)
    decimals = await vectors(api, TEXT, encoding_format="float")
    assert np.array_equal(by_default, decimals)
    async with client(where) as http:
        body = {"input": TEXT, "encoding_format": "base64"}
        raw = (await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
        listed = (await http.post("/v1/embeddings", json={"input": TEXT})).json()
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), by_default[0])
    assert isinstance(listed["data"][0]["embedding"], list)


async def test_fewer_dimensions_are_the_leading_ones_normalised(api: AsyncOpenAI) -> None:
    """The vector is cut and scaled to length 1."""
    whole, cut = await vectors(api, TEXT), await vectors(api, TEXT, dimensions=16)
    assert cut.shape == (1, 16)
    expected = whole[0, :16] / np.linalg.norm(whole[0, :16])
    np.testing.assert_allclose(cut[0], expected, atol=1e-6)


async def test_all_forms_of_input_give_the_same_vectors(api: AsyncOpenAI, where: Listening) -> None:
    """A text, token ids and lists of them agree bit by bit, whatever the batch."""
    encode = where.node.served.tokenizer.encode
    texts = [TEXT, "import os", "x = 1\n" * 40]
    alone = np.concatenate([await vectors(api, text) for text in texts])
    assert np.array_equal(await vectors(api, texts), alone)
    assert np.array_equal(await vectors(api, [encode(text) for text in texts]), alone)
    assert np.array_equal(await vectors(api, encode(TEXT)), alone[:1])
    assert len({vector.tobytes() for vector in alone}) == 3


async def test_embedding_beside_a_stream_changes_neither(
    api: AsyncOpenAI, where: Listening
) -> None:
    """Both run in the same steps."""
    ask = {"model": "draftgate-demo", "prompt": TEXT, "max_tokens": 120, "seed": 4}
    text = (await api.completions.create(**ask)).choices[0].text
    alone = await vectors(api, "class A:\n    pass\n" * 20)
    stream = await api.completions.create(**ask, stream=True)
    pieces = [(await anext(stream)).choices[0].text]
    beside = await vectors(api, "class A:\n    pass\n" * 20)
    pieces += [choice.text async for chunk in stream for choice in chunk.choices]
    assert np.array_equal(beside, alone)
    assert "".join(pieces) == text
    await until(lambda: is_idle(where.node))


async def test_vectors_keep_the_order_of_the_texts(api: AsyncOpenAI, where: Listening) -> None:
    """More texts than run at once are embedded."""
    texts = [f"value_{index} = {index}" for index in range(PROMPTS_AT_ONCE + 9)]
    together = await vectors(api, texts)
    for index in (0, PROMPTS_AT_ONCE - 1, PROMPTS_AT_ONCE, PROMPTS_AT_ONCE + 8):
        assert np.array_equal(together[index], (await vectors(api, texts[index]))[0])


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"dimensions": 0}, "dimensions"),
        ({"dimensions": 100_000}, "dimensions"),
        ({"encoding_format": "hex"}, "encoding_format"),
        ({"input": []}, "input"),
        ({"input": [[]]}, "input[0]"),
        ({"input": ["a", [1 << 40]]}, "input[1]"),
        ({"input": [1, "a"]}, "input"),
        ({"input": ["a"] * (MAX_INPUTS + 1)}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"priority": 1 << 40}, "priority"),
    ],
    ids=str,
)
async def test_malformed_embedding_request_is_400_and_named(
    where: Listening, fields: dict[str, object], param: str
) -> None:
    """Every error names its parameter."""
    async with client(where) as http:
        answer = await http.post("/v1/embeddings", json={"input": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


async def test_text_beyond_the_context_is_refused_with_both_lengths(api: AsyncOpenAI) -> None:
    """The longest text fits; one token more is `context_length_exceeded`."""
    assert (await vectors(api, [[5] * LONGEST])).shape[0] == 1
    for given, param in (
        ([5] * (LONGEST + 1), "input"),
        ([[5], [5] * (LONGEST + 1)], "input[1]"),
    ):
        with pytest.raises(openai.BadRequestError) as long:
            await vectors(api, given)
        assert long.value.code == "context_length_exceeded"
        assert long.value.param == param
        assert str(LONGEST) in long.value.message
        assert str(LONGEST + 1) in long.value.message


async def test_unknown_embedding_model_is_not_found(api: AsyncOpenAI) -> None:
    """The error is the same as on other paths."""
    with pytest.raises(openai.NotFoundError) as unknown:
        await api.embeddings.create(model="text-embedding-3-small", input="x")
    assert unknown.value.code == "model_not_found"


async def test_embedding_counts_tokens_and_records_no_decision(
    api: AsyncOpenAI, where: Listening
) -> None:
    """Nothing is decided about speculation."""
    async with client(where) as http:
        before = (await http.get("/decisions")).json()
        metrics = (await http.get("/metrics")).text
        await vectors(api, ["one", "two"])
        assert (await http.get("/decisions")).json() == before
        after = (await http.get("/metrics")).text

    def figure(text: str, begin: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(begin))

    def grown(begin: str) -> float:
        return figure(after, begin) - figure(metrics, begin)

    encode = where.node.served.tokenizer.encode
    assert grown("draftgate_prompt_tokens_total") == len(encode("one")) + len(encode("two"))
    assert grown("draftgate_decisions_total") == grown("draftgate_generation_tokens_total") == 0
    endpoint = 'endpoint="/v1/embeddings",model_name="draftgate-demo",outcome="finished"}'
    assert grown("draftgate_requests_total{" + endpoint) == 1


async def test_disconnect_cancels_running_and_waiting_texts() -> None:
    """All texts of the client are freed."""
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_step_tokens": 16, "max_num_seqs": 2}
    async with running(backend="engine", **settings) as where:
        texts = [f"# {index}\n" + "value = value + 1\n" * 200 for index in range(30)]
        _, writer = await post_raw(where, "/v1/embeddings", {"input": texts})
        await until(lambda: load_of(where.node).running > 0 < len(where.node.dispatcher.queue))
        assert not is_idle(where.node)
        writer.close()
        await until(lambda: is_idle(where.node))


async def test_backend_without_embeddings_returns_400_unsupported() -> None:
    """The error names the backend."""
    async with running() as where, client(where) as http:
        answer = await http.post("/v1/embeddings", json={"input": "x"})
    assert answer.status_code == 400
    assert answer.json()["error"] == {
        "message": "the backend 'sim' has no embeddings of 'draftgate-demo'",
        "type": "invalid_request_error",
        "param": "model",
        "code": "unsupported",
    }


@pytest.fixture
async def scripted() -> ScriptedBackend:
    """A backend whose embeddings the test sets: four numbers per text."""
    backend = ScriptedBackend()
    card = backend.card
    object.__setattr__(card, "capabilities", Capabilities(embeddings=True, embedding_size=4))
    return backend


def give(backend: ScriptedBackend, request_id: str, state: list[float]) -> None:
    embedding = np.array(state, "<f4").tobytes()
    delta = Delta(0, (), "", finish_reason=FinishReason.STOP, embedding=embedding)
    backend.streams.deliver([(request_id, delta)])


async def test_texts_wait_for_capacity_and_keep_their_order(
    scripted: ScriptedBackend,
) -> None:
    """The answer is complete once the last text is embedded."""
    async with running(backends=[scripted]) as where, client(where) as http:
        texts = [[index + 1] for index in range(PROMPTS_AT_ONCE + 1)]
        asked = asyncio.create_task(http.post("/v1/embeddings", json={"input": texts}))
        first = [await scripted.submitted.get() for _ in range(PROMPTS_AT_ONCE)]
        assert scripted.submitted.empty()
        assert {request.task for request in first} == {Task.EMBED}
        for request in reversed(first):
            give(scripted, request.request_id, [request.prompt_ids[0], 1.0, 0.0, 0.0])
        last = await scripted.submitted.get()
        give(scripted, last.request_id, [0.0, 0.0, 0.0, 0.0])
        data = (await asked).json()["data"]
        tangents = [entry["embedding"][0] / entry["embedding"][1] for entry in data[:-1]]
        assert tangents == pytest.approx([index + 1 for index in range(PROMPTS_AT_ONCE)], rel=1e-5)
        assert data[-1]["embedding"] == [0.0] * 4
        assert len(scripted.streams) == 0


async def test_worker_failure_is_503_worker_failed(scripted: ScriptedBackend) -> None:
    """A hidden state that is not a number counts as a failure."""
    async with running(backends=[scripted]) as where, client(where) as http:
        for broken in (False, True):
            asked = asyncio.create_task(http.post("/v1/embeddings", json={"input": "x"}))
            request = await scripted.submitted.get()
            if broken:
                scripted.crash("out of memory")
            else:
                give(scripted, request.request_id, [np.inf, 0.0, 0.0, 0.0])
            answer = await asked
            assert (answer.status_code, answer.json()["error"]["code"]) == (503, "worker_failed")


KEYS = """
keys:
  - {name: search, key: sk-search, first_priority: 3, least_ttft_ms: 500, tokens_per_minute: 70}
"""
BEARER = {"authorization": "Bearer sk-search"}


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    """A file with one account that may embed 70 texts of one token per minute."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    return str(tmp_path / "keys.yaml")


async def test_embedding_is_capped_and_charged_to_its_account(
    scripted: ScriptedBackend, keys_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The wait is observed once per request."""
    learnt = []
    monkeypatch.setattr(Deadline, "learn", lambda *told: learnt.append(told))
    async with running(backends=[scripted], api_keys_file=keys_file) as where:
        async with client(where) as http:
            headers = {**BEARER, "x-slo-ttft-ms": "10"}
            body = {"input": [[1, 2], [3, 4, 5]]}
            asked = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=headers))
            for _ in range(2):
                request = await scripted.submitted.get()
                assert (request.tenant, request.service) == ("search", ServiceLevel(0.5, None, 3))
                assert request.speculation.mode is SpeculationMode.OFF
                give(scripted, request.request_id, [1.0, 0.0, 0.0, 0.0])
            assert (await asked).json()["usage"]["prompt_tokens"] == 5
        assert where.node.dispatcher.admission.ledger.totals("search") == (5, 5, 0, 0)
        assert len(learnt) == 1


async def test_exhausted_quota_refuses_all_texts_at_once(
    scripted: ScriptedBackend, keys_file: str
) -> None:
    """The request gets 429 before any text runs, and nothing stays reserved."""
    async with running(backends=[scripted], api_keys_file=keys_file) as where:
        async with client(where) as http:
            body = {"input": [[1]] * 60}
            asked = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=BEARER))
            for _ in range(60):
                request = await scripted.submitted.get()
                give(scripted, request.request_id, [1.0, 0.0, 0.0, 0.0])
            assert (await asked).status_code == 200
            answer = await http.post("/v1/embeddings", json={"input": [[1]] * 20}, headers=BEARER)
            never = await http.post("/v1/embeddings", json={"input": [[1]] * 71}, headers=BEARER)
        assert answer.status_code == 429
        assert answer.json()["error"]["code"] == "rate_limit_exceeded"
        assert "retry-after" in answer.headers
        assert (never.status_code, never.json()["error"]["param"]) == (400, "input")
        assert scripted.submitted.empty()
        assert where.node.dispatcher.admission.ledger.totals("search") == (60, 60, 0, 0)
        assert is_idle(where.node)


async def test_embedding_trace_has_the_worker_and_no_speculation(scripted: ScriptedBackend) -> None:
    """It has the spans of all requests below one SERVER span."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(backends=[scripted], tracing=tracing) as where, client(where) as http:
        asked = asyncio.create_task(http.post("/v1/embeddings", json={"input": [1, 2, 3]}))
        give(scripted, (await scripted.submitted.get()).request_id, [1.0, 0.0, 0.0, 0.0])
        assert (await asked).status_code == 200
        worker_id = where.node.fleet.workers[0].worker_id
    tracing.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    hops = {"admit", "queue", "route", "decide", "reserve", "dispatch"}
    assert set(spans) == {"POST /v1/embeddings", *hops}
    server = spans["POST /v1/embeddings"]
    assert spans["dispatch"].parent.span_id == server.context.span_id
    found = dict(server.attributes)
    assert found["gen_ai.operation.name"] == "embeddings"
    assert found["gen_ai.usage.input_tokens"] == 3
    assert found["draftgate.worker_id"] == worker_id
    assert not [name for name in found if "draft" in name.removeprefix("draftgate.")]
    assert "draftgate.policy" not in found


async def test_one_mebibyte_of_texts_is_embedded(where: Listening) -> None:
    """A body of the maximum size is parsed beside the event loop."""
    texts = ["x = 1\n" * 80] * 16
    body = json.dumps({"input": texts, "user": "u" * (1 << 20), "encoding_format": "base64"})
    async with client(where) as http:
        answer = await http.post("/v1/embeddings", content=body)
    assert len({entry["embedding"] for entry in answer.json()["data"]}) == 1


async def test_state_that_is_not_finite_is_an_error() -> None:
    """JSON cannot represent it."""
    for bad in (np.nan, np.inf):
        with pytest.raises(BackendFailed, match="not finite"):
            unit_vector(np.array([1.0, bad], "<f4").tobytes(), None)
