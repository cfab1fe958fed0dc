"""Tests of flows, which send several requests one after another and count as one request."""

from __future__ import annotations

import asyncio
from contextlib import closing
from dataclasses import replace

import pytest

from draftgate.loadgen.events import EventWriter, read_events
from draftgate.loadgen.measuring.hops import summarize_hops
from draftgate.loadgen.measuring.metrics import latency_s, ttft_s
from draftgate.loadgen.measuring.slo import attainment, meets_slo, met_latency
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.sending.client import OpenAIClient, open_session
from draftgate.loadgen.sending.driver import run_plan
from draftgate.loadgen.sending.health import lag_s
from draftgate.loadgen.types import SINGLE, PlannedRequest, Slo
from tests.loadgen.known_records import a_run, record
from tests.loadgen.mock_server import Mock, Script, question, serving, text_of


class Echo:
    """A flow of scripts in which each request continues the previous text."""

    def __init__(self, *scripts: Script) -> None:
        self.scripts = scripts

    def next(self, request, answered, elapsed_s):
        place = len(answered)
        if place == len(self.scripts):
            return None
        prompt = answered[-1].texts[0] if answered and answered[-1].texts else request.prompt
        slo = Slo(ttft_s=60.0 + place)
        facts = (("even", place % 2 == 0),)
        return question(
            self.scripts[place],
            request.seed,
            prompt=prompt,
            slo=slo,
            hop=f"hop{place}",
            facts=facts,
        )


async def run_flows(mock: Mock, *flows: Echo, slo: Slo = Slo(latency_s=60.0), **more):  # noqa: B008
    plan = [
        PlannedRequest(i, None, question(seed=i, prompt="asked", slo=slo), flow)
        for i, flow in enumerate(flows)
    ]
    async with serving(mock) as url, open_session() as session:
        return await run_plan(OpenAIClient(session, url, "mock"), plan, concurrency=1, **more)


async def test_each_request_is_built_from_the_previous_response() -> None:
    """The driver sends the requests of a flow in order.

    The flow has a single record with the last response and the user's SLO.
    """
    mock, starts, over = Mock(), [], []
    run = await run_flows(
        mock, Echo(Script(), Script(), Script()), on_start=starts.append, on_record=over.append
    )
    text = "".join(text_of(0, 8))
    assert [body["prompt"] for body in mock.bodies] == ["asked", text, text]
    (one,) = run.records
    assert all(r.planned.flow is SINGLE for r in (one, *one.hops))
    assert over == [one]
    assert len(starts) == 1
    assert (one.verdict, one.texts) == ("ok", (text,))
    assert one.planned.request.slo == Slo(latency_s=60.0)
    assert [hop.planned.request.hop for hop in one.hops] == ["hop0", "hop1", "hop2"]
    assert [h["x-slo-ttft-ms"] for h in mock.headers] == ["60000", "61000", "62000"]


async def test_a_flow_counts_from_its_scheduled_time() -> None:
    """Each hop counts from the end of the previous hop, and the flow from its scheduled time."""
    run = await run_flows(Mock(), Echo(Script(gap_s=0.01), Script(gap_s=0.01)))
    (one,) = run.records
    first, last = one.hops
    assert one.scheduled_s == first.scheduled_s
    assert last.scheduled_s == first.end_s
    assert latency_s(one) == pytest.approx(latency_s(first) + latency_s(last))
    assert ttft_s(one) == pytest.approx(latency_s(first) + ttft_s(last))
    assert run.health.max_lag_s == max(map(lag_s, one.hops))


async def test_one_failed_hop_fails_the_flow() -> None:
    """The flow continues after a failed hop, but its record fails and names the hop."""
    run = await run_flows(Mock(), Echo(Script(fault="status"), Script()), Echo(Script()))
    failed, fine = run.records
    assert failed.verdict == "http_status"
    assert failed.detail.startswith("hop0: 429")
    assert failed.hops[1].verdict == "ok"
    assert fine.verdict == "ok"
    counted = attainment(run.records)
    assert (counted.requests, counted.intact, counted.met) == (2, 1, 1)


