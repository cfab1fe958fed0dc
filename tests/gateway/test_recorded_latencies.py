"""Tests of the recorded times to the first token and between tokens."""

from __future__ import annotations

from typing import Any

import pytest
from aiohttp import web
from hypothesis import given
from hypothesis import strategies as st

from draftgate.backends.types import Delta
from draftgate.gateway.app import Listening
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.telemetry.watch import Ending, RequestWatch
from draftgate.gateway.tracing import NO_SPAN
from tests.gateway.harness import client
from tests.gateway.upstreams import (
    DELTA_OF_RESPONSE,
    DONE,
    ENDED_RESPONSE,
    LAST,
    TOKEN,
    USAGE,
    Clock,
    Handler,
    forwarding,
    refusal,
    stream_of,
    upstream,
    whole,
)

ERROR = b'{"error": {"message": "no", "type": "invalid_request_error"}}'
ERROR_EVENT = b'data: {"error": {"message": "no", "code": 500}}\n\n'


async def large(request: web.Request) -> web.StreamResponse:
    """Respond with a body that the gateway does not collect, in two parts."""
    response = web.StreamResponse(headers={"Content-Type": "application/json"})
    await response.prepare(request)
    await response.write(b'{"choices": [{"text": "')
    await response.write(b"a" * (2 << 20) + b'"}], "usage": {"completion_tokens": 9}}')
    return response


MESSAGES = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": MESSAGES,
    "/v1/completions": {"prompt": "x"},
    "/v1/responses": {"input": "x"},
    "/v1/messages": MESSAGES,
    "/v1/embeddings": {"input": "x"},
    "/v1/rerank": {"query": "x", "documents": ["y"]},
}


def recorded(gateway: Listening, definition: metric.MetricDefinition) -> int:
    """Return the number of recorded values of a histogram."""
    gateway.node.metrics.fold()
    histograms = gateway.node.metrics._histograms[definition].values()
    return sum(sum(one.counts) for one in histograms)


def counts(gateway: Listening) -> tuple[int, int]:
    """Return the number of recorded times to the first token, and between tokens."""
    return recorded(gateway, metric.TTFT), recorded(gateway, metric.TPOT)


@pytest.mark.parametrize(
    "handler",
    [whole, large, *(refusal(status, ERROR) for status in (400, 404, 429, 500, 503))],
    ids=["whole", "large", "400", "404", "429", "500", "503"],
)
async def test_only_streams_of_an_upstream_have_latencies(handler: Handler) -> None:
    """Neither errors of an upstream nor its whole responses have a TTFT or a TPOT."""
    headers = {"x-slo-ttft-ms": "60000", "x-slo-tpot-ms": "60000"}
    async with upstream(handler) as engine, forwarding(engine) as gateway, client(gateway) as http:
        for path, body in REQUESTS.items():
            for stream in (False, True):
                await http.post(path, json={**body, "stream": stream}, headers=headers)
        assert recorded(gateway, metric.TTFT) == recorded(gateway, metric.TPOT) == 0
        assert recorded(gateway, metric.TENANT_TTFT) == 0
        recent = gateway.node.metrics.recent
        assert recent.ttft_s() == recent.tpot_s() == []


@pytest.mark.parametrize(
    ("blocks", "ttfts"),
    [
        ((ERROR_EVENT,), 0),
        ((TOKEN + LAST + USAGE + DONE,), 1),
        ((DELTA_OF_RESPONSE + ENDED_RESPONSE,), 1),
    ],
)
async def test_a_stream_in_one_block_has_no_tpot(blocks: tuple[bytes, ...], ttfts: int) -> None:
    """A stream that arrives at once has a TTFT if it has output, but no TPOT."""
    async with (
        upstream(stream_of(*blocks)) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        assert counts(gateway) == (ttfts, 0)


async def test_a_whole_response_teaches_admission_nothing() -> None:
    """The admission policy learns the TTFT of streams only, and the time of embeddings."""
    learned: list[float] = []

    async def answer(request: web.Request) -> web.StreamResponse:
        if (await request.json()).get("stream"):
            return await stream_of(TOKEN, LAST, DONE)(request)
        return await whole(request)

    async with upstream(answer) as engine, forwarding(engine) as gateway, client(gateway) as http:
        policy = gateway.node.models[0].forwarder.admission._policy
        policy.learn = lambda _, ttft_s: learned.append(ttft_s)  # type: ignore[method-assign]
        await http.post("/v1/completions", json={"prompt": "x"})
        assert not learned
        await http.post("/v1/completions", json={"prompt": "x", "stream": True})
        await http.post("/v1/embeddings", json={"input": "x"})
        assert len(learned) == 2


@pytest.mark.parametrize("stream", [False, True])
async def test_own_workers_report_the_first_token(sim: Listening, *, stream: bool) -> None:
    """A response of an own worker has its TTFT and TPOT, even if it is not streamed."""
    ttfts, tpots = counts(sim)
    body = {"prompt": "def f(", "max_tokens": 8, "ignore_eos": True, "stream": stream}
    async with client(sim) as http:
        assert (await http.post("/v1/completions", json=body)).status_code == 200
        assert counts(sim) == (ttfts + 1, tpots + 1)
        error = await http.post("/v1/completions", json={**body, "temperature": -1})
        assert error.status_code == 400
        assert counts(sim) == (ttfts + 1, tpots + 1)


@given(
    deltas=st.lists(
        st.tuples(st.integers(0, 2), st.integers(0, 5), st.sampled_from([0.0, 0.0, 0.02]))
    ),
    ending=st.sampled_from(Ending),
)
def test_tpot_is_never_zero(deltas: list[tuple[int, int, float]], ending: Ending) -> None:
    """Whatever tokens arrive at whatever times, a recorded TPOT is a positive time."""
    clock, metrics = Clock(), Metrics(dict, lambda: "m")
    watch = RequestWatch(RequestSeries(metrics), NO_SPAN, "/v1/completions", "chat", clock)
    watch._generates, watch._choices = True, 3
    for choice, tokens, pause_s in deltas:
        clock.now_s += pause_s
        watch.observe(Delta(choice, list(range(tokens)), "x" * tokens))
    watch.end(ending, 200)
    recorded = metrics.recent.tpot_s()
    assert all(tpot_s > 0 for tpot_s in recorded)
    assert len(recorded) <= len(metrics.recent.ttft_s()) <= 1
