"""Upstreams that draft, upstreams that do not, and the choice between them."""

from __future__ import annotations

from typing import Any

import pytest

from draftgate.backends.worker_config import WorkerConfig
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
    ScriptedUpstream,
    held,
    in_front,
    refusal,
    stream_of,
    unasked,
    upstream,
    whole,
)

WELL = (1000, 4000, 2800)
"""Drafts that pay at any load except a full one."""

BADLY = (1000, 4000, 100)


async def ask(where: Listening, **body: Any) -> tuple[int, str | None, str | None]:
    """Return status, pool and reason of a request."""
    async with client(where) as http:
        answer = await http.post("/v1/completions", json={"prompt": "x", "max_tokens": 9, **body})
    headers = answer.headers
    return (
        answer.status_code,
        headers.get("x-speculation-pool"),
        headers.get("x-speculation-reason"),
    )


async def polled(where: Listening) -> None:
    for worker in where.node.fleet.workers:
        await worker.backend.poll()


@pytest.mark.parametrize("page", [vllm(drafts=WELL), llama_cpp(drafts=WELL)], ids=["vllm", "llama"])
async def test_speculation_mode_chooses_the_pool(page: str) -> None:
    """`off` uses a plain replica, `auto` a drafting one while drafts pay; both have reasons."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = page, vllm()
        async with in_front(fast, plain) as where:
            for _ in range(3):
                status, pool, reason = await ask(where, speculation={"mode": "off"})
                assert (status, pool) == (200, "plain")
                assert reason == "the request asked for no speculation"
            assert (len(fast.requests), len(plain.requests)) == (0, 3)
            status, pool, reason = await ask(where)
            assert (status, pool) == (200, "speculating")
            assert "drafts pay" in reason
            assert len(fast.requests) == 1


async def test_busy_drafting_pool_is_avoided() -> None:
    """Drafts that pay on an idle replica may not pay on a busy one."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        plain.metrics = vllm()
        fast.metrics = vllm(2, drafts=(1000, 4000, 900))
        async with in_front(fast, plain) as where:
            assert (await ask(where))[1] == "speculating"
            fast.metrics = vllm(600, drafts=(1100, 4400, 990))
            await polled(where)
            status, pool, reason = await ask(where)
            assert (status, pool) == (200, "plain")
            assert "drafts do not pay: " in reason
            assert "600 running" in reason
            fast.metrics = vllm(1, drafts=(1200, 4800, 1080))
            await polled(where)
            assert (await ask(where))[1] == "speculating"


async def test_pool_decisions_are_recorded_and_counted() -> None:
    """The record has the policy's input and answer, and the chosen upstream."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = sglang(3, accept_length=3.0, draft_tokens=5), sglang()
        async with in_front(fast, plain) as where, client(where) as http:
            await ask(where, temperature=0, speculation={"mode": "off", "max_draft_tokens": 2})
            await ask(where, temperature=0.5)
            auto, off = (await http.get("/decisions")).json()["decisions"]
            page = (await http.get("/metrics")).text
        workers = [worker.worker_id for worker in where.node.fleet.workers]
    assert [auto["worker_id"], off["worker_id"]] == workers
    assert off["request"]["mode"] == "off"
    assert (off["request"]["max_draft_tokens"], off["request"]["temperature"]) == (2, 0.0)
    assert (off["plan"]["proposer"], auto["plan"]["proposer"]) == (None, "upstream")
    assert auto["load"]["others"] == 3
    assert (auto["load"]["draft_tokens"], auto["load"]["age_s"]) == (4.0, 0.0)
    assert auto["plan"]["price"] == auto["load"]["price"] > 0
    figure = "draftgate_decisions_total"
    assert f'{figure}{{model_name="theirs",policy="auto",proposer="none"}} 1.0' in page
    assert f'{figure}{{model_name="theirs",policy="auto",proposer="upstream"}} 1.0' in page


async def test_any_reason_fits_into_a_header() -> None:
    """A third-party policy may use line breaks and letters that headers cannot contain."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = vllm(drafts=WELL), vllm()
        async with in_front(fast, plain) as where:
            where.node.forwarder._pools._policy = _Wordy()
            status, pool, reason = await ask(where)
    assert (status, pool, reason) == (200, "speculating", "two lines, 5 ?s")


