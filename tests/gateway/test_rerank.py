"""`/v1/rerank` with a cross-encoder: order and form of the results, limits, quotas and errors."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest
import pytest_asyncio
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.types import Capabilities, Delta, FinishReason, Task
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.http import pairs
from draftgate.gateway.http.endpoints import rerank
from draftgate.gateway.http.requests.headers import Sender
from draftgate.gateway.http.requests.limits import MAX_RERANKED_DOCUMENTS
from draftgate.gateway.state.commands import ReadTotals
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.types import BATCH_PRIORITY, ServiceLevel
from tests.engine.test_cross_encoder import (
    DOCUMENTS,
    LONGEST,
    QUERY,
    logits_of,
    save_cross_encoder,
)
from tests.engine.test_encoder import save_model
from tests.gateway.harness import ScriptedBackend, client, is_idle, needs_engine, running

pytestmark = [pytest.mark.asyncio(loop_scope="module"), needs_engine]

BODY: dict[str, Any] = {"query": QUERY, "documents": DOCUMENTS}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A random cross-encoder."""
    directory = tmp_path_factory.mktemp("cross-encoder")
    save_cross_encoder(directory)
    return directory


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(checkpoint: Path) -> AsyncIterator[Listening]:
    """A node with the cross-encoder."""
    settings = {"model": str(checkpoint), "served_model_name": ("reranker",), "threads": 1}
    async with running(backend="engine", **settings) as listening:
        yield listening


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def http(gateway: Listening) -> AsyncIterator[httpx.AsyncClient]:
    """A plain HTTP client of the node."""
    async with client(gateway) as opened:
        yield opened


async def ranked(http: httpx.AsyncClient, path: str = "/v1/rerank", **fields: object) -> Any:
    """Return the response to a rerank request."""
    response = await http.post(path, json={**BODY, **fields})
    assert response.status_code == 200, response.text
    return response.json()


async def test_documents_are_sorted_by_the_scores_of_transformers(
    http: httpx.AsyncClient, gateway: Listening, tmp_path: Path
) -> None:
    """The response has vLLM's form, and the order and scores of transformers."""
    model = save_cross_encoder(tmp_path)
    logits = logits_of(model, tmp_path, "bert", DOCUMENTS)
    found = await ranked(http, model="reranker")
    assert list(found) == ["id", "model", "usage", "results"]
    assert (found["id"][:7], found["model"]) == ("rerank-", "reranker")
    assert [result["index"] for result in found["results"]] == list(np.argsort(-logits))
    for result in found["results"]:
        assert result["document"] == {"text": DOCUMENTS[result["index"]]}
    scores = [result["relevance_score"] for result in found["results"]]
    np.testing.assert_allclose(scores, 1 / (1 + np.exp(np.sort(-logits))), atol=1e-5)
    encoder = gateway.node.served.tokenizer.pairs(QUERY, LONGEST)
    tokens = sum(len(encoder.encode(document).token_ids) for document in DOCUMENTS)
    assert found["usage"] == {"prompt_tokens": tokens, "total_tokens": tokens}


@pytest.mark.parametrize("path", rerank.PATHS)
async def test_all_paths_and_forms_of_documents_are_the_same(
    path: str, http: httpx.AsyncClient
) -> None:
    """Jina's and Cohere's paths give the results of vLLM's, for texts and for objects."""
    objects = [{"text": text, "title": "ignored"} for text in DOCUMENTS]
    whole, other = await ranked(http), await ranked(http, path, documents=objects)
    assert {**other, "id": whole["id"]} == whole


@pytest.mark.parametrize(("top_n", "count"), [(None, 6), (0, 6), (1, 1), (3, 3), (99, 6)])
async def test_top_n_keeps_the_best_documents(
    top_n: int | None, count: int, http: httpx.AsyncClient
) -> None:
    """`top_n` keeps the documents with the highest scores, and 0 keeps all."""
    whole, best = await ranked(http), await ranked(http, top_n=top_n)
    assert best["results"] == whole["results"][:count]
    assert best["usage"] == whole["usage"]


