"""Tests of `/v1/embeddings` through OpenAI's client: vectors of the engine and errors."""

from __future__ import annotations

import asyncio
import base64
import json
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path

import numpy as np
import openai
import pytest
import pytest_asyncio
from openai import AsyncOpenAI
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.errors import BackendFailed
from draftgate.backends.types import Capabilities, Delta, FinishReason, Task
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.prompts import PROMPTS_AT_ONCE
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.http.endpoints.embeddings import unit_vector
from draftgate.gateway.http.requests.limits import MAX_EMBEDDED_TEXTS
from draftgate.gateway.state.commands import ReadTotals
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.admission.deadline import Deadline
from draftgate.policies.types import ServiceLevel, SpeculationMode
from tests.gateway.clients import openai_client
from tests.gateway.harness import (
    ScriptedBackend,
    client,
    is_idle,
    load_of,
    needs_engine,
    post_raw,
    running,
    until,
)

pytestmark = [
    pytest.mark.asyncio(loop_scope="module"),
    needs_engine,
]

TEXT = "def read_config(path):\n    with open("
LONGEST = 512


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway() -> AsyncIterator[Listening]:
    """A node with the engine and the shipped model."""
    # Without the cache, because a cached vector does not show what the engine computes.
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_model_len": LONGEST}
    settings["embedding_cache_bytes"] = 0
    async with running(backend="engine", **settings) as listening:
        yield listening


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(gateway: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the node."""
    async with openai_client(gateway.url) as opened:
        yield opened


async def vectors(api: AsyncOpenAI, given: object, **fields: object) -> np.ndarray:
    """Return the vectors of a response as an array of shape (texts, dimensions)."""
    response = await api.embeddings.create(model="draftgate-demo", input=given, **fields)
    assert [entry.index for entry in response.data] == list(range(len(response.data)))
    return np.array([entry.embedding for entry in response.data], np.float32)


async def test_text_becomes_a_vector_of_unit_length(api: AsyncOpenAI, gateway: Listening) -> None:
    """The vector of a text has the size of the hidden state and the length 1."""
    response = await api.embeddings.create(model="draftgate-demo", input=TEXT)
    (entry,) = response.data
    size = gateway.node.fleet.card.capabilities.embedding_size
    assert len(entry.embedding) == size
    assert np.linalg.norm(entry.embedding) == pytest.approx(1.0, abs=1e-6)
    tokens = len(gateway.node.served.tokenizer.encode(TEXT))
    assert (response.usage.prompt_tokens, response.usage.total_tokens) == (tokens, tokens)
    assert (response.object, entry.object, response.model) == (
        "list",
        "embedding",
        "draftgate-demo",
    )


async def test_base64_and_decimals_are_the_same_numbers(
    api: AsyncOpenAI, gateway: Listening
) -> None:
    """The server encodes the same numbers as base64 and as decimals."""
    by_default = await vectors(api, TEXT)
    decimals = await vectors(api, TEXT, encoding_format="float")
    assert np.array_equal(by_default, decimals)
    async with client(gateway) as http:
        body = {"input": TEXT, "encoding_format": "base64"}
        raw = (await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
        listed = (await http.post("/v1/embeddings", json={"input": TEXT})).json()
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), by_default[0])
    assert isinstance(listed["data"][0]["embedding"], list)


async def test_fewer_dimensions_are_the_leading_dimensions_normalised(api: AsyncOpenAI) -> None:
    """The server truncates the vector to the requested dimensions and normalises the result."""
    whole, cut = await vectors(api, TEXT), await vectors(api, TEXT, dimensions=16)
    assert cut.shape == (1, 16)
    expected = whole[0, :16] / np.linalg.norm(whole[0, :16])
    np.testing.assert_allclose(cut[0], expected, atol=1e-6)


async def test_all_forms_of_input_give_the_same_vectors(
    api: AsyncOpenAI, gateway: Listening
) -> None:
    """Texts, token ids and lists send_embedding bit-identical vectors in any batch."""
    encode = gateway.node.served.tokenizer.encode
    texts = [TEXT, "import os", "x = 1\n" * 40]
    alone = np.concatenate([await vectors(api, text) for text in texts])
    assert np.array_equal(await vectors(api, texts), alone)
    assert np.array_equal(await vectors(api, [encode(text) for text in texts]), alone)
    assert np.array_equal(await vectors(api, encode(TEXT)), alone[:1])
    assert len({vector.tobytes() for vector in alone}) == 3


async def test_embedding_and_stream_in_one_step_do_not_change_each_other(
    api: AsyncOpenAI, gateway: Listening
) -> None:
    """An embedding and a stream in the same steps do not change each other's results."""
    completion = {"model": "draftgate-demo", "prompt": TEXT, "max_tokens": 120, "seed": 4}
    text = (await api.completions.create(**completion)).choices[0].text
    alone = await vectors(api, "class A:\n    pass\n" * 20)
    stream = await api.completions.create(**completion, stream=True)
    pieces = [(await anext(stream)).choices[0].text]
    concurrent = await vectors(api, "class A:\n    pass\n" * 20)
    pieces += [choice.text async for chunk in stream for choice in chunk.choices]
    assert np.array_equal(concurrent, alone)
    assert "".join(pieces) == text
    await until(lambda: is_idle(gateway.node))


async def test_vectors_keep_the_order_of_the_texts(api: AsyncOpenAI, gateway: Listening) -> None:
    """The server returns the vectors in the order of the texts, even beyond `PROMPTS_AT_ONCE`."""
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
        ({"input": ["a"] * (MAX_EMBEDDED_TEXTS + 1)}, "input"),
        ({"input": {"text": "a"}}, "input"),
        ({"truncate_prompt_tokens": 5}, "truncate_prompt_tokens"),
        ({"priority": 1 << 40}, "priority"),
    ],
    ids=str,
)
async def test_malformed_embedding_request_is_400_and_named(
    gateway: Listening, fields: dict[str, object], param: str
) -> None:
    """The server rejects a malformed embedding request with 400 and names the parameter."""
    async with client(gateway) as http:
        response = await http.post("/v1/embeddings", json={"input": "x", **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


async def test_text_beyond_the_context_is_refused_with_both_lengths(api: AsyncOpenAI) -> None:
    """The server embeds a text of the maximum length and rejects a text with one more token."""
    assert (await vectors(api, [[5] * LONGEST])).shape[0] == 1
    for given, param in (
        ([5] * (LONGEST + 1), "input"),
        ([[5], [5] * (LONGEST + 1)], "input[1]"),
    ):
        with pytest.raises(openai.BadRequestError) as long:
            await vectors(api, given)
        assert long.value.code == "context_length_exceeded"
        assert long.value.param == param
        assert "this model's maximum context length is" in long.value.message
        assert str(LONGEST) in long.value.message
        assert str(LONGEST + 1) in long.value.message


async def test_unknown_embedding_model_is_not_found(api: AsyncOpenAI) -> None:
    """The server responds with `model_not_found` to an unknown embedding model."""
    with pytest.raises(openai.NotFoundError) as unknown:
        await api.embeddings.create(model="text-embedding-3-small", input="x")
    assert unknown.value.code == "model_not_found"


async def test_embedding_counts_tokens_and_records_no_decision() -> None:
    """An embedding counts its prompt tokens and records no speculation decision."""
    async with (
        running(backend="engine", kv_bytes=32 << 20, threads=1) as gateway,  # of no earlier test
        openai_client(gateway.url) as api,
        client(gateway) as http,
    ):
        before = (await http.get("/decisions")).json()
        metrics = (await http.get("/metrics")).text
        await vectors(api, ["one", "two"])
        assert (await http.get("/decisions")).json() == before
        after = (await http.get("/metrics")).text

    def metric_sum(text: str, begin: str) -> float:
        return sum(float(line.split()[-1]) for line in text.splitlines() if line.startswith(begin))

    def increase(begin: str) -> float:
        return metric_sum(after, begin) - metric_sum(metrics, begin)

    encode = gateway.node.served.tokenizer.encode
    assert increase("draftgate_prompt_tokens_total") == len(encode("one")) + len(encode("two"))
    assert (
        increase("draftgate_decisions_total") == increase("draftgate_generation_tokens_total") == 0
    )
    endpoint = 'endpoint="/v1/embeddings",model_name="draftgate-demo",outcome="finished"}'
    assert increase("draftgate_requests_total{" + endpoint) == 1


async def test_disconnect_cancels_running_and_waiting_texts() -> None:
    """A disconnect frees the running and the waiting texts of the client."""
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_step_tokens": 16, "max_num_seqs": 2}
    async with running(backend="engine", **settings) as gateway:
        texts = [f"# {index}\n" + "value = value + 1\n" * 200 for index in range(30)]
        _, writer = await post_raw(gateway, "/v1/embeddings", {"input": texts})
        await until(lambda: load_of(gateway.node).running > 0 < len(gateway.node.dispatcher.queue))
        assert not is_idle(gateway.node)
        writer.close()
        await until(lambda: is_idle(gateway.node))


async def test_backend_without_embeddings_returns_400_unsupported() -> None:
    """The server rejects an embedding request with 400 if the backend has no embeddings."""
    async with running() as gateway, client(gateway) as http:
        response = await http.post("/v1/embeddings", json={"input": "x"})
    assert response.status_code == 400
    assert response.json()["error"] == {
        "message": (
            "this model does not embed texts; use /v1/completions or load an embedding model"
        ),
        "type": "invalid_request_error",
        "param": "model",
        "code": "unsupported",
    }


@pytest.fixture
async def scripted() -> ScriptedBackend:
    """A backend whose embeddings of four numbers the test sets."""
    backend = ScriptedBackend()
    able = Capabilities(tasks=(Task.GENERATE, Task.EMBED), embedding_size=4)
    backend.card = replace(backend.card, capabilities=able)
    return backend


def send_embedding(backend: ScriptedBackend, request_id: str, state: list[float]) -> None:
    embedding = np.array(state, "<f4").tobytes()
    delta = Delta(0, (), "", finish_reason=FinishReason.STOP, pooled=embedding)
    backend.sinks.deliver([(request_id, delta)])


async def test_texts_wait_for_capacity_and_keep_their_order(
    scripted: ScriptedBackend,
) -> None:
    """Texts beyond the limit wait for capacity, and the response keeps their order."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        texts = [[index + 1] for index in range(PROMPTS_AT_ONCE + 1)]
        pending = asyncio.create_task(http.post("/v1/embeddings", json={"input": texts}))
        first = [await scripted.submitted.get() for _ in range(PROMPTS_AT_ONCE)]
        assert scripted.submitted.empty()
        assert {request.task for request in first} == {Task.EMBED}
        for request in reversed(first):
            send_embedding(scripted, request.request_id, [request.prompt_ids[0], 1.0, 0.0, 0.0])
        last = await scripted.submitted.get()
        send_embedding(scripted, last.request_id, [0.0, 0.0, 0.0, 0.0])
        data = (await pending).json()["data"]
        tangents = [entry["embedding"][0] / entry["embedding"][1] for entry in data[:-1]]
        assert tangents == pytest.approx([index + 1 for index in range(PROMPTS_AT_ONCE)], rel=1e-5)
        assert data[-1]["embedding"] == [0.0] * 4
        assert len(scripted.sinks) == 0


async def test_worker_failure_is_503_worker_failed(scripted: ScriptedBackend) -> None:
    """The server responds with 503 to a worker failure and to a hidden state that is not finite."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        for broken in (False, True):
            pending = asyncio.create_task(http.post("/v1/embeddings", json={"input": "x"}))
            request = await scripted.submitted.get()
            if broken:
                scripted.crash("out of memory")
            else:
                send_embedding(scripted, request.request_id, [np.inf, 0.0, 0.0, 0.0])
            response = await pending
            assert (response.status_code, response.json()["error"]["code"]) == (
                503,
                "worker_failed",
            )


KEYS = """
keys:
  - {name: search, key: sk-search, first_priority: 3, least_ttft_ms: 500, tokens_per_minute: 70}
"""
BEARER = {"authorization": "Bearer sk-search"}


@pytest.fixture
def keys_file(tmp_path: Path) -> str:
    """A file with one account and a quota of 70 tokens per minute."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    return str(tmp_path / "keys.yaml")


async def test_embedding_is_capped_and_charged_to_its_account(
    scripted: ScriptedBackend, keys_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The account's limits and quota apply to an embedding, and its wait is recorded once."""
    observed = []
    monkeypatch.setattr(Deadline, "learn", lambda *values: observed.append(values))
    async with running(backends=[scripted], api_keys_file=keys_file) as gateway:
        async with client(gateway) as http:
            headers = {**BEARER, "x-slo-ttft-ms": "10"}
            body = {"input": [[1, 2], [3, 4, 5]]}
            pending = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=headers))
            for _ in range(2):
                request = await scripted.submitted.get()
                assert (request.tenant, request.service) == ("search", ServiceLevel(0.5, None, 3))
                assert request.speculation.mode is SpeculationMode.OFF
                send_embedding(scripted, request.request_id, [1.0, 0.0, 0.0, 0.0])
            assert (await pending).json()["usage"]["prompt_tokens"] == 5
        account = quota_account("search", gateway.node.fleet.model_id)
        assert await gateway.node.store.call(ReadTotals(account)) == (5, 5, 0, 0)
        assert len(observed) == 1


