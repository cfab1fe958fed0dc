"""Tests of the choice of upstreams, retries and pauses."""

from __future__ import annotations

import asyncio
import logging

import pytest

from draftgate.gateway.app import Listening
from draftgate.gateway.dispatch.quotas import quota_account
from draftgate.gateway.state.commands import ReadTotals
from tests.gateway.harness import client, is_idle, post_raw, running, until
from tests.gateway.troubles import AMPLE
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    WHOLE,
    Clock,
    cut_after,
    forwarding,
    held,
    refusal,
    stream_of,
    upstream,
    whole,
)
from tests.upstream_settings import at

BODY = {"prompt": "x"}
BUSY = b'{"error": {"message": "slow down", "code": "rate_limit"}}'


async def send(gateway: Listening, **body: object) -> tuple[int, bytes, str | None]:
    """Send a request and return the status, the body and the Retry-After header."""
    async with client(gateway) as http:
        response = await http.post("/v1/completions", json={**BODY, **body})
        return response.status_code, response.content, response.headers.get("retry-after")


async def probe(gateway: Listening, index: int = 0) -> None:
    await gateway.node.fleet.workers[index].backend.probe()


async def test_upstream_with_fewest_requests_is_chosen() -> None:
    """The gateway sends each request to the upstream with the fewest open requests."""
    async with (
        upstream(held()) as a,
        upstream(held()) as b,
        upstream(held()) as c,
        forwarding(a, b, c) as gateway,
    ):
        writers = []
        for _ in range(3):
            writers.append((await post_raw(gateway, "/v1/completions", BODY))[1])
            await until(lambda: gateway.node.in_flight == len(writers))
            await until(lambda: sum(len(u.requests) for u in (a, b, c)) == len(writers))
        assert [len(u.requests) for u in (a, b, c)] == [1, 1, 1]
        loads = [worker.backend.load().running for worker in gateway.node.fleet.workers]
        assert loads == [1, 1, 1]
        writers.pop(1).close()
        assert await b.disconnected.get()
        await until(lambda: gateway.node.in_flight == 2)
        writers.append((await post_raw(gateway, "/v1/completions", BODY))[1])
        await b.arrived.get()
        await b.arrived.get()
        for writer in writers:
            writer.close()
        await until(lambda: is_idle(gateway.node))


async def test_equal_upstreams_take_turns() -> None:
    """The gateway alternates between equal upstreams at low load."""
    async with upstream(whole) as a, upstream(whole) as b, forwarding(a, b) as gateway:
        for _ in range(6):
            await send(gateway)
        assert (len(a.requests), len(b.requests)) == (3, 3)


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_refused_request_is_sent_to_another_upstream(status: int) -> None:
    """The gateway sends a refused request to another upstream, and the client sees no refusal."""
    async with (
        upstream(refusal(status, BUSY)) as a,
        upstream(whole) as b,
        forwarding(a, b) as gateway,
    ):
        assert await send(gateway) == (200, WHOLE, None)
        assert (len(a.requests), len(b.requests)) == (1, 1)
        assert a.bodies == b.bodies


@pytest.mark.parametrize("sent", [(), (b"",), (TOKEN[:20],)], ids=["head", "nothing", "half"])
async def test_failure_before_first_byte_is_retried_elsewhere(sent: tuple[bytes, ...]) -> None:
    """The gateway retries a request on another upstream if no byte has reached the client."""
    async with (
        upstream(cut_after(*sent)) as a,
        upstream(stream_of(TOKEN, LAST, DONE)) as b,
        forwarding(a, b) as gateway,
    ):
        assert await send(gateway, stream=True) == (200, TOKEN + LAST + DONE, None)
        assert len(a.requests) == 1


async def test_failure_after_first_byte_is_not_retried() -> None:
    """The gateway does not retry a request after the first byte has reached the client."""
    async with (
        upstream(cut_after(TOKEN)) as a,
        upstream(cut_after(TOKEN)) as b,
        forwarding(a, b) as gateway,
    ):
        status, body, _ = await send(gateway, stream=True)
        assert (status, body.count(TOKEN)) == (200, 1)
        assert len(a.requests) + len(b.requests) == 1


async def test_attempts_are_bounded() -> None:
    """The gateway makes two attempts with a single upstream and three with several upstreams."""
    async with upstream(cut_after()) as a, forwarding(a) as gateway:
        status, body, _ = await send(gateway, stream=True)
        assert (status, len(a.requests)) == (502, 2)
        assert b'"code":"upstream_failed"' in body
    async with (
        upstream(cut_after()) as a,
        upstream(cut_after()) as b,
        upstream(cut_after()) as c,
        upstream(cut_after()) as d,
        forwarding(a, b, c, d) as gateway,
    ):
        assert (await send(gateway, stream=True))[0] == 502
        assert sum(len(u.requests) for u in (a, b, c, d)) == 3


