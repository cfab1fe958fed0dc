"""Tests of the choice between upstreams that draft and upstreams that do not."""

from __future__ import annotations

import json
from typing import Any

import pytest
from aiohttp import web

from draftgate.backends.worker_config import UpstreamSettings, WorkerConfig
from draftgate.gateway.app import Listening, StartError, build_node
from draftgate.gateway.config import ServeConfig
from draftgate.policies.types import RequestView, SpeculationPlan, WorkerLoad
from tests.gateway.harness import client, post_raw, running, until
from tests.gateway.metric_pages import llama_cpp, sglang, vllm
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    Clock,
    Handler,
    ScriptedUpstream,
    forwarding,
    held,
    manual_upstream,
    refusal,
    stream_of,
    upstream,
    whole,
)
from tests.upstream_settings import at

MANY_ACCEPTED = (1000, 4000, 2800)
"""Draft counters with enough accepted tokens to save time below full load."""

FEW_ACCEPTED = (1000, 4000, 100)


async def send(gateway: Listening, **body: Any) -> tuple[int, str | None, str | None]:
    """Send a request and return the status, the pool and the reason."""
    async with client(gateway) as http:
        response = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, **body})
    headers = response.headers
    return (
        response.status_code,
        headers.get("x-speculation-pool"),
        headers.get("x-speculation-reason"),
    )


def json_of(body: bytes) -> Handler:
    """Return a handler that responds with JSON."""

    async def handler(request: web.Request) -> web.StreamResponse:
        return web.Response(body=body, content_type="application/json")

    return handler


async def poll_all(gateway: Listening) -> None:
    for worker in gateway.node.fleet.workers:
        await worker.backend.poll()


@pytest.mark.parametrize(
    "page", [vllm(drafts=MANY_ACCEPTED), llama_cpp(drafts=MANY_ACCEPTED)], ids=["vllm", "llama"]
)
async def test_speculation_mode_chooses_the_pool(page: str) -> None:
    """The gateway sends mode `off` to the plain pool and `auto` to the drafting pool if drafts save
    time."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = page, vllm()
        async with forwarding(fast, plain) as gateway:
            for _ in range(3):
                status, pool, reason = await send(gateway, speculation={"mode": "off"})
                assert (status, pool) == (200, "plain")
                assert reason == "the request asked for no speculation"
            assert (len(fast.requests), len(plain.requests)) == (0, 3)
            status, pool, reason = await send(gateway)
            assert (status, pool) == (200, "speculating")
            assert "drafts pay" in reason
            assert len(fast.requests) == 1


async def test_busy_drafting_pool_is_avoided() -> None:
    """The gateway avoids the drafting pool while its load makes drafts too expensive."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        plain.metrics = vllm()
        fast.metrics = vllm(2, drafts=(1000, 4000, 900))
        async with forwarding(fast, plain) as gateway:
            assert (await send(gateway))[1] == "speculating"
            fast.metrics = vllm(600, drafts=(1100, 4400, 990))
            await poll_all(gateway)
            status, pool, reason = await send(gateway)
            assert (status, pool) == (200, "plain")
            assert "drafts do not pay: " in reason
            assert "600 running" in reason
            fast.metrics = vllm(1, drafts=(1200, 4800, 1080))
            await poll_all(gateway)
            assert (await send(gateway))[1] == "speculating"