async def test_an_interrupted_flow_keeps_its_records() -> None:
    """A flow that stops in its second request is interrupted, and its first hop stays intact."""
    mock = Mock()
    running = asyncio.create_task(run_flows(mock, Echo(Script(), Script(fault="stall"))))
    async with asyncio.timeout(60):
        while len(mock.bodies) < 2:  # noqa: ASYNC110 (the mock's own count)
            await asyncio.sleep(0)
    running.cancel()
    run = await running
    (one,) = run.records
    assert [hop.verdict for hop in one.hops] == ["ok", "interrupted"]
    assert one.verdict == "interrupted"


async def test_a_single_request_has_no_hops() -> None:
    """The record of a single request has no hops."""
    async with serving(Mock()) as url, open_session() as session:
        plan = [PlannedRequest(0, None, question())]
        run = await run_plan(OpenAIClient(session, url, "mock"), plan, concurrency=1)
    (one,) = run.records
    assert one.hops == ()
    assert one.http_records == (one,)
    assert summarize_hops(run.records) == []


async def test_events_restore_every_hop(tmp_path) -> None:
    """A restored run of flows has the same summary, with hops and facts."""
    run = await run_flows(Mock(), Echo(Script(), Script(tokens=4)))
    path = tmp_path / "events.jsonl"
    with closing(EventWriter(path, run.settings)) as events:
        for one in run.records:
            events.record(one)
        events.end(run)
    again, _ = read_events(path)
    assert summarize(again) == summarize(run)
    assert summarize(again)["details"]["hops"]["hop0"]["facts"] == {"even": [1, 1]}


def flow_record(*kinds, deadline_s: float | None = None):
    """Return the record of a flow with these hops."""
    requests = tuple(
        replace(one, planned=replace(one.planned, request=replace(one.planned.request, **fields)))
        for one, fields in kinds
    )
    slo = Slo(latency_s=deadline_s)
    request = replace(requests[-1].planned.request, slo=slo, hop="")
    last = replace(requests[-1], scheduled_s=requests[0].scheduled_s, hops=requests)
    return replace(last, planned=replace(last.planned, request=request))


def test_hops_have_metrics_and_shares_of_the_deadline() -> None:
    """Hops have TTFT, latency, facts and announced limits.

    Their share is of the deadline, or of the latency without a deadline.
    """
    # Each hop takes 0.5 s to the first text and 20 ms to the end, from 1.0 s and 1.52 s.
    tight = {"slo": Slo(ttft_s=0.4)}
    first = record(at_s=1.0, gaps_s=()), {"hop": "plan", "facts": (("parsed", True),)}
    second = record(at_s=1.52, gaps_s=()), {"hop": "answer", **tight}
    plan, answer = summarize_hops([flow_record(first, second, deadline_s=5.2)])
    assert plan.latency_s.mean == pytest.approx(0.52)
    assert plan.ttft_s.mean == pytest.approx(0.5)
    assert plan.share.mean == pytest.approx(0.1)
    assert plan.facts == {"parsed": (1, 1)}
    assert (plan.announced_met, answer.announced_met) == (None, 0)
    assert (answer.requests, answer.intact, answer.errors) == (1, 1, {})
    own, _ = summarize_hops([flow_record(first, second)])
    assert own.share.mean == pytest.approx(0.5)
    assert own.name == "plan"


def test_a_deadline_is_a_limit_like_the_others() -> None:
    """A response that ends after its deadline does not meet its SLO."""
    # The stream ends 0.92 s after the scheduled time.
    late, fine = (record(slo=Slo(ttft_s=1.0, latency_s=s)) for s in (0.91, 0.93))
    assert not met_latency(late)
    assert not meets_slo(late)
    assert meets_slo(fine)
    run = a_run([late, fine])
    (counts,) = summarize(run)["details"]["classes"].values()
    assert (counts["met_latency"], counts["met_ttft"], counts["attainment"]) == (1, 2, 0.5)