@pytest.mark.parametrize(
    ("status", "code"), [(429, b"upstream_busy"), (503, b"upstream_unavailable")]
)
async def test_retry_after_pauses_an_upstream(status: int, code: bytes) -> None:
    """The gateway pauses an upstream for its Retry-After time and reports the remaining seconds."""
    clock = Clock()
    async with (
        upstream(refusal(status, BUSY, Retry_After="30")) as engine,
        forwarding(engine, clock=clock) as gateway,
    ):
        got = await send(gateway)
        assert (got[0], got[2]) == (status, "30")
        assert b"slow down" in got[1]
        clock.now_s += 12.5
        for _ in range(5):
            got = await send(gateway)
            assert (got[0], got[2]) == (status, "18")
            assert code in got[1]
        assert len(engine.requests) == 1
        engine.handler = whole
        clock.now_s += 17.4
        assert (await send(gateway))[2] == "1"
        clock.now_s += 0.1
        assert await send(gateway) == (200, WHOLE, None)
        assert len(engine.requests) == 2


async def test_clients_get_the_shortest_pause() -> None:
    """The client gets the shortest remaining pause as Retry-After when all upstreams pause."""
    clock = Clock()
    async with (
        upstream(refusal(429, BUSY, Retry_After="40")) as a,
        upstream(refusal(429, BUSY, Retry_After="20")) as b,
        forwarding(a, b, clock=clock) as gateway,
    ):
        assert (await send(gateway))[2] == "20"
        assert (await send(gateway))[2] == "20"
        assert (len(a.requests), len(b.requests)) == (1, 1)


@pytest.mark.parametrize("status", [400, 404, 422])
async def test_client_error_of_the_upstream_passes(status: int) -> None:
    """The gateway forwards a client error of the upstream and does not retry the request."""
    handler = refusal(status, BUSY, Retry_After="3", X_Own="7")
    async with upstream(handler) as a, upstream(handler) as b, forwarding(a, b) as gateway:
        assert await send(gateway) == (status, BUSY, "3")
        assert len(a.requests) + len(b.requests) == 1
        async with client(gateway) as http:
            assert 'outcome="rejected"} 1.0' in (await http.get("/metrics")).text


@pytest.mark.parametrize("status", [302, 500, 504])
async def test_server_error_of_the_upstream_becomes_502(status: int) -> None:
    """The gateway turns a server error of the upstream into 502 and does not retry the request."""
    async with upstream(refusal(status, BUSY)) as engine, forwarding(engine) as gateway:
        got, body, _ = await send(gateway)
        assert got == 502
        assert f"responded with status {status}: slow down".encode() in body
        assert len(engine.requests) == 1


async def test_node_is_not_ready_while_all_upstreams_are_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """The gateway responds with 503 while all upstreams are out, until a probe succeeds."""
    caplog.set_level(logging.INFO, "draftgate")
    clock = Clock()
    async with (
        upstream(whole) as engine,
        forwarding(engine, clock=clock, log_level="info") as gateway,
    ):
        beat = gateway.node.heartbeat.beat
        async with client(gateway) as http:
            assert (await http.get("/ready")).status_code == 200
            engine.status = 500
            for _ in range(3):
                await probe(gateway)
                clock.now_s += 0.1
            for _ in range(3):
                await beat()
            ready, alive = (await http.get("/ready")), (await http.get("/health"))
            assert (ready.status_code, alive.status_code) == (503, 200)
            health = alive.json()
            assert health["status"] == ready.json()["status"] == "unavailable"
            assert health["reason"] == ready.json()["reason"]
            assert "/health responded with status 500" in health["workers"][0]["reason"]
            for _ in range(3):
                status, body, retry_after = await send(gateway)
                assert (status, retry_after) == (503, "1")
                assert b"upstream_unavailable" in body
            assert engine.requests == []
            engine.status = 200
            await probe(gateway)
            await beat()
            assert (await http.get("/ready")).status_code == 200
            assert (await http.get("/health")).json()["status"] == "ready"
            assert (await send(gateway))[0] == 200
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("worker failed") == messages.count("worker recovered") == 1
    failed = caplog.records[messages.index("worker failed")]
    assert engine.url in str(vars(failed)), "the log names the failed upstream"