async def test_pool_decisions_are_recorded_and_counted() -> None:
    """The decision record contains the policy's inputs, the plan and the chosen upstream."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = sglang(3, accept_length=3.0, draft_tokens=5), sglang()
        async with forwarding(fast, plain) as gateway, client(gateway) as http:
            await send(gateway, temperature=0, speculation={"mode": "off", "max_draft_tokens": 2})
            await send(gateway, temperature=0.5)
            auto, off = (await http.get("/decisions")).json()["decisions"]
            page = (await http.get("/metrics")).text
        workers = [worker.worker_id for worker in gateway.node.fleet.workers]
    assert [auto["worker_id"], off["worker_id"]] == workers
    assert off["request"]["mode"] == "off"
    assert (off["request"]["max_draft_tokens"], off["request"]["temperature"]) == (2, 0.0)
    assert (off["plan"]["proposer"], auto["plan"]["proposer"]) == (None, "upstream")
    assert auto["load"]["others"] == 3
    assert (auto["load"]["draft_tokens"], auto["load"]["age_s"]) == (4.0, 0.0)
    assert auto["plan"]["price"] == auto["load"]["price"] > 0
    metric_name = "draftgate_decisions_total"
    assert f'{metric_name}{{model_name="theirs",policy="auto",proposer="none"}} 1.0' in page
    assert f'{metric_name}{{model_name="theirs",policy="auto",proposer="upstream"}} 1.0' in page


REPORT = {
    "num_spec_steps": 5,
    "num_spec_tokens": 4,
    "num_draft_tokens": 20,
    "num_accepted_draft_tokens": 9,
    "mean_acceptance_length": 2.8,
    "draft_acceptance_rate": 0.45,
    "acceptance_histogram": [2, 1, 0, 0, 2],
}
"""The drafts of a request as vLLM reports them."""


@pytest.mark.parametrize("stream", [False, True], ids=["whole", "streamed"])
async def test_reported_drafts_are_recorded(stream: bool) -> None:
    """The drafts that an upstream reports about a request are in the decision with its id, in the
    metrics, and in the history that the next decision reads."""
    report = (
        b'"metrics": {"queue_time_ms": 1, "speculative_decoding": %s}' % json.dumps(REPORT).encode()
    )
    if stream:
        drafting = stream_of(TOKEN, LAST, b'data: {"id":"c","choices":[],%s}\n\n' % report, DONE)
    else:
        drafting = json_of(b'{"id": "c", "choices": [], %s}' % report)
    async with upstream(drafting) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = vllm(drafts=MANY_ACCEPTED), vllm()
        async with forwarding(fast, plain) as gateway, client(gateway) as http:
            body = {"prompt": "x", "max_tokens": 9, "temperature": 0, "stream": stream}
            replies = [await http.post("/v1/completions", json=body) for _ in range(2)]
            second, first = (await http.get("/decisions")).json()["decisions"]
            page = (await http.get("/metrics")).text
    ids = [reply.headers["x-request-id"] for reply in replies]
    assert [first["request_id"], second["request_id"]] == ids
    assert first["outcome"] == second["outcome"]
    assert first["outcome"]["choices"] == 1
    assert first["outcome"]["spec_steps"] == 5
    assert (first["outcome"]["drafted_tokens"], first["outcome"]["accepted_tokens"]) == (20, 9)
    assert first["request"]["tenant_drafts"]["agreed"] == 0
    assert second["request"]["tenant_drafts"]["agreed"] == 9
    for name, value in (("drafted", 40), ("accepted", 18)):
        assert f'draftgate_{name}_tokens_total{{model_name="theirs"}} {value}.0' in page


async def test_any_reason_fits_into_a_header() -> None:
    """The gateway replaces the characters of a reason that a header cannot contain."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = vllm(drafts=MANY_ACCEPTED), vllm()
        async with forwarding(fast, plain) as gateway:
            gateway.node.models[0].forwarder.pools._policy = _UnprintableReason()
            status, pool, reason = await send(gateway)
    assert (status, pool, reason) == (200, "speculating", "two lines, 5 ?s")


class _UnprintableReason:
    """A policy whose reason contains characters that no header can contain."""

    name = "wordy"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        return SpeculationPlan(self.name, request.mode, "upstream", 3, "two\r\nlines, 5 µs")


