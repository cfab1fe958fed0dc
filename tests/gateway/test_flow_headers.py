"""Tests of the headers of flows over HTTP, and of what responses, spans and metrics report."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.types import Capabilities, Delta, FinishReason, Task
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.types import ServiceLevel
from tests.gateway.harness import (
    ScriptedBackend,
    accepted_request,
    client,
    events,
    running,
    until,
)
from tests.gateway.test_metrics import samples
from tests.gateway.upstreams import forwarding, upstream, whole

HEADERS = {"x-flow-id": "question: 7", "x-flow-deadline-ms": "60000"}
CHAT = [{"role": "user", "content": "x"}]
BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": {"prompt": "x", "max_tokens": 3},
    "/v1/chat/completions": {"messages": CHAT, "max_tokens": 3},
    "/v1/responses": {"input": "x", "max_output_tokens": 16},
    "/v1/messages": {"messages": CHAT, "max_tokens": 3, "model": "m"},
}


async def test_every_endpoint_reports_the_hop() -> None:
    """Completions, chats, responses and messages of one flow report their place and budget."""
    async with running() as gateway, client(gateway) as http:
        model = gateway.node.models[0].name
        for hop, (path, body) in enumerate(BODIES.items(), start=1):
            response = await http.post(path, json={**body, "model": model}, headers=HEADERS)
            assert response.status_code == 200, response.text
            flow = response.json()["metrics"]["flow"]
            assert flow["hop"] == hop
            assert 0.0 < flow["budget_ms"] <= flow["remaining_ms"] <= 60_000
        stream = {**BODIES["/v1/completions"], "stream": True}
        last = events((await http.post("/v1/completions", json=stream, headers=HEADERS)).text)[-2]
        assert last["metrics"]["flow"]["hop"] == len(BODIES) + 1
        found = samples(gateway.node.metrics)
    for hop in range(1, len(BODIES) + 2):
        assert found["draftgate_flow_requests_total", (("hop", str(hop)),)] == 1
        assert found["draftgate_flow_hop_deadline_ratio_count", (("hop", str(hop)),)] == 1


async def test_request_without_a_known_flow_is_ordinary() -> None:
    """A request without the headers, or with an unknown id alone, has no flow in its metrics."""
    async with running() as gateway, client(gateway) as http:
        for headers in ({}, {"x-flow-id": "unknown"}):
            body = BODIES["/v1/completions"]
            response = await http.post("/v1/completions", json=body, headers=headers)
            assert "flow" not in response.json()["metrics"]
        found = samples(gateway.node.metrics)
    assert found["draftgate_flow_requests_total", (("hop", "none"),)] == 1


@pytest.mark.parametrize("path", ["/v1/completions", "/v1/chat/completions"])
@pytest.mark.parametrize(
    ("headers", "param"),
    [
        ({"x-flow-id": ""}, "x-flow-id"),
        ({"x-flow-id": "x" * 129}, "x-flow-id"),
        ({"x-flow-id": "a\tb"}, "x-flow-id"),
        ({"x-flow-id": "é".encode()}, "x-flow-id"),
        ({"x-flow-id": "f", "x-flow-deadline-ms": "soon"}, "x-flow-deadline-ms"),
        ({"x-flow-id": "f", "x-flow-deadline-ms": "0"}, "x-flow-deadline-ms"),
        ({"x-flow-id": "f", "x-flow-deadline-ms": "1e12"}, "x-flow-deadline-ms"),
        ({"x-flow-deadline-ms": "500"}, "x-flow-deadline-ms"),
    ],
)
async def test_an_invalid_header_is_400_and_named(
    path: str, headers: dict[str, str | bytes], param: str
) -> None:
    """The server rejects an invalid header with 400 and names the header."""
    async with running() as gateway, client(gateway) as http:
        response = await http.post(path, json=BODIES[path], headers=headers)
        assert (response.status_code, response.json()["error"]["param"]) == (400, param)


async def test_embedding_is_a_hop_within_the_limits_of_its_account(tmp_path: Path) -> None:
    """An embedding gets its budget as TTFT target, but no tighter target than its key may set."""
    keys = tmp_path / "keys.yaml"
    text = "keys: [{name: a, key: sk-a, least_ttft_ms: 5000}, {name: b, key: sk-b}]"
    await asyncio.to_thread(keys.write_text, text)
    backend = ScriptedBackend()
    capabilities = Capabilities(tasks=(Task.GENERATE, Task.EMBED), embedding_size=1)
    backend.card = replace(backend.card, capabilities=capabilities)
    state = np.ones(1, "<f4").tobytes()
    async with (
        running(backends=[backend], api_keys_file=str(keys)) as gateway,
        client(gateway) as http,
    ):
        targets = {}
        for name in "ab":
            headers = {
                "authorization": f"Bearer sk-{name}",
                **HEADERS,
                "x-flow-deadline-ms": "2000",
            }
            body = {"input": "x"}
            sent = asyncio.create_task(http.post("/v1/embeddings", json=body, headers=headers))
            request = await accepted_request(backend, sent)
            targets[name] = request.service
            delta = Delta(0, (), "", finish_reason=FinishReason.STOP, pooled=state)
            backend.sinks.deliver([(request.request_id, delta)])
            assert (await sent).status_code == 200
        found = samples(gateway.node.metrics)
    assert targets["a"] == ServiceLevel(5.0)
    assert targets["b"].tpot_s is None
    assert targets["b"].ttft_s is not None
    assert targets["b"].ttft_s <= 2.0
    assert found["draftgate_flow_requests_total", (("hop", "1"),)] == 2


async def test_the_longest_id_is_accepted() -> None:
    """An id may have 128 characters."""
    headers = {**HEADERS, "x-flow-id": "x" * 128}
    async with running() as gateway, client(gateway) as http:
        body = BODIES["/v1/completions"]
        response = await http.post("/v1/completions", json=body, headers=headers)
        assert response.json()["metrics"]["flow"]["hop"] == 1


async def test_span_of_a_request_has_its_flow() -> None:
    """The SERVER span has the id, the hop, the remaining time and the budget."""
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(tracing=tracing) as gateway, client(gateway) as http:
        await http.post("/v1/completions", json=BODIES["/v1/completions"], headers=HEADERS)
    tracing.shutdown()
    spans = {span.name: dict(span.attributes or {}) for span in exporter.get_finished_spans()}
    found = spans["POST /v1/completions"]
    assert (found["draftgate.flow.id"], found["draftgate.flow.hop"]) == ("question: 7", 1)
    assert 0.0 < found["draftgate.flow.budget_s"] <= found["draftgate.flow.remaining_s"] <= 60.0


async def test_refused_flow_gets_429_with_the_time_to_return() -> None:
    """The first request of a flow gets status 429, a reason and a Retry-After if a busy pool would
    end the flow too late."""
    body = {"prompt": "x", "max_tokens": 400, "ignore_eos": True}
    headers = {**HEADERS, "x-flow-deadline-ms": "5"}
    async with running() as gateway, client(gateway) as http:
        busy = asyncio.create_task(http.post("/v1/completions", json=body))
        (worker,) = gateway.node.fleet.workers
        await until(lambda: worker.backend.load().running > 0)
        response = await http.post("/v1/completions", json=body, headers=headers)
        busy.cancel()
        assert response.status_code == 429
        assert "flow" in response.json()["error"]["message"]
        assert int(response.headers["retry-after"]) >= 1
        found = samples(gateway.node.metrics)
    assert found["draftgate_flows_total", (("outcome", "refused"),)] == 1
    assert found["draftgate_refused_requests_total", (("kind", "flow"),)] == 1


async def test_tiny_deadline_counts_as_a_millisecond() -> None:
    """The shortest deadline that a header can state causes no error, and its flow begins."""
    headers = {**HEADERS, "x-flow-deadline-ms": "0.000000000000001"}
    async with running() as gateway, client(gateway) as http:
        for hop in (1, 2):
            response = await http.post(
                "/v1/completions", json={"prompt": "x", "max_tokens": 3}, headers=headers
            )
            assert response.status_code == 200, response.text
            assert response.json()["metrics"]["flow"]["hop"] == hop


async def test_upstream_gets_the_headers() -> None:
    """A gateway in front of upstreams checks the headers and passes them on."""
    async with upstream(whole) as engine, forwarding(engine) as gateway, client(gateway) as http:
        await http.post("/v1/completions", json={"prompt": "x"}, headers=HEADERS)
        bad = {**HEADERS, "x-flow-deadline-ms": "soon"}
        response = await http.post("/v1/completions", json={"prompt": "x"}, headers=bad)
        assert response.status_code == 400
        (request,) = engine.requests
        assert {name: request.headers[name] for name in HEADERS} == HEADERS
