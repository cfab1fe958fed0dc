"""Tests of the attributes of spans that describe a response."""

from __future__ import annotations

import json
from typing import Any

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.gateway.telemetry.otel import OtelTracing
from tests.gateway.harness import client, running
from tests.gateway.test_tracing import by_name
from tests.gateway.upstreams import DONE, Handler, forwarding, stream_of, upstream, whole

MESSAGES = [{"role": "user", "content": "x"}]
OWN: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/chat/completions": {"messages": MESSAGES, "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 3},
    "/v1/messages": {"messages": MESSAGES, "max_tokens": 3},
}


def id_in(text: str) -> str:
    """Return the id in a response or in its first event."""
    line = next(one for one in text.splitlines() if one.startswith(("data:", "{")))
    found = json.loads(line.removeprefix("data:"))
    return found.get("response", found.get("message", found))["id"]


@pytest.mark.parametrize("stream", [False, True])
async def test_the_span_has_the_id_of_the_response(*, stream: bool) -> None:
    """The span of each endpoint has the id that the client gets, and `dispatch` its worker."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing) as gateway, client(gateway) as http:
        for path, body in OWN.items():
            exporter.clear()
            response = await http.post(path, json={**body, "stream": stream})
            assert response.status_code == 200, response.text
            spans = by_name(exporter)
            server = spans[f"POST {path}"].attributes
            assert server["gen_ai.response.id"] == id_in(response.text)
            worker_id = gateway.node.fleet.workers[0].worker_id
            assert spans["dispatch"].attributes["draftgate.worker_id"] == worker_id
            assert spans["dispatch"].attributes["draftgate.prompt_tokens"] > 0


async def test_the_span_has_the_sampling_of_the_request() -> None:
    """The span has top-k, the penalties and the stop texts, but no defaults that do nothing."""
    exporter = InMemorySpanExporter()
    sampling = {"top_k": 7, "frequency_penalty": 0.5, "presence_penalty": 0.25, "stop": ["END"]}
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing) as gateway, client(gateway) as http:
        body = OWN["/v1/completions"]
        await http.post("/v1/completions", json={**body, **sampling})
        found = by_name(exporter)["POST /v1/completions"].attributes
        assert found["gen_ai.request.top_k"] == 7
        assert found["gen_ai.request.frequency_penalty"] == 0.5
        assert found["gen_ai.request.presence_penalty"] == 0.25
        assert found["gen_ai.request.stop_sequences"] == ("END",)
        exporter.clear()
        await http.post("/v1/completions", json=body)
        found = by_name(exporter)["POST /v1/completions"].attributes
        assert not {"gen_ai.request.top_k", "gen_ai.request.stop_sequences"} & set(found)


def chunk(reason: str | None, **fields: Any) -> bytes:
    choice = {"index": 0, "text": '"finish_reason": "no"', "finish_reason": reason}
    return b"data: " + json.dumps({"choices": [choice], "id": "c1", **fields}).encode() + b"\n\n"


def named(kind: str, **fields: Any) -> bytes:
    data = json.dumps({"type": kind, **fields})
    return f"event: {kind}\ndata: {data}\n\n".encode()


@pytest.mark.parametrize(
    ("path", "handler", "expected"),
    [
        ("/v1/completions", whole, ("c", None, ("stop",))),
        ("/v1/completions", stream_of(chunk(None, model="m"), chunk("length", model="m"), DONE),
         ("c1", "m", ("length",))),
        ("/v1/responses", stream_of(
            named("response.created", response={"id": "resp_1", "model": "m"}),
            named("response.output_text.delta", delta="a"),
            named("response.completed", response={"id": "resp_1"}),
        ), ("resp_1", "m", ("completed",))),
        ("/v1/messages", stream_of(
            named("message_start", message={"id": "msg_1", "model": "m", "stop_reason": None}),
            named("content_block_delta", delta={"text": "a"}),
            named("message_delta", delta={"stop_reason": "end_turn"}),
            named("message_stop"),
        ), ("msg_1", "m", ("end_turn",))),
    ],
)  # fmt: skip
async def test_the_span_of_a_forwarded_request_describes_the_response(
    path: str, handler: Handler, expected: tuple[str, str | None, tuple[str, ...]]
) -> None:
    """The span has the id, the model and the finish reasons of an upstream's response."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with (
        upstream(handler) as engine,
        forwarding(engine, tracing=tracing) as gateway,
        client(gateway) as http,
    ):
        await http.post(path, json={**OWN[path], "stream": handler is not whole})
    found = by_name(exporter)[f"POST {path}"].attributes
    names = ("gen_ai.response.id", "gen_ai.response.model", "gen_ai.response.finish_reasons")
    assert tuple(found.get(name) for name in names) == expected


async def test_the_compilation_of_a_grammar_has_a_span() -> None:
    """The span `grammar` is a child of `admit`, and exists only for requests with a grammar."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing) as gateway, client(gateway) as http:
        body = {**OWN["/v1/completions"], "structured_outputs": {"regex": "[ab]+"}}
        await http.post("/v1/completions", json=body)
        spans = by_name(exporter)
        assert spans["grammar"].parent.span_id == spans["admit"].context.span_id
        assert spans["grammar"].attributes["draftgate.grammar.kind"] == "regex"
        exporter.clear()
        await http.post("/v1/completions", json=OWN["/v1/completions"])
        assert "grammar" not in by_name(exporter)