async def test_no_decision_with_one_kind_of_upstream() -> None:
    """The gateway chooses no pool if all upstreams draft or none does, and records so."""
    for page in (vllm(), vllm(drafts=MANY_ACCEPTED)):
        async with upstream(whole) as a, upstream(whole) as b:
            a.metrics = b.metrics = page
            async with forwarding(a, b) as gateway, client(gateway) as http:
                for mode in ("off", "auto"):
                    assert await send(gateway, speculation={"mode": mode}) == (200, None, None)
                assert (len(a.requests), len(b.requests)) == (1, 1)
                decisions = (await http.get("/decisions")).json()["decisions"]
                assert [one["plan"]["policy"] for one in decisions] == ["upstream"] * 2


async def test_other_pool_serves_during_an_outage() -> None:
    """The drafting pool serves requests without drafts while the plain pool is out."""
    async with upstream(whole) as fast, upstream(refusal(503)) as plain:
        fast.metrics, plain.metrics = vllm(drafts=MANY_ACCEPTED), vllm()
        async with forwarding(fast, plain) as gateway:
            status, pool, _ = await send(gateway, speculation={"mode": "off"})
            assert (status, pool) == (200, "speculating")
            assert (len(fast.requests), len(plain.requests)) == (1, 1)
            assert await send(gateway, speculation={"mode": "off"}) == (200, None, None), (
                "the plain upstream is paused"
            )
            assert len(plain.requests) == 1


async def test_request_does_not_wait_for_a_full_pool() -> None:
    """The gateway uses the first replica with capacity when the preferred pool is full."""
    async with upstream(held()) as plain, upstream(held()) as fast:
        fast.metrics, plain.metrics = vllm(drafts=FEW_ACCEPTED), vllm()
        async with forwarding(plain, fast, max_sequences=1) as gateway, client(gateway) as http:
            off = {"prompt": "x", "speculation": {"mode": "off"}}
            _, first = await post_raw(gateway, "/v1/completions", off)
            await plain.arrived.get()
            _, second = await post_raw(gateway, "/v1/completions", off)
            await fast.arrived.get()
            _, third = await post_raw(gateway, "/v1/completions", off)
            await until(lambda: len(gateway.node.dispatcher.queue) == 1)
            second.close()
            await fast.arrived.get()
            decisions = (await http.get("/decisions")).json()["decisions"]
            for writer in (first, third):
                writer.close()
            await until(lambda: gateway.node.in_flight == 0)
    reasons = [decision["plan"]["reason"] for decision in decisions]
    assert reasons[2] == "the request asked for no speculation"
    assert reasons[1].endswith("but only speculating replicas have capacity")
    assert reasons[0].endswith("the first replica with capacity takes it")


async def test_request_for_a_full_pool_does_not_block_others() -> None:
    """A request that waits for a full pool does not block later requests."""
    async with upstream(held()) as plain, upstream(held()) as fast:
        fast.metrics, plain.metrics = vllm(drafts=MANY_ACCEPTED), vllm()
        async with forwarding(plain, fast, max_sequences=1) as gateway:
            off = {"prompt": "x", "speculation": {"mode": "off"}}
            writers = []
            for server in (plain, fast):  # fills both upstreams
                writers.append((await post_raw(gateway, "/v1/completions", off))[1])
                await server.arrived.get()
            for waiting in (1, 2):
                writers.append((await post_raw(gateway, "/v1/completions", off))[1])
                await until(lambda count=waiting: len(gateway.node.dispatcher.queue) == count)
            writers.pop(1).close()
            await fast.arrived.get()  # the first waiting request, which preferred the other pool
            writers.pop(0).close()
            await plain.arrived.get()
            for writer in writers:
                writer.close()
            await until(lambda: gateway.node.in_flight == 0)


