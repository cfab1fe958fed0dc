"""Tests of OpenAI's client with a forwarding node, and the effects at both ends."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import AsyncIterator
from pathlib import Path

import openai
import pytest
from aiohttp import web
from aiohttp.test_utils import TestServer
from openai import AsyncOpenAI
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from draftgate.backends.openai.connections import Connections
from draftgate.backends.openai.monitor import UpstreamMonitor
from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.types import Capabilities
from draftgate.backends.upstream_testing import check_upstream
from draftgate.backends.worker_config import UpstreamSettings, WorkerConfig
from draftgate.gateway.app import Listening, StartError, build_node, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.state.commands import ReadTotals
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.types import WorkerLoad
from tests.gateway.clients import openai_client
from tests.gateway.harness import client, is_idle, load_of, running, until
from tests.gateway.upstreams import (
    DONE,
    LAST,
    SSE,
    TOKEN,
    Clock,
    cut_after,
    forwarding,
    refusal,
    upstream,
    whole,
)
from tests.upstream_settings import at

CHAT = [{"role": "user", "content": "def add(a, b):"}]


@pytest.fixture
async def gateway(sim: Listening) -> AsyncIterator[Listening]:
    """A node that forwards to a node with the simulator."""
    async with running(backend="openai", upstream=at(sim.url + "/v1")) as listening:
        yield listening


@pytest.fixture
async def api(gateway: Listening) -> AsyncIterator[AsyncOpenAI]:
    """OpenAI's client of the forwarding node."""
    async with openai_client(gateway.url) as opened:
        yield opened


async def test_models_of_the_upstream_are_listed(api: AsyncOpenAI, sim: Listening) -> None:
    """The gateway forwards the list of models and each entry."""
    name = sim.node.served.name
    assert [model.id for model in (await api.models.list()).data] == [name]
    assert (await api.models.retrieve(name)).id == name
    with pytest.raises(openai.NotFoundError):
        await api.models.retrieve("another")


async def test_chat_and_completions_whole_and_streamed(api: AsyncOpenAI, sim: Listening) -> None:
    """The same seed gives the same text and usage, whole or streamed."""
    model = sim.node.served.name
    common = {"model": model, "max_tokens": 12, "seed": 5}
    for create, prompt in (
        (api.chat.completions.create, {"messages": CHAT}),
        (api.completions.create, {"prompt": "def f(x):"}),
    ):
        response = await create(**common, **prompt)
        options = {"include_usage": True}
        stream = await create(**common, **prompt, stream=True, stream_options=options)
        chunks = [chunk async for chunk in stream]
        choice = response.choices[0]
        if "messages" in prompt:
            text = choice.message.content
            pieces = [c.choices[0].delta.content or "" for c in chunks if c.choices]
        else:
            text = choice.text
            pieces = [c.choices[0].text for c in chunks if c.choices]
        assert "".join(pieces) == text != ""
        assert chunks[-1].usage.completion_tokens == response.usage.completion_tokens == 12


async def test_usage_is_not_added_unless_requested(api: AsyncOpenAI, sim: Listening) -> None:
    """The stream has no usage chunk without `include_usage`."""
    stream = await api.completions.create(
        model=sim.node.served.name, prompt="x", max_tokens=4, stream=True
    )
    assert all([chunk.choices async for chunk in stream])


async def test_closing_a_stream_frees_kv_at_the_upstream(
    api: AsyncOpenAI, sim: Listening, gateway: Listening
) -> None:
    """Closing a stream frees the request at the gateway and at the upstream."""
    body = {"prompt": "x", "max_tokens": 8000, "extra_body": {"ignore_eos": True}}
    stream = await api.completions.create(model=sim.node.served.name, stream=True, **body)
    await anext(aiter(stream))
    assert load_of(sim.node).running == load_of(gateway.node).running == 1
    await stream.close()
    await until(lambda: is_idle(sim.node) and is_idle(gateway.node))


async def test_upstream_errors_keep_their_types(api: AsyncOpenAI, sim: Listening) -> None:
    """The client raises the same exception with and without a gateway."""
    model = sim.node.served.name
    with pytest.raises(openai.BadRequestError) as bad:
        await api.completions.create(model=model, prompt="x", temperature=-1)
    assert bad.value.param == "temperature"
    with pytest.raises(openai.NotFoundError):
        await api.completions.create(model="another", prompt="x")


