"""Choice of upstreams, retries, and pauses."""

from __future__ import annotations

import asyncio
import logging

import pytest

from draftgate.gateway.app import Listening
from tests.gateway.harness import client, is_idle, post_raw, running, until
from tests.gateway.upstreams import (
    DONE,
    LAST,
    TOKEN,
    WHOLE,
    Clock,
    cut_after,
    held,
    in_front,
    refusal,
    stream_of,
    upstream,
    whole,
)

BODY = {"prompt": "x"}
BUSY = b'{"error": {"message": "slow down", "code": "rate_limit"}}'


async def answered(where: Listening, **body: object) -> tuple[int, bytes, str | None]:
    """Return status, body and Retry-After of one request."""
    async with client(where) as http:
        answer = await http.post("/v1/completions", json={**BODY, **body})
        return answer.status_code, answer.content, answer.headers.get("retry-after")


async def probe(where: Listening, index: int = 0) -> None:
    await where.node.fleet.workers[index].backend.probe()


async def test_upstream_with_fewest_requests_is_chosen() -> None:
    """Three open requests go to three upstreams, and a fourth to the one that becomes free."""
    async with (
        upstream(held()) as a,
        upstream(held()) as b,
        upstream(held()) as c,
        in_front(a, b, c) as where,
    ):
        writers = []
        for _ in range(3):
            writers.append((await post_raw(where, "/v1/completions", BODY))[1])
            await until(lambda: where.node.dispatcher.in_flight == len(writers))
            await until(lambda: sum(len(u.requests) for u in (a, b, c)) == len(writers))
        assert [len(u.requests) for u in (a, b, c)] == [1, 1, 1]
        loads = [worker.backend.load().running for worker in where.node.fleet.workers]
        assert loads == [1, 1, 1]
        writers.pop(1).close()
        assert await b.left.get()
        await until(lambda: where.node.dispatcher.in_flight == 2)
        writers.append((await post_raw(where, "/v1/completions", BODY))[1])
        await b.came.get()
        await b.came.get()
        for writer in writers:
            writer.close()
        await until(lambda: is_idle(where.node))


async def test_equal_upstreams_take_turns() -> None:
    """At low load no upstream gets all the requests."""
    async with upstream(whole) as a, upstream(whole) as b, in_front(a, b) as where:
        for _ in range(6):
            await answered(where)
        assert (len(a.requests), len(b.requests)) == (3, 3)


@pytest.mark.parametrize("status", [429, 502, 503])
async def test_refused_request_is_sent_to_another_upstream(status: int) -> None:
    """A client does not see the refusal if another upstream answers."""
    async with upstream(refusal(status, BUSY)) as a, upstream(whole) as b, in_front(a, b) as where:
        assert await answered(where) == (200, WHOLE, None)
        assert (len(a.requests), len(b.requests)) == (1, 1)
        assert a.bodies == b.bodies


@pytest.mark.parametrize("sent", [(), (b"",), (TOKEN[:20],)], ids=["head", "nothing", "half"])
async def test_failure_before_first_byte_is_retried_elsewhere(sent: tuple[bytes, ...]) -> None:
    """Until the client has been sent something, another upstream may answer."""
    async with (
        upstream(cut_after(*sent)) as a,
        upstream(stream_of(TOKEN, LAST, DONE)) as b,
        in_front(a, b) as where,
    ):
        assert await answered(where, stream=True) == (200, TOKEN + LAST + DONE, None)
        assert len(a.requests) == 1


async def test_failure_after_first_byte_is_not_retried() -> None:
    """A client never gets parts of two answers."""
    async with (
        upstream(cut_after(TOKEN)) as a,
        upstream(cut_after(TOKEN)) as b,
        in_front(a, b) as where,
    ):
        status, body, _ = await answered(where, stream=True)
        assert (status, body.count(TOKEN)) == (200, 1)
        assert len(a.requests) + len(b.requests) == 1


async def test_attempts_are_bounded() -> None:
    """A single failing upstream is called twice, several ones three times in all."""
    async with upstream(cut_after()) as a, in_front(a) as where:
        status, body, _ = await answered(where, stream=True)
        assert (status, len(a.requests)) == (502, 2)
        assert b'"code":"upstream_failed"' in body
    async with (
        upstream(cut_after()) as a,
        upstream(cut_after()) as b,
        upstream(cut_after()) as c,
        upstream(cut_after()) as d,
        in_front(a, b, c, d) as where,
    ):
        assert (await answered(where, stream=True))[0] == 502
        assert sum(len(u.requests) for u in (a, b, c, d)) == 3