async def test_exhausted_quota_refuses_all_texts_before_any_runs(
    scripted: ScriptedBackend, keys_file: str
) -> None:
    """The server responds with 429 before any text runs, and no tokens stay reserved."""
    uncached = {"embedding_cache_bytes": 0}  # otherwise equal texts would be computed once
    async with running(backends=[scripted], api_keys_file=keys_file, **uncached) as gateway:
        async with client(gateway) as http:
            body = {"input": [[1]] * 60}
            pending = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=BEARER))
            for _ in range(60):
                request = await scripted.submitted.get()
                send_embedding(scripted, request.request_id, [1.0, 0.0, 0.0, 0.0])
            assert (await pending).status_code == 200
            response = await http.post("/v1/embeddings", json={"input": [[1]] * 20}, headers=BEARER)
            never = await http.post("/v1/embeddings", json={"input": [[1]] * 71}, headers=BEARER)
        assert response.status_code == 429
        assert response.json()["error"]["code"] == "rate_limit_exceeded"
        assert "retry-after" in response.headers
        assert (never.status_code, never.json()["error"]["param"]) == (400, "input")
        assert scripted.submitted.empty()
        account = quota_account("search", gateway.node.fleet.model_id)
        assert await gateway.node.store.call(ReadTotals(account)) == (60, 60, 0, 0)
        assert is_idle(gateway.node)