async def test_pool_headers_of_streams_and_embeddings() -> None:
    """A stream has the pool headers, but an embedding has none."""
    async with upstream(stream_of(TOKEN, LAST, DONE)) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = vllm(drafts=MANY_ACCEPTED), vllm()
        async with forwarding(fast, plain) as gateway, client(gateway) as http:
            assert await send(gateway, stream=True)
            assert len(fast.requests) == 1
            response = await http.post("/v1/embeddings", json={"input": "x"})
            assert "x-speculation-pool" not in response.headers


async def test_declared_pools_need_no_metrics() -> None:
    """The setting `--upstream-speculates` overrides the upstreams' own metrics."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        plain.metrics = vllm(drafts=MANY_ACCEPTED)
        configs = [
            WorkerConfig(upstream=UpstreamSettings(url=fast.url, speculates=True)),
            WorkerConfig(upstream=UpstreamSettings(url=plain.url, speculates=False)),
        ]
        async with running(
            backends=[manual_upstream(config, Clock()) for config in configs]
        ) as gateway:
            assert (await send(gateway))[1] == "speculating"
            assert (await send(gateway, speculation={"mode": "off"}))[1] == "plain"
            assert (len(fast.requests), len(plain.requests)) == (1, 1)


def test_upstream_speculates_must_name_upstreams() -> None:
    """The setting `--upstream-speculates` accepts only URLs of configured upstreams."""
    both = at("http://a", "http://b")
    declared = ServeConfig(backend="openai", upstream=both, upstream_speculates=("http://b",))
    assert [one.speculates for one in declared.upstreams()] == [False, True]
    undeclared = ServeConfig(backend="openai", upstream=both)
    assert [one.speculates for one in undeclared.upstreams()] == [None, None]
    wrong = ServeConfig(backend="openai", upstream=both, upstream_speculates=("http://c",))
    with pytest.raises(StartError, match="http://c is not one of the --upstream URLs"):
        build_node(wrong)


async def count_calls(gateway: Listening, upstreams: tuple[ScriptedUpstream, ...]) -> int:
    """Return the number of calls that the upstreams receive for ten requests."""
    before = sum(len(server.requests) for server in upstreams)
    for _ in range(10):
        await send(gateway)
    return sum(len(server.requests) for server in upstreams) - before


async def test_retries_do_not_multiply_an_outage() -> None:
    """Retries stay within the budget when all upstreams fail, and the metrics count them."""
    async with (
        upstream(refusal(502)) as a,
        upstream(refusal(502)) as b,
        upstream(refusal(502)) as c,
    ):
        settings = {"upstream_retry_share": 0.2, "upstream_retries_per_s": 0.0}
        async with forwarding(a, b, c, **settings) as gateway, client(gateway) as http:
            assert await count_calls(gateway, (a, b, c)) == 12
            page = (await http.get("/metrics")).text
        async with forwarding(
            a, b, c, upstream_retry_share=0.0, upstream_retries_per_s=0.0
        ) as gateway:
            assert await count_calls(gateway, (a, b, c)) == 10
        async with forwarding(a, b, c) as gateway:  # an idle gateway has a full retry budget
            assert await count_calls(gateway, (a, b, c)) == 30
    metric_name = 'draftgate_upstream_retries_total{cause="refused",model_name="theirs",outcome='
    assert f'{metric_name}"allowed"}} 2.0' in page
    assert f'{metric_name}"denied"}} 10.0' in page


async def test_denied_retry_is_one_typed_error() -> None:
    """The client gets the upstream's error when the budget denies a retry."""
    async with (
        upstream(refusal(503, b'{"error": "full"}', Retry_After="7")) as a,
        upstream(whole) as b,
    ):
        none = {"upstream_retry_share": 0.0, "upstream_retries_per_s": 0.0}
        async with forwarding(a, b, **none) as gateway, client(gateway) as http:
            response = await http.post("/v1/completions", json={"prompt": "x"})
            assert response.status_code == 503
            assert response.json()["error"]["code"] == "upstream_unavailable"
            assert "full" in response.json()["error"]["message"]
            assert (len(a.requests), len(b.requests)) == (1, 0)
