"""Tests of revised plans in the last chunk of a response and in its trace."""

from __future__ import annotations

import asyncio
from itertools import count

import pytest
from opentelemetry.sdk.trace.export import SimpleSpanProcessor
from opentelemetry.sdk.trace.export.in_memory_span_exporter import InMemorySpanExporter

from draftgate.backends.types import Delta, FinishReason, Phases, SpeculationOutcome
from draftgate.gateway.telemetry.otel import OtelTracing
from draftgate.policies.speculation.plan_reason import LOSS_REASON
from draftgate.policies.speculation.revision import (
    REPAID_REASON,
    PlanRevision,
    RevisionCause,
    SlotWorth,
)
from draftgate.policies.speculation.savings import DraftSavings
from tests.gateway.harness import ScriptedBackend, client, events, running

REVISIONS = (
    PlanRevision(False, RevisionCause.PRICE, 33, SlotWorth(1.2, 1.0, 0.97), 12.5),
    PlanRevision(True, RevisionCause.DEADLINE, 90, SlotWorth(1.2, 4.0, 0.97), 13.5),
)
OUTCOME = SpeculationOutcome(3, 6, 4, (1, 0, 2), REVISIONS)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_revisions_are_in_the_metrics_and_on_the_decode_span(stream: bool) -> None:
    """The metrics list each revision, and the span `decode` has one event for each."""
    backend, exporter = ScriptedBackend(), InMemorySpanExporter()
    tracing = OtelTracing(SimpleSpanProcessor(exporter))
    async with running(backends=[backend], tracing=tracing) as gateway, client(gateway) as http:
        body = {"prompt": "x", "stream": stream}
        pending = asyncio.ensure_future(http.post("/v1/completions", json=body))
        request = await backend.submitted.get()
        phases = Phases(10.0, 11.0, ((12.0, 1),), 12.0)
        first = Delta(0, (1,), "a", phases=phases)
        last = Delta(0, (2,), "b", (), FinishReason.STOP, OUTCOME)
        for delta in (first, last):
            backend.sinks.deliver([(request.request_id, delta)])
        response = await pending
    tracing.shutdown()
    reply = events(response.text)[-2] if stream else response.json()
    listed = reply["metrics"]["speculative_decoding"]["revisions"]
    assert [(one["drafting"], one["cause"], one["output_tokens"]) for one in listed] == [
        ("off", "price", 33),
        ("on", "deadline", 90),
    ]
    assert [one["reason"] for one in listed] == [one.reason for one in REVISIONS]
    (decode,) = [span for span in exporter.get_finished_spans() if span.name == "decode"]
    assert [event.name for event in decode.events] == ["revision", "revision"]
    found = [dict(event.attributes) for event in decode.events]
    assert [one["draftgate.drafting"] for one in found] == ["off", "on"]
    assert [one["draftgate.reason"] for one in found] == [one.reason for one in REVISIONS]
    assert decode.events[1].timestamp - decode.events[0].timestamp == pytest.approx(1e9, rel=1e-3)


@pytest.mark.parametrize("stream", [True, False], ids=["stream", "whole"])
async def test_running_response_reports_that_drafts_lose_time(
    stream: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A request lists that its worker stopped drafts, and resumed them."""
    checks = count()
    stops = property(lambda _savings: 40 <= next(checks) < 100)
    monkeypatch.setattr(DraftSavings, "stops_drafts", stops)
    body = {"prompt": "x", "max_tokens": 200, "ignore_eos": True, "stream": stream}
    async with running(sim_acceptance=0.5) as gateway, client(gateway) as http:
        response = await http.post("/v1/completions", json=body)
    reply = events(response.text)[-2] if stream else response.json()
    listed = reply["metrics"]["speculative_decoding"]["revisions"]
    assert [(one["drafting"], one["cause"]) for one in listed] == [
        ("off", "drafts_lose"),
        ("on", "drafts_lose"),
    ]
    assert [LOSS_REASON in one["reason"] for one in listed] == [True, False]
    assert REPAID_REASON in listed[1]["reason"]


async def test_unrevised_response_lists_no_revisions() -> None:
    """A response without revisions has no field `revisions`."""
    async with running(backends=[backend := ScriptedBackend()]) as gateway, client(gateway) as http:
        pending = asyncio.ensure_future(http.post("/v1/completions", json={"prompt": "x"}))
        backend.emit(await backend.submitted.get(), "x", last=True)
        metrics = (await pending).json()["metrics"]
    assert "revisions" not in metrics["speculative_decoding"]