@pytest.mark.parametrize(
    ("status", "code"), [(429, b"upstream_busy"), (503, b"upstream_unavailable")]
)
async def test_retry_after_pauses_an_upstream(status: int, code: bytes) -> None:
    """It is not called before that time, and clients get the remaining seconds."""
    clock = Clock()
    async with (
        upstream(refusal(status, BUSY, Retry_After="30")) as there,
        in_front(there, clock=clock) as where,
    ):
        got = await answered(where)
        assert (got[0], got[2]) == (status, "30")
        assert b"slow down" in got[1]
        clock.now_s += 12.5
        for _ in range(5):
            got = await answered(where)
            assert (got[0], got[2]) == (status, "18")
            assert code in got[1]
        assert len(there.requests) == 1
        there.answer = whole
        clock.now_s += 17.4
        assert (await answered(where))[2] == "1"
        clock.now_s += 0.1
        assert await answered(where) == (200, WHOLE, None)
        assert len(there.requests) == 2


async def test_clients_get_the_shortest_pause() -> None:
    """When all upstreams pause, Retry-After is that of the first one to return."""
    clock = Clock()
    async with (
        upstream(refusal(429, BUSY, Retry_After="40")) as a,
        upstream(refusal(429, BUSY, Retry_After="20")) as b,
        in_front(a, b, clock=clock) as where,
    ):
        assert (await answered(where))[2] == "20"
        assert (await answered(where))[2] == "20"
        assert (len(a.requests), len(b.requests)) == (1, 1)


@pytest.mark.parametrize("status", [400, 401, 404, 422])
async def test_client_error_of_the_upstream_passes(status: int) -> None:
    """The client gets the upstream's own message, and the request is sent once."""
    answer = refusal(status, BUSY, Retry_After="3", X_Own="7")
    async with upstream(answer) as a, upstream(answer) as b, in_front(a, b) as where:
        assert await answered(where) == (status, BUSY, "3")
        assert len(a.requests) + len(b.requests) == 1
        async with client(where) as http:
            assert 'outcome="rejected"' in (await http.get("/metrics")).text


@pytest.mark.parametrize("status", [302, 500, 504])
async def test_server_error_of_the_upstream_becomes_502(status: int) -> None:
    """The 502 has the reason, and the request is not retried."""
    async with upstream(refusal(status, BUSY)) as there, in_front(there) as where:
        got, body, _ = await answered(where)
        assert got == 502
        assert f"responded with status {status}: slow down".encode() in body
        assert len(there.requests) == 1


async def test_node_is_not_ready_while_all_upstreams_are_out(
    caplog: pytest.LogCaptureFixture,
) -> None:
    """Requests get 503 with Retry-After, one line is logged, and a good probe ends it."""
    caplog.set_level(logging.INFO, "draftgate")
    clock = Clock()
    async with upstream(whole) as there, in_front(there, clock=clock, log_level="info") as where:
        beat = where.node.heartbeat.beat
        async with client(where) as http:
            assert (await http.get("/ready")).status_code == 200
            there.status = 500
            for _ in range(3):
                await probe(where)
                clock.now_s += 0.1
            for _ in range(3):
                await beat()
            assert (await http.get("/ready")).status_code == 503
            health = (await http.get("/health")).json()
            assert "/health responded with status 500" in health["workers"][0]["reason"]
            for _ in range(3):
                status, body, retry_after = await answered(where)
                assert (status, retry_after) == (503, "1")
                assert b"upstream_unavailable" in body
            assert there.requests == []
            there.status = 200
            await probe(where)
            await beat()
            assert (await http.get("/ready")).status_code == 200
            assert (await answered(where))[0] == 200
    messages = [record.getMessage() for record in caplog.records]
    assert messages.count("worker failed") == messages.count("worker recovered") == 1
    failed = caplog.records[messages.index("worker failed")]
    assert there.url in str(vars(failed)), "operators are told which one"


