"""Tests of traces as an OTLP/HTTP collector receives them: spans, parents and ends."""

from __future__ import annotations

import asyncio
import logging
import random
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import pytest

from draftgate.backends.types import GenerationRequest, Phases
from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.worker_spans import MOST_CHOICES, MOST_CHUNKS
from draftgate.gateway.telemetry.metric_definitions import GENERATION_TOKENS
from draftgate.gateway.telemetry.trace_export import open_tracing
from draftgate.gateway.tracing import Tracing
from tests.gateway.collector import Collector, ReceivedSpan, collecting
from tests.gateway.harness import ScriptedBackend, client, post_raw, running, until

PATH = "/v1/completions"
SERVER = f"POST {PATH}"
GATEWAY_SPANS = ("admit", "queue", "route", "reserve", "decide", "dispatch")
"""Children of the SERVER span, in the order of their start."""
WORKER_SPANS = ("worker.queue", "prefill", "decode")
"""Children of the `dispatch` span, in the order of their start."""

BODY = {"prompt": "private prompt", "max_tokens": 20, "seed": 1, "stream": True}
TRACE = "0af7651916cd43dd8448eb211c80319c"
PARENT = "b7ad6b7169203331"


@asynccontextmanager
async def traced(
    collector: Collector, *backends: ScriptedBackend
) -> AsyncIterator[tuple[Listening, Tracing]]:
    """Run a node that exports to the collector, and flush all spans at the end."""
    tracing = open_tracing(collector.url, {})
    try:
        async with running(backends=backends, tracing=tracing) as gateway:
            yield gateway, tracing
    finally:
        await asyncio.to_thread(tracing.shutdown)


def phases_now(chunks: int = 2) -> Phases:
    """Return phases between the arrival of a request and now."""
    now_s = time.monotonic()
    prefill_chunks = tuple((now_s - 1e-6 * (chunks - index), 8) for index in range(chunks))
    return Phases(now_s - 1e-4, now_s - 5e-5, prefill_chunks, now_s)


async def submitted(backend: ScriptedBackend) -> GenerationRequest:
    """Return the next request after 0.2 ms, so that its phases begin after its arrival."""
    request = await backend.submitted.get()
    begin_s = time.monotonic()
    await until(lambda: time.monotonic() > begin_s + 2e-4)
    return request


def check_tree(collector: Collector, worker_spans: tuple[str, ...]) -> ReceivedSpan:
    """Assert that each span occurs once and within its parent, and return the SERVER span."""
    server, dispatch = collector.named(SERVER), collector.named("dispatch")
    assert sorted(span.name for span in collector.spans) == sorted(
        (SERVER, *GATEWAY_SPANS, *worker_spans)
    )
    for names, parent in ((GATEWAY_SPANS, server), (worker_spans, dispatch)):
        found = [collector.named(name) for name in names]
        assert [span.parent for span in found] == [parent.id] * len(names)
        assert all(span.within(parent) for span in found)
        starts = [span.span.start_time_unix_nano for span in found]
        assert starts == sorted(starts)
    assert len({span.trace for span in collector.spans}) == 1
    assert "private prompt" not in str(collector.spans)
    return server