async def test_documents_may_be_left_out(http: httpx.AsyncClient) -> None:
    """`return_documents: false` leaves out the documents, which `index` identifies."""
    found = await ranked(http, return_documents=False)
    assert all(set(result) == {"index", "relevance_score"} for result in found["results"])
    assert "document" in (await ranked(http, return_documents=True))["results"][0]


async def test_score_does_not_depend_on_the_other_documents(http: httpx.AsyncClient) -> None:
    """A document has the same score, to the last bit, alone and among others."""
    whole = await ranked(http)
    for result in whole["results"]:
        (alone,) = (await ranked(http, documents=[DOCUMENTS[result["index"]]]))["results"]
        assert alone["relevance_score"] == result["relevance_score"]


async def test_documents_are_truncated_and_queries_are_not(http: httpx.AsyncClient) -> None:
    """A long document counts as its beginning, up to the context or `max_tokens_per_doc`."""
    words = [f"w{20 + index % 70}" for index in range(100)]
    room = LONGEST - 3 - len(QUERY.split())
    for most, kept in ((None, room), (5, 5), (0, room)):
        texts = [" ".join(words), " ".join(words[:kept])]
        found = await ranked(http, documents=texts, max_tokens_per_doc=most)
        assert len({result["relevance_score"] for result in found["results"]}) == 1
        assert [result["index"] for result in found["results"]] == [0, 1], "ties keep their order"
        assert found["usage"]["prompt_tokens"] == 2 * (3 + len(QUERY.split()) + kept)


@pytest.mark.parametrize(
    ("fields", "param"),
    [
        ({"query": ""}, "query"),
        ({"query": None}, "query"),
        ({"query": ["a"]}, "query"),
        ({"query": "w5 " * (LONGEST - 3)}, "query"),
        ({"documents": []}, "documents"),
        ({"documents": None}, "documents"),
        ({"documents": "w5"}, "documents"),
        ({"documents": ["w5", 7]}, "documents[1]"),
        ({"documents": ["w5", {"title": "w5"}]}, "documents[1]"),
        ({"documents": [{"text": 5}]}, "documents[0].text"),
        ({"documents": ["w5"] * (MAX_RERANKED_DOCUMENTS + 1)}, "documents"),
        ({"top_n": -1}, "top_n"),
        ({"top_n": "2"}, "top_n"),
        ({"max_tokens_per_doc": -1}, "max_tokens_per_doc"),
        ({"max_tokens_per_query": 4}, "max_tokens_per_query"),
        ({"truncate_prompt_tokens": 9}, "truncate_prompt_tokens"),
        ({"use_activation": False}, "use_activation"),
        ({"rank_fields": ["title"]}, "rank_fields"),
        ({"return_documents": "no"}, "return_documents"),
        ({"priority": 1 << 40}, "priority"),
    ],
    ids=str,
)
async def test_malformed_rerank_request_is_400_and_named(
    http: httpx.AsyncClient, fields: dict[str, object], param: str
) -> None:
    """The server rejects a malformed rerank request with 400 and names the parameter."""
    response = await http.post("/v1/rerank", json={**BODY, **fields})
    error = response.json()["error"]
    assert (response.status_code, error["param"]) == (400, param)
    assert error["type"] == "invalid_request_error"


@pytest.mark.parametrize("missing", ["query", "documents"])
async def test_missing_field_is_named(http: httpx.AsyncClient, missing: str) -> None:
    """A request needs a query and documents."""
    body = {name: value for name, value in BODY.items() if name != missing}
    response = await http.post("/v1/rerank", json=body)
    assert (response.status_code, response.json()["error"]["param"]) == (400, missing)


async def test_neutral_values_are_accepted(http: httpx.AsyncClient) -> None:
    """Values of unsupported fields that change nothing are accepted, and unknown fields ignored."""
    fields = {"use_activation": True, "rank_fields": [], "max_tokens_per_query": 0, "user": "u"}
    assert (await ranked(http, **fields, other=1))["results"]


async def test_query_that_leaves_no_room_is_too_long(http: httpx.AsyncClient) -> None:
    """A query may leave one token for a document, and not fewer."""
    words = "w5 " * (LONGEST - 4)
    found = await ranked(http, query=words, documents=["w6 w7"])
    assert found["usage"]["total_tokens"] == LONGEST
    response = await http.post("/v1/rerank", json={**BODY, "query": f"{words} w5"})
    error = response.json()["error"]
    assert (error["code"], error["param"]) == ("context_length_exceeded", "query")
    assert f"maximum context length is {LONGEST} tokens" in error["message"]