async def test_cut_stream_raises_in_the_client() -> None:
    """The client raises an exception when the upstream's stream is cut."""
    async with (
        upstream(cut_after(TOKEN)) as engine,
        forwarding(engine) as gateway,
        openai_client(gateway.url) as api,
    ):
        stream = await api.completions.create(model="theirs", prompt="x", stream=True)
        assert (await anext(aiter(stream))).choices[0].text == " a"
        with pytest.raises(openai.APIError, match="the upstream failed"):
            await anext(aiter(stream))


async def test_counts_of_tokens_are_forwarded_or_404(gateway: Listening) -> None:
    """The gateway forwards counts of tokens, or responds with 404 if the upstream does not support
    the path."""
    async with client(gateway) as http:
        assert (await http.post("/tokenize", json={"prompt": "a b"})).json()["count"] > 0
        counted = await http.post("/v1/responses/input_tokens", json={"input": "a b"})
        assert counted.json()["input_tokens"] > 0
        assert (await http.get("/decisions")).json()["decisions"] == []

    async def missing(request):
        return web.Response(status=404)

    async with upstream(missing) as engine, forwarding(engine) as bare, client(bare) as http:
        for path in ("/tokenize", "/v1/responses/input_tokens"):
            name = "prompt" if path == "/tokenize" else "input"
            response = await http.post(path, json={name: "a"})
            assert response.status_code == 404
            assert response.json()["error"]["code"] == "not_found"
        assert (await http.post("/v1/embeddings", json={"input": "a"})).status_code == 404


async def test_upstream_gets_the_same_body(monkeypatch: pytest.MonkeyPatch) -> None:
    """The upstream receives the same body with the request id and the gateway's key."""
    monkeypatch.setenv("THEIR_KEY", "secret")
    body = b'{ "model":"theirs",  "prompt":"\xc3\xbc", "speculation": {"mode": "off"}, "x": 1.50}'
    headers = {
        "Content-Type": "application/json",
        "Authorization": "Bearer ours",
        "x-request-id": "mine-1",
        "x-slo-ttft-ms": "100",
        "Cookie": "a=b",
    }
    async with upstream(whole) as engine:
        settings = {"upstream": at(engine.url), "upstream_api_key_env": "THEIR_KEY"}
        async with running(backend="openai", **settings) as gateway, client(gateway) as http:
            response = await http.post("/v1/completions?a=%2F", content=body, headers=headers)
    (request,) = engine.requests
    assert engine.bodies == [body]
    assert request.path_qs == "/v1/completions?a=%2F"
    assert request.headers["Authorization"] == "Bearer secret"
    assert request.headers["x-request-id"] == response.headers["x-request-id"] == "mine-1"
    assert request.headers["x-slo-ttft-ms"] == "100"
    assert "Cookie" not in request.headers


async def test_large_body_arrives_whole() -> None:
    """The gateway forwards a body of 3 MB completely."""
    body = json.dumps({"prompt": "p" * (3 << 20)}).encode()
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as http:
        assert (await http.post("/v1/completions", content=body)).status_code == 200
    assert engine.bodies == [body]


async def test_served_model_name_is_replaced() -> None:
    """The gateway replaces only the model's name in the body."""
    body = b'{"n":1.50,"model":"ours","prompt":"\\u00fc","model_x":null}'
    async with (
        upstream(whole) as engine,
        forwarding(engine, served_model_name=("ours",)) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post("/v1/completions", content=body)).status_code == 200
        assert engine.bodies == [b'{"n":1.50,"model":"theirs","prompt":"\\u00fc","model_x":null}']
        assert (await http.get("/v1/models")).json()["data"][0]["id"] == "ours"
        response = await http.post("/v1/completions", json={"model": "theirs", "prompt": "x"})
        assert response.json()["error"]["code"] == "model_not_found"
        assert len(engine.requests) == 1