async def test_streamed_request_has_all_spans_and_ends_with_its_last_byte(
    scripted: ScriptedBackend,
) -> None:
    """The SERVER span of a stream is a child of the client's span and ends after all other
    spans."""

    async def begin() -> GenerationRequest:
        request = await submitted(scripted)
        scripted.emit(request, "one two", phases=phases_now(chunks=3))
        return request

    headers = {"traceparent": f"00-{TRACE}-{PARENT}-01", "x-request-id": "mine"}
    async with collecting() as collector, traced(collector, scripted) as (gateway, tracing):
        beginning = asyncio.create_task(begin())
        async with (
            client(gateway) as http,
            http.stream("POST", PATH, json=BODY, headers=headers) as response,
        ):
            lines = response.aiter_lines()
            await anext(lines)
            await asyncio.to_thread(tracing._provider.force_flush)
            assert SERVER not in {span.name for span in collector.spans}
            last_ns = time.time_ns()
            scripted.emit(await beginning, "three", last=True)
            assert [line async for line in lines][-2:] == ["data: [DONE]", ""]
    server = check_tree(collector, WORKER_SPANS)
    assert (server.trace, server.parent) == (TRACE, PARENT)
    assert server.span.end_time_unix_nano > last_ns
    assert collector.named("dispatch").span.end_time_unix_nano > last_ns
    assert server.events == ["first_token"]
    assert collector.named("prefill").events == ["prefill_chunk"] * 3
    attributes = server.attributes
    assert attributes["http.request.method"] == "POST"
    assert attributes["http.route"] == attributes["url.path"] == PATH
    assert attributes["url.scheme"] == "http"
    assert attributes["http.response.status_code"] == 200
    assert attributes["gen_ai.operation.name"] == "text_completion"
    assert attributes["gen_ai.response.finish_reasons"] == ["stop"]
    assert attributes["gen_ai.usage.output_tokens"] == 3
    assert attributes["gen_ai.response.time_to_first_chunk"] > 0
    assert attributes["draftgate.request_id"] == "mine"
    assert attributes["draftgate.ending"] == "finished"
    assert attributes["draftgate.policy"] == "auto"
    assert not any(span.failed or "error.type" in span.attributes for span in collector.spans)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
@pytest.mark.parametrize("begun", [True, False], ids=["decoding", "queued"])
async def test_cancel_ends_all_spans_without_an_error(
    scripted: ScriptedBackend, stream: bool, begun: bool
) -> None:
    """The trace of a disconnected client is complete, has no error and is marked as cancelled."""
    async with collecting() as collector, traced(collector, scripted) as (gateway, _):
        reader, writer = await post_raw(gateway, PATH, {**BODY, "stream": stream})
        request = await submitted(scripted)
        if begun:
            scripted.emit(request, "one", phases=phases_now())
            counted = gateway.node.metrics.scalar
            await until(lambda: counted(GENERATION_TOKENS).value == 1)
        if begun and stream:
            await reader.readuntil(b"data: ")
        writer.close()
        await until(lambda: gateway.node.in_flight == 0)
    server = check_tree(collector, WORKER_SPANS if begun else ())
    assert server.attributes["draftgate.ending"] == "cancelled"
    assert server.attributes["http.response.status_code"] == 499
    assert not any(span.failed for span in collector.spans)


@pytest.mark.parametrize("begun", [True, False], ids=["after the first byte", "before it"])
async def test_worker_failure_marks_dispatch_and_server_span(
    scripted: ScriptedBackend, begun: bool
) -> None:
    """A worker failure marks the SERVER and `dispatch` spans as failed."""
    async with collecting() as collector, traced(collector, scripted) as (gateway, _):
        reader, writer = await post_raw(gateway, PATH, BODY)
        request = await submitted(scripted)
        if begun:
            scripted.emit(request, "one", phases=phases_now())
            await reader.readuntil(b"data: ")
        broken_ns = time.time_ns()
        scripted.crash("device lost")
        await reader.readuntil(b"worker_failed")
        writer.close()
        await until(lambda: gateway.node.in_flight == 0)
    server = check_tree(collector, WORKER_SPANS if begun else ())
    assert {span.name for span in collector.spans if span.failed} == {SERVER, "dispatch"}
    assert server.attributes["error.type"] == "BackendFailed"
    assert server.attributes["http.response.status_code"] == 503
    assert server.attributes["draftgate.ending"] == "failed"
    assert server.span.end_time_unix_nano > broken_ns


async def test_refused_request_ends_in_the_admit_span(scripted: ScriptedBackend) -> None:
    """A request that is too long ends in the `admit` span without a server error."""
    async with (
        collecting() as collector,
        traced(collector, scripted) as (gateway, _),
        client(gateway) as http,
    ):
        assert (await http.post(PATH, json={**BODY, "max_tokens": 999})).status_code == 400
    server, admit = collector.named(SERVER), collector.named("admit")
    assert admit.parent == server.id
    assert admit.attributes["error.type"] == "RequestRejected"
    assert not any(span.failed for span in collector.spans)
    assert "error.type" not in server.attributes
    assert server.attributes["http.response.status_code"] == 400