async def test_upstream_may_start_after_its_node() -> None:
    """The node starts without it, and serves once it is up."""
    async with upstream(whole) as there:
        there.status = 503
        async with in_front(there) as where, client(where) as http:
            assert (await http.get("/ready")).status_code == 503
            assert (await http.get("/health")).status_code == 200
            there.status = 200
            await probe(where)
            assert (await http.get("/ready")).status_code == 200
            assert where.node.model_name == "theirs"


async def test_unreachable_address_is_an_outage() -> None:
    """Requests fail at once with a typed error that contains no address."""
    async with upstream(whole) as gone:
        pass
    address = gone.url.removeprefix("http://")
    async with in_front(gone, served_model_name="ours") as where, client(where) as http:
        status, body, _ = await answered(where)
        assert status == 503
        assert b"upstream_unavailable" in body
        (health,) = (await http.get("/health")).json()["workers"]
        assert health["reason"] == "upstream 1: connection refused"
        assert (await http.get("/ready")).json()["reason"] == health["reason"]
        for path in ("/health", "/ready", "/v1/models", "/v1/models/ours"):
            assert address not in (await http.get(path)).text


async def test_queued_request_fails_when_the_last_upstream_goes_out() -> None:
    """It gets 503 `upstream_unavailable` without an address."""
    async with (
        upstream(held()) as there,
        in_front(there, seats=1) as where,
    ):
        _, first = await post_raw(where, "/v1/completions", BODY)
        await there.came.get()
        waiting = asyncio.create_task(answered(where))
        await until(lambda: len(where.node.dispatcher.queue) == 1)
        there.status = 500
        for _ in range(3):
            await probe(where)
        where.node.dispatcher.queue.pump()
        status, body, retry_after = await waiting
        assert (status, retry_after) == (503, "1")
        assert b'"code":"upstream_unavailable"' in body
        assert b"127.0.0.1" not in body
        first.close()
        await until(lambda: is_idle(where.node))


async def test_retry_moves_its_capacity_to_the_next_upstream() -> None:
    """A full upstream gets no retry."""
    async with (
        upstream(held()) as full,
        upstream(refusal(503, BUSY)) as refusing,
        in_front(full, refusing, seats=1) as where,
    ):
        _, first = await post_raw(where, "/v1/completions", BODY)
        await full.came.get()
        assert (await answered(where))[0] == 503
        assert (len(full.requests), len(refusing.requests)) == (1, 1)
        first.close()
        await until(lambda: is_idle(where.node))
    async with (
        upstream(refusal(503, BUSY)) as refusing,
        upstream(held()) as other,
        in_front(refusing, other, seats=1) as where,
    ):
        _, first = await post_raw(where, "/v1/completions", BODY)
        await other.came.get()
        reserved = [worker.reserved_tokens > 0 for worker in where.node.fleet.workers]
        assert reserved == [False, True]
        first.close()
        await until(lambda: is_idle(where.node))


async def test_model_lists_and_tokenizing_need_no_capacity() -> None:
    """They pass while all upstreams are full, and cost no quota."""
    async with upstream(held()) as there, in_front(there, seats=1) as where, client(where) as http:
        _, first = await post_raw(where, "/v1/completions", BODY)
        await there.came.get()
        there.answer = whole
        assert (await http.get("/v1/models")).status_code == 200
        assert (await http.post("/tokenize", json={"prompt": "x"})).content == WHOLE
        assert where.node.dispatcher.admission.ledger.totals("").reserved == 4 + 99  # the first
        first.close()
        await until(lambda: is_idle(where.node))


async def test_failed_requests_open_the_breaker() -> None:
    """Three broken connections suffice without a probe."""

    async def drop(request):
        request.transport.abort()
        return await asyncio.get_running_loop().create_future()

    async with upstream(drop) as there, in_front(there) as where:
        assert (await answered(where))[0] == 502
        assert (await answered(where))[0] == 502
        seen = len(there.requests)
        assert seen == 3
        assert (await answered(where))[0] == 503
        assert len(there.requests) == seen


async def test_background_probe_finds_a_recovered_upstream() -> None:
    """Neither a request nor an operator is needed."""
    async with upstream(whole) as there:
        there.status = 503
        async with running(backend="openai", upstream=(there.url,)) as where:
            assert where.node.fleet.outage is not None
            there.status = 200
            await until(lambda: where.node.fleet.outage is None)