class _Wordy:
    """Gives a reason that no header can contain."""

    name = "wordy"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        return SpeculationPlan(self.name, request.mode, "upstream", 3, "two\r\nlines, 5 µs")


async def test_no_decision_with_one_kind_of_upstream() -> None:
    """If all or none draft, nothing is decided, recorded or added to answers."""
    for page in (vllm(), vllm(drafts=WELL)):
        async with upstream(whole) as a, upstream(whole) as b:
            a.metrics = b.metrics = page
            async with in_front(a, b) as where, client(where) as http:
                for mode in ("off", "auto"):
                    assert await ask(where, speculation={"mode": mode}) == (200, None, None)
                assert (len(a.requests), len(b.requests)) == (1, 1)
                assert (await http.get("/decisions")).json() == {"decisions": []}


async def test_other_pool_serves_during_an_outage() -> None:
    """A request without drafts is not refused if only drafting replicas are up."""
    async with upstream(whole) as fast, upstream(refusal(503)) as plain:
        fast.metrics, plain.metrics = vllm(drafts=WELL), vllm()
        async with in_front(fast, plain) as where:
            status, pool, _ = await ask(where, speculation={"mode": "off"})
            assert (status, pool) == (200, "speculating")
            assert (len(fast.requests), len(plain.requests)) == (1, 1)
            assert await ask(where, speculation={"mode": "off"}) == (200, None, None), "it rests"
            assert len(plain.requests) == 1


async def test_request_does_not_wait_for_a_full_pool() -> None:
    """Capacity has precedence; if all are full, the first free replica takes the request."""
    async with upstream(held()) as plain, upstream(held()) as fast:
        fast.metrics, plain.metrics = vllm(drafts=BADLY), vllm()
        async with in_front(plain, fast, seats=1) as where, client(where) as http:
            off = {"prompt": "x", "speculation": {"mode": "off"}}
            _, first = await post_raw(where, "/v1/completions", off)
            await plain.came.get()
            _, second = await post_raw(where, "/v1/completions", off)
            await fast.came.get()
            _, third = await post_raw(where, "/v1/completions", off)
            await until(lambda: len(where.node.dispatcher.queue) == 1)
            second.close()
            await fast.came.get()
            decisions = (await http.get("/decisions")).json()["decisions"]
            for writer in (first, third):
                writer.close()
            await until(lambda: where.node.dispatcher.in_flight == 0)
    reasons = [decision["plan"]["reason"] for decision in decisions]
    assert reasons[2] == "the request asked for no speculation"
    assert reasons[1].endswith("but only speculating replicas have capacity")
    assert reasons[0].endswith("the first replica with capacity takes it")


async def test_request_for_a_full_pool_does_not_block_others() -> None:
    """Requests behind it can use the other pool."""
    async with upstream(held()) as plain, upstream(held()) as fast:
        fast.metrics, plain.metrics = vllm(drafts=WELL), vllm()
        async with in_front(plain, fast, seats=1) as where:
            off = {"prompt": "x", "speculation": {"mode": "off"}}
            writers = []
            for came in (plain, fast):  # afterwards both are full
                writers.append((await post_raw(where, "/v1/completions", off))[1])
                await came.came.get()
            for waiting in (1, 2):
                writers.append((await post_raw(where, "/v1/completions", off))[1])
                await until(lambda count=waiting: len(where.node.dispatcher.queue) == count)
            writers.pop(1).close()
            await fast.came.get()  # from the first waiting request, which preferred the other pool
            writers.pop(0).close()
            await plain.came.get()
            for writer in writers:
                writer.close()
            await until(lambda: where.node.dispatcher.in_flight == 0)


