"""Tests of the names of upstreams, which operators choose."""

from __future__ import annotations

import logging

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.telemetry.otel import OtelTracing
from tests.gateway.harness import client, running
from tests.gateway.upstreams import DONE, LAST, TOKEN, stream_of, upstream

NAME = "gpu-7"


async def test_name_is_wherever_an_operator_looks(caplog: pytest.LogCaptureFixture) -> None:
    """The response, the list of workers, the decisions, the log, the spans and the metrics name the
    upstream of a request."""
    caplog.set_level(logging.INFO, "draftgate")
    exporter = InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    answers = stream_of(TOKEN, LAST, DONE)
    async with upstream(answers) as engine, upstream(answers) as other:
        settings = tuple(
            UpstreamSettings(url=one.url, name=name)
            for one, name in ((engine, NAME), (other, "gpu-8"))
        )
        node = running(backend="openai", upstream=settings, tracing=tracing)
        async with node as gateway, client(gateway) as http:
            gateway.node.fleet.workers[1].drained = True
            sent = await http.post("/v1/completions", json={"prompt": "x", "stream": True})
            workers = (await http.get("/workers")).json()["workers"]
            metrics = (await http.get("/metrics")).text
    assert sent.headers["x-draftgate-upstream"] == NAME
    assert [one["worker_id"] for one in workers] == [NAME, "gpu-8"]
    assert f'draftgate_running_sequences{{model_name="theirs",worker="{NAME}"}}' in metrics
    spans = {span.name: span for span in exporter.get_finished_spans()}
    for name in ("dispatch", "POST /v1/completions"):
        assert (spans[name].attributes or {})["draftgate.worker_id"] == NAME
    (line,) = [one for one in caplog.records if one.getMessage() == "request"]
    assert NAME in str(vars(line))