async def test_tokens_of_a_request_are_bounded(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The tokens of all pairs, each of which has the query, are bounded together."""
    body = {"query": QUERY, "documents": ["w20", "w21"]}
    for most, status in ((14, 200), (13, 400)):
        monkeypatch.setattr(pairs, "MAX_RERANKED_TOKENS", most)
        response = await http.post("/v1/rerank", json=body)
        assert response.status_code == status
    error = response.json()["error"]
    assert (error["param"], "more than 13 tokens" in error["message"]) == ("documents", True)


@pytest.mark.parametrize(
    ("path", "body", "does"),
    [
        ("/v1/embeddings", {"input": "w5"}, "embed texts"),
        ("/v1/completions", {"prompt": "w5"}, "generate text"),
        ("/v1/chat/completions", {"messages": []}, "generate text"),
    ],
)
async def test_cross_encoder_refuses_other_tasks(
    path: str, body: dict[str, object], does: str, http: httpx.AsyncClient
) -> None:
    """The error names the endpoint of a cross-encoder."""
    response = await http.post(path, json=body)
    error = response.json()["error"]
    assert (response.status_code, error["param"], error["code"]) == (400, "model", "unsupported")
    assert f"does not {does}; use /v1/rerank or load" in error["message"]


async def test_other_models_refuse_to_rerank(tmp_path: Path) -> None:
    """An embedding model and a language model say which model to load."""
    save_model(tmp_path)
    for settings, path in (
        ({"backend": "engine", "model": str(tmp_path), "threads": 1}, "/v1/embeddings"),
        ({}, "/v1/completions"),
    ):
        async with running(**settings) as other, client(other) as http:
            response = await http.post("/v1/rerank", json=BODY)
        assert response.status_code == 400
        assert response.json()["error"] == {
            "message": f"this model does not rank documents; use {path} or load a cross-encoder",
            "type": "invalid_request_error",
            "param": "model",
            "code": "unsupported",
        }


async def test_model_lists_its_task(http: httpx.AsyncClient) -> None:
    """The entry of the model names what the model does."""
    (model,) = (await http.get("/v1/models")).json()["data"]
    assert (model["tasks"], model["max_model_len"]) == (["score"], LONGEST)


async def test_pairs_are_encoded_in_a_thread(
    http: httpx.AsyncClient, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The event loop does not encode the pairs of a short body, which may be many."""
    threads = []

    def spy(*arguments: Any) -> Any:
        threads.append(threading.current_thread())
        return parse(*arguments)

    parse = rerank.parse_rerank
    monkeypatch.setattr(rerank, "parse_rerank", spy)
    await ranked(http, documents=["w5"])
    assert threads != [threading.main_thread()]


@pytest.mark.parametrize("priority", [None, -2, BATCH_PRIORITY])
async def test_reranking_is_online_work(gateway: Listening, priority: int | None) -> None:
    """Pairs have the usual priority, unless the client sets another one."""
    content = json.dumps({**BODY, "priority": priority}).encode()
    job = rerank.parse_rerank(content, gateway.node.served, Sender("id")).job
    assert job.service.priority == (priority or 0)


async def test_peer_scores_the_documents(checkpoint: Path, http: httpx.AsyncClient) -> None:
    """A node without a model of its own gives the same results with the worker of a peer."""
    settings = {"model": str(checkpoint), "threads": 1}
    async with (
        running(backend="engine", **settings) as where,
        running(backends=[PeerBackend(where.url, None)]) as near,
        client(near) as other,
    ):
        assert (await ranked(other))["results"] == (await ranked(http))["results"]
        assert is_idle(near.node)


KEYS = "keys: [{name: search, key: sk-search, first_priority: 3, tokens_per_minute: 40}]"
BEARER = {"authorization": "Bearer sk-search"}


@pytest.fixture
def scripted() -> ScriptedBackend:
    """A cross-encoder whose scores the test sets."""
    backend = ScriptedBackend()
    backend.card = replace(backend.card, capabilities=Capabilities(tasks=(Task.SCORE,)))
    return backend


def send_score(backend: ScriptedBackend, request_id: str, score: float) -> None:
    state = np.array([score], "<f4").tobytes()
    delta = Delta(0, (), "", finish_reason=FinishReason.STOP, pooled=state)
    backend.sinks.deliver([(request_id, delta)])


async def test_pairs_are_capped_and_charged_to_their_account(
    scripted: ScriptedBackend, tmp_path: Path
) -> None:
    """The quota is charged with the tokens of all pairs, and refuses before any pair runs."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    async with running(backends=[scripted], api_keys_file=str(keys)) as gateway:
        body = {"query": "def f", "documents": ["import os", "x"], "priority": -5}
        async with client(gateway) as http:
            http.headers.update({**BEARER, "x-slo-ttft-ms": "500"})
            pending = asyncio.create_task(http.post("/v1/rerank", json=body))
            tokens = 0
            for score in (0.25, 0.5):
                request = await scripted.submitted.get()
                assert (request.tenant, request.task) == ("search", Task.SCORE)
                assert request.service == ServiceLevel(0.5, None, 3)
                tokens += len(request.prompt_ids)
                send_score(scripted, request.request_id, score)
            found = (await pending).json()
            assert [result["index"] for result in found["results"]] == [1, 0]
            assert [result["relevance_score"] for result in found["results"]] == [0.5, 0.25]
            assert found["usage"]["total_tokens"] == tokens
            account = quota_account("search", gateway.node.fleet.model_id)
            assert await gateway.node.store.call(ReadTotals(account)) == (tokens, tokens, 0, 0)
            many = await http.post("/v1/rerank", json={**body, "documents": ["x"] * 12})
            never = await http.post("/v1/rerank", json={**body, "documents": ["x"] * 50})
        assert (many.status_code, many.json()["error"]["code"]) == (429, "rate_limit_exceeded")
        assert (never.status_code, never.json()["error"]["param"]) == (400, "documents")
        assert scripted.submitted.empty()
        assert is_idle(gateway.node)


async def test_trace_and_metrics_have_the_endpoint(scripted: ScriptedBackend) -> None:
    """The span, the series and the flow of a request are those of `/v1/rerank` on any path."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    headers = {"x-flow-id": "question", "x-flow-deadline-ms": "60000"}
    async with running(backends=[scripted], tracing=tracing) as gateway, client(gateway) as http:
        body = {"query": "a", "documents": ["b"]}
        pending = asyncio.create_task(http.post("/rerank", json=body, headers=headers))
        request = await scripted.submitted.get()
        assert 0.0 < (request.service.ttft_s or 0.0) <= 60.0
        send_score(scripted, request.request_id, 0.5)
        flow = (await pending).json()["metrics"]["flow"]
        assert (flow["hop"], flow["budget_ms"]) == (1, pytest.approx(flow["remaining_ms"], rel=0.1))
        metrics = (await http.get("/metrics")).text
    tracing.shutdown()
    spans = {span.name: dict(span.attributes or {}) for span in exporter.get_finished_spans()}
    found = spans["POST /v1/rerank"]
    assert found["gen_ai.operation.name"] == "rerank"
    assert found["gen_ai.usage.input_tokens"] == len(request.prompt_ids)
    assert "draftgate.policy" not in found
    ended = 'endpoint="/v1/rerank",model_name="scripted",outcome="finished"} 1.0'
    assert f"draftgate_requests_total{{{ended}" in metrics


@pytest.mark.parametrize("broken", ["crash", "nan"])
async def test_failed_worker_is_503(scripted: ScriptedBackend, broken: str) -> None:
    """A worker that fails or computes a score that is not finite gives status 503."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        body = {"query": "a", "documents": ["b"]}
        pending = asyncio.create_task(http.post("/v1/rerank", json=body))
        request = await scripted.submitted.get()
        if broken == "crash":
            scripted.crash("out of memory")
        else:
            send_score(scripted, request.request_id, np.nan)
        response = await pending
    assert (response.status_code, response.json()["error"]["code"]) == (503, "worker_failed")