async def test_embedding_trace_has_the_worker_and_no_speculation(scripted: ScriptedBackend) -> None:
    """The trace of an embedding names the worker and has no speculation attributes."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(backends=[scripted], tracing=tracing) as gateway, client(gateway) as http:
        pending = asyncio.create_task(http.post("/v1/embeddings", json={"input": [1, 2, 3]}))
        send_embedding(scripted, (await scripted.submitted.get()).request_id, [1.0, 0.0, 0.0, 0.0])
        assert (await pending).status_code == 200
        worker_id = gateway.node.fleet.workers[0].worker_id
    tracing.shutdown()
    spans = {span.name: span for span in exporter.get_finished_spans()}
    names = {"admit", "queue", "route", "decide", "reserve", "dispatch"}
    assert set(spans) == {"POST /v1/embeddings", *names}
    server = spans["POST /v1/embeddings"]
    assert spans["dispatch"].parent.span_id == server.context.span_id
    found = dict(server.attributes)
    assert found["gen_ai.operation.name"] == "embeddings"
    assert found["gen_ai.usage.input_tokens"] == 3
    assert found["draftgate.worker_id"] == worker_id
    assert not [name for name in found if "draft" in name.removeprefix("draftgate.")]
    assert "draftgate.policy" not in found


async def test_one_mebibyte_of_texts_is_embedded(gateway: Listening) -> None:
    """The server embeds the texts of a body that exceeds one mebibyte."""
    texts = ["x = 1\n" * 80] * 16
    body = json.dumps({"input": texts, "user": "u" * (1 << 20), "encoding_format": "base64"})
    async with client(gateway) as http:
        response = await http.post("/v1/embeddings", content=body)
    assert len({entry["embedding"] for entry in response.json()["data"]}) == 1


async def test_state_that_is_not_finite_is_an_error() -> None:
    """A hidden state with NaN or infinity raises an error."""
    for bad in (np.nan, np.inf):
        with pytest.raises(BackendFailed, match="not finite"):
            unit_vector(np.array([1.0, bad], "<f4").tobytes(), None)


async def test_shipped_tower_is_served_by_its_name() -> None:
    """`draftgate serve draftgate-queries` needs no hub, and returns vectors of unit length."""
    async with (
        running(backend="engine", model="draftgate-queries", threads=1) as listening,
        openai_client(listening.url) as api,
    ):
        found = await api.embeddings.create(model="draftgate-queries", input=[TEXT, "a"])
        lengths = [np.linalg.norm(entry.embedding) for entry in found.data]
        assert lengths == pytest.approx([1.0, 1.0], abs=1e-6)