async def test_every_served_name_reaches_the_upstream() -> None:
    """The gateway replaces each of several names by that of the upstream, and lists all names."""
    names = ("ours", "alias", "theirs")
    async with (
        upstream(whole) as engine,
        forwarding(engine, served_model_name=names) as gateway,
        client(gateway) as http,
    ):
        for name in names:
            body = {"model": name, "prompt": "x"}
            assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert all(b'"theirs"' in body for body in engine.bodies)
        listed = (await http.get("/v1/models")).json()["data"]
        assert tuple(model["id"] for model in listed) == names


async def test_embeddings_follow_the_rules_of_generation(tmp_path: Path) -> None:
    """The gateway applies names, priorities, metrics and quotas to embeddings."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: search, key: k, tokens_per_minute: 1000, role: operator}]")
    handler = refusal(200, b'{"data": [], "usage": {"prompt_tokens": 9, "total_tokens": 9}}')
    async with (
        upstream(handler) as engine,
        forwarding(engine, served_model_name=("ours",), api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
    ):
        http.headers["Authorization"] = "Bearer k"
        body = {"model": "ours", "input": "x", "priority": -4}
        assert (await http.post("/v1/embeddings", json=body)).status_code == 200
        assert json.loads(engine.bodies[0]) == {"model": "theirs", "input": "x", "priority": 0}
        metrics = (await http.get("/metrics")).text
        store = gateway.node.store
        assert (await store.call(ReadTotals(quota_account("search", "")))).settled == 9
    (requests,) = [line for line in metrics.splitlines() if "/v1/embeddings" in line]
    assert 'outcome="finished"' in requests
    assert 'tenant="search"} 9.0' in metrics


@pytest.mark.parametrize("usage", [{"total_tokens": 9}, {"prompt_tokens": 9, "total_tokens": 9}])
async def test_rerank_is_forwarded_and_charged(usage: dict[str, int], tmp_path: Path) -> None:
    """A quota counts the usage of a rerank response, which precedes any number of documents."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys: [{name: search, key: k, tokens_per_minute: 1000}]")
    results = [{"index": 0, "document": {"text": "x" * 100_000}, "relevance_score": 0.5}]
    reply = {"id": "rerank-1", "model": "theirs", "usage": usage, "results": results}
    async with (
        upstream(refusal(200, json.dumps(reply).encode())) as engine,
        forwarding(engine, served_model_name=("ours",), api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
    ):
        http.headers["Authorization"] = "Bearer k"
        body = {"model": "ours", "query": "q", "documents": ["x"]}
        response = await http.post("/v2/rerank", json=body)
        assert (response.status_code, response.json()) == (200, reply)
        assert engine.requests[0].path == "/v2/rerank"
        assert json.loads(engine.bodies[0])["model"] == "theirs"
        assert (await gateway.node.store.call(ReadTotals(quota_account("search", "")))).settled == 9


async def test_openapi_document_needs_no_local_model(gateway: Listening) -> None:
    """The gateway serves `/openapi.json` without a tokenizer."""
    async with client(gateway) as http:
        response = await http.get("/openapi.json")
    assert response.status_code == 200
    assert "/v1/chat/completions" in response.json()["paths"]


@pytest.mark.parametrize("traced", [True, False], ids=["traced", "untraced"])
async def test_upstream_continues_the_trace(traced: bool) -> None:
    """The upstream receives the gateway's span as its parent, or the client's without tracing."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter)) if traced else None
    headers = {"traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}
    async with (
        upstream(whole) as engine,
        forwarding(engine, tracing=tracing) as gateway,
        client(gateway) as http,
    ):
        await http.post("/v1/completions", json={"prompt": "x"}, headers=headers)
    _, trace, parent, _ = engine.requests[0].headers["traceparent"].split("-")
    assert trace == "0af7651916cd43dd8448eb211c80319c"
    if not traced:
        assert parent == "b7ad6b7169203331"
        return
    spans = {span.name: span for span in exporter.get_finished_spans()}
    assert set(spans) == {"POST /v1/completions", "admit", "queue", "route", "dispatch"}
    server, dispatch = spans["POST /v1/completions"], spans["dispatch"]
    assert f"{dispatch.context.span_id:016x}" == parent
    assert dispatch.parent.span_id == server.context.span_id
    assert server.attributes["gen_ai.usage.output_tokens"] == 2
    assert dispatch.end_time <= server.end_time
    assert dispatch.kind is SpanKind.CLIENT
    port = int(engine.url.rpartition(":")[2])
    assert dispatch.attributes["server.address"] == "127.0.0.1"
    assert dispatch.attributes["server.port"] == port
    assert dispatch.attributes["http.response.status_code"] == 200
    assert server.kind is SpanKind.SERVER
    assert spans["route"].end_time > spans["route"].start_time


async def test_load_of_an_upstream_without_metrics() -> None:
    """The load of an upstream without metrics uses the setting and the observed streams."""
    clock, begun = Clock(), asyncio.Event()

    async def handler(request: web.Request) -> web.StreamResponse:
        clock.now_s += 2.0
        response = web.StreamResponse(headers=SSE)
        await response.prepare(request)
        await response.write(TOKEN)
        await begun.wait()
        await response.write(TOKEN + TOKEN + LAST + DONE)
        return response

    async with upstream(handler) as engine:
        config = WorkerConfig(upstream=UpstreamSettings(url=engine.url, concurrency=7))
        worker = OpenAIUpstream(config, clock, probe_s=3600.0)
        async with running(backends=[worker]) as gateway, client(gateway) as http:
            assert worker.load() == WorkerLoad(0, 0, 0, 0, 0.0, 0.0, (), max_sequences=7)
            body = b'{"stream": true}    '
            async with http.stream("POST", "/v1/completions", content=body) as got:
                pieces = got.aiter_bytes()
                await anext(pieces)
                assert worker.load().running == 1
                clock.now_s += 0.9
                begun.set()
                assert [piece async for piece in pieces][-1].endswith(DONE)
            await until(lambda: worker.load().running == 0)
            assert worker.load().speed.tpot_s == pytest.approx(0.9 / 3)
            assert worker.load().speed.prompt_token_s == pytest.approx(2.0 / 5)
            card = worker.card
    assert (card.model_id, card.max_model_len, card.numerics_class) == ("theirs", 99, None)
    assert card.capabilities == Capabilities(token_ids=False, resume=False, speculation=False)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"backend": "openai"}, "needs --upstream URL"),
        (
            {
                "backend": "openai",
                "upstream": at("http://x"),
                "join": "redis://localhost",
                "no_worker": True,
            },
            "--no-worker cannot be combined with --backend openai",
        ),
        (
            {"backend": "openai", "upstream": at("http://x"), "upstream_api_key_env": "NOT_SET_X"},
            "the variable NOT_SET_X is not set",
        ),
    ],
)
async def test_missing_setting_fails_the_start_with_one_line(
    settings: dict[str, object], message: str
) -> None:
    """The start fails with one line that names the missing or conflicting setting."""
    with pytest.raises(StartError, match=message):
        await start_workers(build_node(ServeConfig(**settings)))


async def test_invalid_json_is_forwarded_to_the_upstream() -> None:
    """The gateway forwards a body that is not JSON, because the upstream knows its fields."""
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as http:
        assert (await http.post("/v1/completions", content=b"not json")).status_code == 200
        assert engine.bodies == [b"not json"]


class _Miscounting(OpenAIUpstream):
    """An upstream backend that counts no request as running."""

    def load(self) -> WorkerLoad:
        return WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ())


async def test_openai_upstream_passes_conformance_suite(sim: Listening) -> None:
    """The OpenAI upstream passes the conformance suite, and a broken upstream fails."""
    await check_upstream(OpenAIUpstream(WorkerConfig(upstream=UpstreamSettings(url=sim.url))))
    with pytest.raises(AssertionError, match="counts as running"):
        await check_upstream(_Miscounting(WorkerConfig(upstream=UpstreamSettings(url=sim.url))))


async def test_models_that_are_nested_too_deeply_are_a_failed_probe() -> None:
    """A list of models that cannot be read does not end the probes."""

    async def nested(request: web.Request) -> web.Response:
        text = "[" * 100_000 if request.path == "/v1/models" else ""
        return web.Response(text=text, content_type="application/json")

    app = web.Application()
    app.router.add_get("/{path:.*}", nested)
    async with TestServer(app) as server:
        connections = Connections(str(server.make_url("")).rstrip("/"), {})
        failure = await UpstreamMonitor(connections, time.monotonic).probe()
        connections.close()
    assert failure is not None
    assert not failure.timeout