async def test_spans_of_choices_and_events_of_chunks_are_bounded(scripted: ScriptedBackend) -> None:
    """The trace limits the spans of choices and the events of chunks, and reports the full count of
    chunks."""
    choices = MOST_CHOICES + 2
    async with collecting() as collector, traced(collector, scripted) as (gateway, _):
        _, writer = await post_raw(gateway, PATH, {**BODY, "n": choices, "stream": False})
        request = await submitted(scripted)
        for choice in range(choices):
            phases = phases_now(chunks=MOST_CHUNKS + 5)
            scripted.emit(request, "one", choice=choice, last=True, phases=phases)
        await until(lambda: gateway.node.in_flight == 0)
        writer.close()
    prefills = [span for span in collector.spans if span.name == "prefill"]
    assert len(prefills) == MOST_CHOICES
    assert all(len(span.events) == MOST_CHUNKS for span in prefills)
    assert {span.attributes["draftgate.prefill.chunks"] for span in prefills} == {MOST_CHUNKS + 5}
    assert collector.named("dispatch").attributes["draftgate.traced_choices"] == MOST_CHOICES
    decodes = [span.attributes for span in collector.spans if span.name == "decode"]
    assert {attributes["draftgate.choice"] for attributes in decodes} == set(range(MOST_CHOICES))
    assert all(attributes["draftgate.spec_steps"] == 0 for attributes in decodes)


async def test_resumed_request_has_one_trace(scripted: ScriptedBackend) -> None:
    """The trace of a resumed request contains the spans of both workers."""
    other = ScriptedBackend()
    async with collecting() as collector, traced(collector, scripted, other) as (gateway, _):
        ids = [worker.worker_id for worker in gateway.node.fleet.workers]
        reader, writer = await post_raw(gateway, PATH, BODY)
        request = await submitted(scripted)
        scripted.emit(request, "one two", phases=phases_now())
        await reader.readuntil(b"data: ")
        scripted.crash("device lost")
        rest = await submitted(other)
        other.emit(rest, "three", phases=phases_now(), last=True)
        await reader.readuntil(b"[DONE]")
        writer.close()
        await until(lambda: gateway.node.in_flight == 0)
    server = collector.named(SERVER)
    assert not server.failed
    assert server.events == ["first_token", "resume"]
    resume = server.attributes_of("resume")
    assert resume == {
        "draftgate.prompt": 0,
        "draftgate.resume.cause": "failed",
        "draftgate.resume.from": ids[0],
        "draftgate.resume.to": ids[1],
        "draftgate.resume.kept_tokens": 2,
        "draftgate.resume.same_numerics_class": True,
    }
    for name in GATEWAY_SPANS:
        found = [span for span in collector.spans if span.name == name]
        assert len(found) == (1 if name == "admit" else 2)
        assert all(span.parent == server.id and span.within(server) for span in found)
        assert [span.failed for span in found] == ([name == "dispatch", False])[: len(found)]
    dispatches = [span for span in collector.spans if span.name == "dispatch"]
    assert dispatches[0].attributes["error.type"] == "BackendFailed"
    for dispatch in dispatches:
        children = [span for span in collector.spans if span.parent == dispatch.id]
        assert [child.name for child in children] == list(WORKER_SPANS)
        assert all(child.within(dispatch) for child in children)
    routed = [
        span.attributes["draftgate.worker_id"] for span in collector.spans if span.name == "route"
    ]
    assert routed == ids


@pytest.mark.parametrize(
    ("environ", "headers", "names"),
    [
        ({}, {}, {"x"}),
        ({"OTEL_TRACES_SAMPLER": "always_off"}, {}, set()),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "0"}, {}, set()),
        ({"OTEL_TRACES_SAMPLER": "traceidratio", "OTEL_TRACES_SAMPLER_ARG": "1"}, {}, {"x"}),
        ({}, {"TraceParent": f"00-{TRACE}-{PARENT}-00"}, set()),
        ({}, {"TraceParent": f"00-{TRACE}-{PARENT}-01"}, {"x"}),
        ({}, {"traceparent": "nonsense"}, {"x"}),
        ({"OTEL_SDK_DISABLED": "TRUE"}, {}, set()),
    ],
)  # fmt: skip
async def test_sampling_follows_the_environment_and_the_client(
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    headers: dict[str, str],
    names: set[str],
) -> None:
    """The sampler, the disabling variable and the client's decision determine whether a span is
    exported."""
    async with collecting() as collector:
        await send(
            collector,
            monkeypatch,
            {"OTEL_EXPORTER_OTLP_ENDPOINT": collector.url, **environ},
            headers,
        )
    assert {span.name for span in collector.spans} == names