async def test_pool_headers_of_streams_and_embeddings() -> None:
    """A stream has the headers; for an embedding nothing is decided."""
    async with upstream(stream_of(TOKEN, LAST, DONE)) as fast, upstream(whole) as plain:
        fast.metrics, plain.metrics = vllm(drafts=WELL), vllm()
        async with in_front(fast, plain) as where, client(where) as http:
            assert await ask(where, stream=True)
            assert len(fast.requests) == 1
            answer = await http.post("/v1/embeddings", json={"input": "x"})
            assert "x-speculation-pool" not in answer.headers


async def test_declared_pools_need_no_metrics() -> None:
    """`--upstream-speculates` overrides what the upstreams report."""
    async with upstream(whole) as fast, upstream(whole) as plain:
        plain.metrics = vllm(drafts=WELL)
        configs = [
            WorkerConfig(upstream=fast.url, upstream_speculates=True),
            WorkerConfig(upstream=plain.url, upstream_speculates=False),
        ]
        async with running(backends=[unasked(config, Clock()) for config in configs]) as where:
            assert (await ask(where))[1] == "speculating"
            assert (await ask(where, speculation={"mode": "off"}))[1] == "plain"
            assert (len(fast.requests), len(plain.requests)) == (1, 1)


def test_upstream_speculates_must_name_upstreams() -> None:
    """It applies to all upstreams or to none, and only to existing ones."""
    both = ("http://a", "http://b")
    told = ServeConfig(backend="openai", upstream=both, upstream_speculates=("http://b",))
    assert [one.upstream_speculates for one in told.worker_configs()] == [False, True]
    untold = ServeConfig(backend="openai", upstream=both)
    assert [one.upstream_speculates for one in untold.worker_configs()] == [None, None]
    wrong = ServeConfig(backend="openai", upstream=both, upstream_speculates=("http://c",))
    with pytest.raises(StartError, match="http://c is not one of the --upstream URLs"):
        build_node(wrong)


async def spent(where: Listening, upstreams: tuple[ScriptedUpstream, ...]) -> int:
    """Return how many calls the upstreams got for ten requests."""
    before = sum(len(one.requests) for one in upstreams)
    for _ in range(10):
        await ask(where)
    return sum(len(one.requests) for one in upstreams) - before


async def test_retries_do_not_multiply_an_outage() -> None:
    """If all upstreams fail, retries stay within the budget, and metrics count them."""
    async with (
        upstream(refusal(502)) as a,
        upstream(refusal(502)) as b,
        upstream(refusal(502)) as c,
    ):
        settings = {"upstream_retry_share": 0.2, "upstream_retries_per_s": 0.0}
        async with in_front(a, b, c, **settings) as where, client(where) as http:
            assert await spent(where, (a, b, c)) == 12
            page = (await http.get("/metrics")).text
        async with in_front(a, b, c, upstream_retry_share=0.0, upstream_retries_per_s=0.0) as where:
            assert await spent(where, (a, b, c)) == 10
        async with in_front(a, b, c) as where:  # the budget of a quiet gateway
            assert await spent(where, (a, b, c)) == 30
    figure = 'draftgate_upstream_retries_total{cause="refused",model_name="theirs",outcome='
    assert f'{figure}"allowed"}} 2.0' in page
    assert f'{figure}"denied"}} 10.0' in page


async def test_denied_retry_is_one_typed_error() -> None:
    """The client gets the upstream's error at once."""
    async with (
        upstream(refusal(503, b'{"error": "full"}', Retry_After="7")) as a,
        upstream(whole) as b,
    ):
        none = {"upstream_retry_share": 0.0, "upstream_retries_per_s": 0.0}
        async with in_front(a, b, **none) as where, client(where) as http:
            answer = await http.post("/v1/completions", json={"prompt": "x"})
            assert answer.status_code == 503
            assert answer.json()["error"]["code"] == "upstream_unavailable"
            assert "full" in answer.json()["error"]["message"]
            assert (len(a.requests), len(b.requests)) == (1, 0)
