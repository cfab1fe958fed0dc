"""`/v1/embeddings` by OpenAI's own client: vectors of the engine, errors in OpenAI's shape."""

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
    """A node with the engine, and the shipped model."""
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_model_len": LONGEST}
    async with running(backend="engine", **settings) as listening:
        yield listening


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def api(where: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client, pointed at the node."""
    async with AsyncOpenAI(base_url=f"{where.url}/v1", api_key="none", max_retries=0) as opened:
        yield opened


async def vectors(api: AsyncOpenAI, given: object, **fields: object) -> np.ndarray:
    """The vectors of an answer, one a row, in the order of their indices."""
    answer = await api.embeddings.create(model="draftgate-demo", input=given, **fields)
    assert [entry.index for entry in answer.data] == list(range(len(answer.data)))
    return np.array([entry.embedding for entry in answer.data], np.float32)


async def test_a_text_is_a_vector_of_length_one(api: AsyncOpenAI, where: Listening) -> None:
    """As many numbers as the model's hidden state has, the prompt's tokens in `usage`."""
    answer = await api.embeddings.create(model="draftgate-demo", input=TEXT)
    (entry,) = answer.data
    size = where.node.fleet.card.capabilities.embedding_size
    assert len(entry.embedding) == size
    assert np.linalg.norm(entry.embedding) == pytest.approx(1.0, abs=1e-6)
    tokens = len(where.node.served.tokenizer.encode(TEXT))
    assert (answer.usage.prompt_tokens, answer.usage.total_tokens) == (tokens, tokens)
    assert (answer.object, entry.object, answer.model) == ("list", "embedding", "draftgate-demo")


async def test_both_encodings_are_the_same_numbers(api: AsyncOpenAI, where: Listening) -> None:
    """base64 is what the client asks for by itself; decimals are its very float32 numbers."""
    by_default = await vectors(api, TEXT)
    decimals = await vectors(api, TEXT, encoding_format="float")
    assert np.array_equal(by_default, decimals)
    async with client(where) as http:
        body = {"input": TEXT, "encoding_format": "base64"}
        raw = (await http.post("/v1/embeddings", json=body)).json()["data"][0]["embedding"]
        listed = (await http.post("/v1/embeddings", json={"input": TEXT})).json()
    assert np.array_equal(np.frombuffer(base64.b64decode(raw), "<f4"), by_default[0])
    assert isinstance(listed["data"][0]["embedding"], list)


async def test_fewer_dimensions_are_the_leading_ones_normalised_again(api: AsyncOpenAI) -> None:
    """The direction of the whole vector's beginning, at length 1."""
    whole, cut = await vectors(api, TEXT), await vectors(api, TEXT, dimensions=16)
    assert cut.shape == (1, 16)
    expected = whole[0, :16] / np.linalg.norm(whole[0, :16])
    np.testing.assert_allclose(cut[0], expected, atol=1e-6)


async def test_every_form_of_input_gives_the_same_vectors(
    api: AsyncOpenAI, where: Listening
) -> None:
    """A text, its token ids, lists of either; what a text is batched with changes no bit."""
    encode = where.node.served.tokenizer.encode
    texts = [TEXT, "import os", "x = 1\n" * 40]
    alone = np.concatenate([await vectors(api, text) for text in texts])
    assert np.array_equal(await vectors(api, texts), alone)
    assert np.array_equal(await vectors(api, [encode(text) for text in texts]), alone)
    assert np.array_equal(await vectors(api, encode(TEXT)), alone[:1])
    assert len({vector.tobytes() for vector in alone}) == 3


async def test_vectors_are_the_same_beside_a_stream(api: AsyncOpenAI, where: Listening) -> None:
    """Embedding runs in the steps of a generating request, and neither disturbs the other."""
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


async def test_many_texts_keep_their_order(api: AsyncOpenAI, where: Listening) -> None:
    """More than run at once: each vector is that of its text."""
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
async def test_what_is_wrong_is_named(
    where: Listening, fields: dict[str, object], param: str
) -> None:
    """Every complaint is a 400 that names the parameter."""
    async with client(where) as http:
        answer = await http.post("/v1/embeddings", json={"input": "x", **fields})
    error = answer.json()["error"]
    assert (answer.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


async def test_a_text_beyond_the_context_is_told_both_numbers(api: AsyncOpenAI) -> None:
    """The longest text fits whole; one token more is `context_length_exceeded`."""
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


async def test_an_unknown_model_is_not_found(api: AsyncOpenAI) -> None:
    """As on all other paths."""
    with pytest.raises(openai.NotFoundError) as unknown:
        await api.embeddings.create(model="text-embedding-3-small", input="x")
    assert unknown.value.code == "model_not_found"


async def test_no_decision_is_recorded_and_the_tokens_are_counted(
    api: AsyncOpenAI, where: Listening
) -> None:
    """Metrics know the request and its tokens; nothing was decided about speculation."""
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


async def test_leaving_frees_what_is_being_embedded() -> None:
    """A client that goes takes its texts along, those that run and those that wait."""
    settings = {"kv_bytes": 32 << 20, "threads": 1, "max_step_tokens": 16, "max_num_seqs": 2}
    async with running(backend="engine", **settings) as where:
        texts = [f"# {index}\n" + "value = value + 1\n" * 200 for index in range(30)]
        _, writer = await post_raw(where, "/v1/embeddings", {"input": texts})
        await until(lambda: load_of(where.node).running > 0 < len(where.node.dispatcher.queue))
        assert not is_idle(where.node)
        writer.close()
        await until(lambda: is_idle(where.node))


async def test_a_backend_without_embeddings_says_so() -> None:
    """400 `unsupported`, naming the backend, in OpenAI's error shape."""
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
    """A backend that embeds as the test says: four numbers a text."""
    backend = ScriptedBackend()
    card = backend.card
    object.__setattr__(card, "capabilities", Capabilities(embeddings=True, embedding_size=4))
    return backend


def give(backend: ScriptedBackend, request_id: str, state: list[float]) -> None:
    embedding = np.array(state, "<f4").tobytes()
    delta = Delta(0, (), "", finish_reason=FinishReason.STOP, embedding=embedding)
    backend.streams.deliver([(request_id, delta)])


async def test_texts_wait_for_their_turn_and_answers_for_the_last(
    scripted: ScriptedBackend,
) -> None:
    """So many texts are with the worker, the others come when these are done; order is kept."""
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


async def test_a_worker_that_breaks_is_a_typed_error(scripted: ScriptedBackend) -> None:
    """503 `worker_failed`, for a state that is no number as well."""
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
    """A file of one account that may embed 70 texts of a token each in a minute."""
    (tmp_path / "keys.yaml").write_text(KEYS)
    return str(tmp_path / "keys.yaml")


async def test_texts_are_embedded_in_their_accounts_name(
    scripted: ScriptedBackend, keys_file: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Capped as all requests; their tokens are settled, and the wait is learnt from once."""
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


async def test_a_refusal_comes_before_anything_is_computed(
    scripted: ScriptedBackend, keys_file: str
) -> None:
    """All texts of a request are one request to its quota: 429 at once, nothing stays reserved."""
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


async def test_the_trace_has_where_it_ran_and_nothing_of_drafts(scripted: ScriptedBackend) -> None:
    """The hops of all requests below one server span; tokens and the worker, nothing of drafts."""
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
    """What a client may send at once is parsed beside the loop, and answered whole."""
    texts = ["x = 1\n" * 80] * 16
    body = json.dumps({"input": texts, "user": "u" * (1 << 20), "encoding_format": "base64"})
    async with client(where) as http:
        answer = await http.post("/v1/embeddings", content=body)
    assert len({entry["embedding"] for entry in answer.json()["data"]}) == 1


async def test_a_state_that_is_not_finite_is_refused() -> None:
    """JSON has no word for it."""
    for bad in (np.nan, np.inf):
        with pytest.raises(BackendFailed, match="not finite"):
            unit_vector(np.array([1.0, bad], "<f4").tobytes(), None)