async def test_upstream_may_start_after_its_node() -> None:
    """The gateway starts without its upstream and serves when the upstream is up."""
    async with upstream(whole) as engine:
        engine.status = 503
        async with forwarding(engine) as gateway, client(gateway) as http:
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            engine.status = 200
            await probe(gateway)
            assert (await http.get("/ready")).status_code == 200
            assert gateway.node.models[0].name == "theirs"


async def test_unreachable_address_is_an_outage() -> None:
    """Requests to an unreachable upstream fail with a typed error that contains no address."""
    async with upstream(whole) as gone:
        pass
    address = gone.url.removeprefix("http://")
    async with forwarding(gone, served_model_name=("ours",)) as gateway, client(gateway) as http:
        status, body, _ = await send(gateway)
        assert status == 503
        assert b"upstream_unavailable" in body
        (health,) = (await http.get("/health")).json()["workers"]
        assert health["reason"] == f"{health['id']}: connection refused"
        assert (await http.get("/ready")).json()["reason"] == health["reason"]
        for path in ("/health", "/ready", "/v1/models", "/v1/models/ours"):
            assert address not in (await http.get(path)).text


async def test_queued_request_fails_when_the_last_upstream_goes_out() -> None:
    """A queued request gets 503 without an address when the last upstream fails."""
    async with (
        upstream(held()) as engine,
        forwarding(engine, max_sequences=1) as gateway,
    ):
        _, first = await post_raw(gateway, "/v1/completions", BODY)
        await engine.arrived.get()
        waiting = asyncio.create_task(send(gateway))
        await until(lambda: len(gateway.node.dispatcher.queue) == 1)
        engine.status = 500
        for _ in range(3):
            await probe(gateway)
        gateway.node.dispatcher.queue.dispatch_waiting()
        status, body, retry_after = await waiting
        assert (status, retry_after) == (503, "1")
        assert b'"code":"upstream_unavailable"' in body
        assert b"127.0.0.1" not in body
        first.close()
        await until(lambda: is_idle(gateway.node))


async def test_retry_moves_its_capacity_to_the_next_upstream() -> None:
    """A retry reserves capacity of the next upstream, and a full upstream gets no retry."""
    async with (
        upstream(held()) as full,
        upstream(refusal(503, BUSY)) as refusing,
        forwarding(full, refusing, max_sequences=1) as gateway,
    ):
        _, first = await post_raw(gateway, "/v1/completions", BODY)
        await full.arrived.get()
        assert (await send(gateway))[0] == 503
        assert (len(full.requests), len(refusing.requests)) == (1, 1)
        first.close()
        await until(lambda: is_idle(gateway.node))
    async with (
        upstream(refusal(503, BUSY)) as refusing,
        upstream(held()) as other,
        forwarding(refusing, other, max_sequences=1) as gateway,
    ):
        _, first = await post_raw(gateway, "/v1/completions", BODY)
        await other.arrived.get()
        reserved = [worker.reserved_tokens > 0 for worker in gateway.node.fleet.workers]
        assert reserved == [False, True]
        first.close()
        await until(lambda: is_idle(gateway.node))


async def test_model_lists_and_tokenizing_need_no_capacity() -> None:
    """The gateway forwards model lists and tokenising to full upstreams without using quota."""
    async with (
        upstream(held()) as engine,
        forwarding(engine, max_sequences=1) as gateway,
        client(gateway) as http,
    ):
        gateway.node.dispatcher.admission.quotas.change({"": AMPLE})
        _, first = await post_raw(gateway, "/v1/completions", BODY)
        await engine.arrived.get()
        engine.handler = whole
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "x"})).content == WHOLE
        totals = await gateway.node.store.call(ReadTotals(quota_account("", "")))
        assert totals.reserved == 4 + 99  # the first request
        first.close()
        await until(lambda: is_idle(gateway.node))


async def test_failed_requests_open_the_breaker() -> None:
    """Three broken connections open the breaker without a probe."""

    async def drop(request):
        request.transport.abort()
        return await asyncio.get_running_loop().create_future()

    async with upstream(drop) as engine, forwarding(engine) as gateway:
        assert (await send(gateway))[0] == 502
        assert (await send(gateway))[0] == 502
        seen = len(engine.requests)
        assert seen == 4  # the first reused the connection of the probe, which may have ended
        assert (await send(gateway))[0] == 503
        assert len(engine.requests) == seen


async def test_background_probe_finds_a_recovered_upstream() -> None:
    """A background probe finds a recovered upstream without a request."""
    async with upstream(whole) as engine:
        engine.status = 503
        async with running(backend="openai", upstream=at(engine.url)) as gateway:
            assert gateway.node.fleet.outage is not None
            engine.status = 200
            await until(lambda: gateway.node.fleet.outage is None)
