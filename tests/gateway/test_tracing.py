"""Tests of tracing: one trace per request that ends at the last byte, and none by default."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator
from typing import Any

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.gateway.telemetry.trace_export import open_tracing
from draftgate.gateway.tracing import NO_SPAN, Tracing
from tests.gateway.harness import client, load_of, post_raw, running, until

BODY = {"prompt": "private prompt", "max_tokens": 20, "seed": 1}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """An exporter that stores the ended spans."""
    return InMemorySpanExporter()


@pytest.fixture
async def traced(exporter: InMemorySpanExporter) -> AsyncIterator[Listening]:
    """A node with tracing."""
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing, log_level="info") as gateway:
        yield gateway
    tracing.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_request_has_one_trace_below_the_clients(
    traced: Listening, exporter: InMemorySpanExporter, stream: bool
) -> None:
    """The SERVER span is a child of the client's span and contains the decision and the outcome."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with client(traced) as http:
        await http.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
    spans = by_name(exporter)
    names = {"admit", "queue", "route", "decide", "reserve", "dispatch"}
    assert {"POST /v1/completions", *names} <= set(spans)
    server = spans["POST /v1/completions"]
    assert server.kind is SpanKind.SERVER
    assert f"{server.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == PARENT
    for name in names:
        assert spans[name].parent.span_id == server.context.span_id
        assert spans[name].end_time <= server.end_time
    assert [event.name for event in server.events] == ["first_token"]
    found = dict(server.attributes)
    assert found["gen_ai.usage.output_tokens"] == 20
    assert found["draftgate.worker_id"] == traced.node.fleet.workers[0].worker_id
    assert found["draftgate.proposer"] == "ngram"
    assert found["draftgate.drafted_tokens"] >= found["draftgate.accepted_tokens"]
    assert "private prompt" not in str(found)


async def test_span_ends_when_its_client_leaves(
    traced: Listening, exporter: InMemorySpanExporter
) -> None:
    """The trace of a disconnected client is complete and marked as cancelled."""
    body = {**BODY, "max_tokens": 8000, "stream": True}
    _, writer = await post_raw(traced, "/v1/completions", body)
    await until(lambda: load_of(traced.node).running == 1)
    writer.close()
    await until(lambda: "POST /v1/completions" in by_name(exporter))
    assert by_name(exporter)["POST /v1/completions"].attributes["draftgate.ending"] == "cancelled"


async def test_rejected_request_has_a_span_without_an_error(
    traced: Listening, exporter: InMemorySpanExporter
) -> None:
    """The span of a rejected request has no error status."""
    async with client(traced) as http:
        await http.post("/v1/completions", json={"prompt": 5})
    (span,) = exporter.get_finished_spans()
    assert span.attributes["http.response.status_code"] == 400
    assert span.status.is_unset


def test_tracing_is_off_without_an_endpoint() -> None:
    """The node records no spans without an endpoint."""
    tracing = open_tracing(None, {})
    assert type(tracing) is Tracing
    assert tracing.server("x", {}, {}).child("y") is NO_SPAN
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}
    assert type(open_tracing(None, environ)) is Tracing


async def test_route_spans_the_decision_and_empty_tenants_are_omitted(
    traced: Listening, exporter: InMemorySpanExporter, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The span `route` lasts as long as the choice of the worker. Without keys, no span has the
    attribute `draftgate.tenant`."""
    times: list[float] = []
    choose = Router._choose

    def watched(*args: Any) -> Any:
        times.append(time.monotonic())
        routed = choose(*args)
        times.append(time.monotonic())
        return routed

    monkeypatch.setattr(Router, "_choose", watched)
    async with running(devices=(0, 1), tracing=traced.node.tracing) as two, client(two) as http:
        await http.post("/v1/completions", json=BODY)
    spans = by_name(exporter)
    begin_s, end_s = times
    length_ns = spans["route"].end_time - spans["route"].start_time
    assert length_ns >= (end_s - begin_s) * 1e9
    assert not any("draftgate.tenant" in span.attributes for span in spans.values())
    assert spans["dispatch"].kind is SpanKind.INTERNAL


async def test_spans_of_a_tenant_name_the_tenant(exporter: InMemorySpanExporter) -> None:
    """The span of a request with a key has the attribute `draftgate.tenant`."""
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing, api_keys=("sk-one",)) as node, client(node) as http:
        headers = {"authorization": "Bearer sk-one"}
        await http.post("/v1/completions", json=BODY, headers=headers)
    tenant = by_name(exporter)["POST /v1/completions"].attributes["draftgate.tenant"]
    assert tenant.startswith("key-")