@pytest.mark.parametrize("sampler", ["traceidratio", "parentbased_traceidratio"])
def test_the_configured_share_of_requests_is_sampled(
    monkeypatch: pytest.MonkeyPatch, sampler: str
) -> None:
    """A share of the requests without a parent is recorded, and each with a sampled parent."""
    from opentelemetry.sdk.trace.export import SimpleSpanProcessor
    from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

    from draftgate.gateway.telemetry.otel import OtelTracing

    monkeypatch.setenv("OTEL_TRACES_SAMPLER", sampler)
    monkeypatch.setenv("OTEL_TRACES_SAMPLER_ARG", "0.25")
    random.seed(1)
    tracing, number = OtelTracing(SimpleSpanProcessor(InMemorySpanExporter())), 4000
    spans = [tracing.server("x", {}, {}) for _ in range(number)]
    found = [span for span in spans if span.recording]
    assert abs(len(found) - number / 4) < 4 * (number * 0.25 * 0.75) ** 0.5
    assert len({span.trace_id for span in found}) == len(found)
    if sampler == "parentbased_traceidratio":
        child = tracing.server("x", {"traceparent": f"00-{TRACE}-{PARENT}-01"}, {})
        assert child.trace_id == TRACE
    tracing.shutdown()


async def test_environment_sets_service_name_endpoint_and_headers(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The exporter uses the service name, endpoint and headers from the environment."""
    async with collecting() as collector:
        environ = {
            "OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1",
            "OTEL_EXPORTER_OTLP_TRACES_ENDPOINT": f"{collector.url}/v1/traces",
            "OTEL_EXPORTER_OTLP_HEADERS": "x-key=1",
            "OTEL_SERVICE_NAME": "edge",
            "OTEL_RESOURCE_ATTRIBUTES": "deployment.environment.name=test",
        }
        await send(collector, monkeypatch, environ, {})
    (span,) = collector.spans
    assert span.resource["service.name"] == "edge"
    assert span.resource["deployment.environment.name"] == "test"
    assert collector.headers[0]["x-key"] == "1"


@pytest.mark.parametrize("suffix", ["", "/", "/v1/traces"])
async def test_otlp_endpoint_accepts_the_address_with_and_without_path(
    monkeypatch: pytest.MonkeyPatch, suffix: str
) -> None:
    """The flag `--otlp-endpoint` accepts an address with or without the path `/v1/traces`."""
    async with collecting() as collector:
        await send(collector, monkeypatch, {}, {}, collector.url + suffix)
    assert collector.named("x").resource["service.name"] == "draftgate"


def test_exporter_none_disables_tracing() -> None:
    """The variable `OTEL_TRACES_EXPORTER=none` disables tracing although an endpoint is set."""
    environ = {"OTEL_EXPORTER_OTLP_ENDPOINT": "http://127.0.0.1:1", "OTEL_TRACES_EXPORTER": "none"}
    assert type(open_tracing(None, environ)) is Tracing


async def test_unsupported_otlp_protocol_is_logged(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    """The exporter logs a warning about an unsupported protocol and uses HTTP."""
    async with collecting() as collector:
        with caplog.at_level(logging.WARNING, logger="draftgate"):
            environ = {"OTEL_EXPORTER_OTLP_PROTOCOL": "grpc"}
            await send(collector, monkeypatch, environ, {}, collector.url)
    assert collector.named("x")
    assert [record.getMessage() for record in caplog.records] == ["unsupported OTLP protocol"]


async def send(
    collector: Collector,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    headers: dict[str, str],
    endpoint: str | None = None,
) -> None:
    """Set the variables, trace a request `x` and flush the exporter."""
    from multidict import CIMultiDict

    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    tracing = open_tracing(endpoint, environ)
    tracing.server("x", CIMultiDict(headers), {}).end()
    await asyncio.to_thread(tracing.shutdown)
