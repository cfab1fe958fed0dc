"""One trace per request, ended at the last byte, and none where nobody asked for it."""

from __future__ import annotations

from collections.abc import AsyncIterator

import pytest
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter
from opentelemetry.trace import SpanKind

from draftgate.gateway.app import Listening
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.gateway.telemetry.trace_export import open_tracing
from draftgate.gateway.telemetry.tracing import NO_SPAN, Tracing
from tests.gateway.harness import client, load_of, post_raw, running, until

BODY = {"prompt": "tell nobody", "max_tokens": 20, "seed": 1}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@pytest.fixture
def exporter() -> InMemorySpanExporter:
    """Where spans end up."""
    return InMemorySpanExporter()


@pytest.fixture
async def traced(exporter: InMemorySpanExporter) -> AsyncIterator[Listening]:
    """A node that traces."""
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing, log_level="info") as where:
        yield where
    tracing.shutdown()


def by_name(exporter: InMemorySpanExporter) -> dict[str, ReadableSpan]:
    return {span.name: span for span in exporter.get_finished_spans()}


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_a_request_is_one_trace_below_its_clients(
    traced: Listening, exporter: InMemorySpanExporter, stream: bool
) -> None:
    """The server span continues the client's trace and has the decision and the outcome."""
    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
    async with client(traced) as http:
        await http.post("/v1/completions", json={**BODY, "stream": stream}, headers=headers)
    spans = by_name(exporter)
    hops = {"admit", "queue", "route", "decide", "reserve", "dispatch"}
    assert {"POST /v1/completions", *hops} <= set(spans)
    server = spans["POST /v1/completions"]
    assert server.kind is SpanKind.SERVER
    assert f"{server.context.trace_id:032x}" == TRACE
    assert f"{server.parent.span_id:016x}" == PARENT
    for name in hops:
        assert spans[name].parent.span_id == server.context.span_id
        assert spans[name].end_time <= server.end_time
    assert [event.name for event in server.events] == ["first_token"]
    found = dict(server.attributes)
    assert found["gen_ai.usage.output_tokens"] == 20
    assert found["draftgate.worker_id"] == traced.node.fleet.workers[0].worker_id
    assert found["draftgate.proposer"] == "ngram"
    assert found["draftgate.drafted_tokens"] >= found["draftgate.accepted_tokens"]
    assert "tell nobody" not in str(found)


async def test_a_span_ends_when_its_client_leaves(
    traced: Listening, exporter: InMemorySpanExporter
) -> None:
    """A cancelled request's trace is complete and says so."""
    body = {**BODY, "max_tokens": 8000, "stream": True}
    _, writer = await post_raw(traced, "/v1/completions", body)
    await until(lambda: load_of(traced.node).running == 1)
    writer.close()
    await until(lambda: "POST /v1/completions" in by_name(exporter))
    assert by_name(exporter)["POST /v1/completions"].attributes["draftgate.ending"] == "cancelled"


async def test_a_rejected_request_is_traced(
    traced: Listening, exporter: InMemorySpanExporter
) -> None:
    """Bad requests have a span, too, which is no error of ours."""
    async with client(traced) as http:
        await http.post("/v1/completions", json={"prompt": 5})
    (span,) = exporter.get_finished_spans()
    assert span.attributes["http.response.status_code"] == 400
    assert span.status.is_unset


def test_without_an_endpoint_there_is_no_exporter() -> None:
    """Tracing costs nothing unless it is asked for."""
    tracing = open_tracing(None, {})
    assert type(tracing) is Tracing
    assert tracing.server("x", {}, {}).child("y") is NO_SPAN
    asked = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_SDK_DISABLED": "true"}
    assert type(open_tracing(None, asked)) is Tracing
