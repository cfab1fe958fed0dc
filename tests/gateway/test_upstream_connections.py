"""Tests of connections that an upstream closes without saying so."""

from __future__ import annotations

import asyncio
import errno
import json
import random
import socket

import pytest

from draftgate.backends.openai import connections
from tests.gateway.harness import client
from tests.gateway.raw_upstreams import STALE, Fault, raw_upstream
from tests.gateway.upstreams import WHOLE, forwarding

SMALL = {"prompt": "x"}
LARGE = {"prompt": "x" * (2 << 20)}


def after_first(fault: Fault):
    """Answer the first request of each connection, and react to the second with a fault."""
    return lambda _, number: Fault.NONE if number == 1 else fault


async def retries(http) -> str:
    """Return the counted retries, as their lines on the page of metrics."""
    lines = (await http.get("/metrics")).text.splitlines()
    found = [line for line in lines if line.startswith("draftgate_upstream_retries")]
    return "".join(line for line in found if float(line.split()[-1]))


@pytest.mark.parametrize("body", [SMALL, LARGE], ids=["small", "large"])
@pytest.mark.parametrize("fault", STALE)
async def test_request_on_a_closed_connection_is_sent_on_a_new_one(
    fault: Fault, body: dict[str, str]
) -> None:
    """No request fails, no retry is counted, and the breaker stays closed, for any kind of end."""
    async with (
        raw_upstream(after_first(fault)) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        for _ in range(12):
            response = await http.post("/v1/completions", json=body)
            assert (response.status_code, response.content) == (200, WHOLE)
        assert await retries(http) == ""
        assert gateway.node.fleet.outage is None
    assert {json.dumps(json.loads(one)) for one in engine.bodies} == {json.dumps(body)}


@pytest.mark.parametrize("seed", range(4))
async def test_any_sequence_of_closed_connections_costs_no_request(seed: int) -> None:
    """Concurrent requests succeed while connections end in random ways after any request."""
    chance = random.Random(seed)

    def fault(_: int, number: int) -> Fault:
        some = (Fault.NONE, Fault.CLOSE_AFTER, *(STALE if number > 1 else ()))
        return chance.choice(some)

    async with (
        raw_upstream(fault) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):

        async def send_several() -> list[int]:
            return [(await http.post("/v1/completions", json=SMALL)).status_code for _ in range(25)]

        found = await asyncio.gather(*(send_several() for _ in range(4)))
        assert {status for statuses in found for status in statuses} == {200}
        assert await retries(http) == ""
    assert engine.begun <= 2 * 100


async def test_request_is_sent_at_most_twice_per_attempt() -> None:
    """A server that drops every request gets three: one on the old connection, two attempts."""
    dropping = False

    def fault(_connection: int, _number: int) -> Fault:
        return Fault.CLOSE if dropping else Fault.NONE

    async with (
        raw_upstream(fault) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        assert (await http.post("/v1/completions", json=SMALL)).status_code == 200
        dropping, begun = True, engine.begun
        assert (await http.post("/v1/completions", json=SMALL)).status_code == 502
        assert engine.begun - begun == 3
        assert 'cause="failed"' in await retries(http)


@pytest.mark.parametrize("late", [True, False], ids=["late", "half-a-head"])
async def test_failure_of_a_working_upstream_counts(
    late: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A connection that breaks late, or within the head of a response, is a failed attempt."""
    if late:
        monkeypatch.setattr(connections, "STALE_S", 0.0)
    fault = Fault.CLOSE if late else Fault.HALF_A_HEAD
    async with (
        raw_upstream(after_first(fault)) as engine,
        forwarding(engine) as gateway,
        client(gateway) as http,
    ):
        for _ in range(2):
            assert (await http.post("/v1/completions", json=SMALL)).status_code == 200
        assert 'cause="failed"' in await retries(http)


def test_connection_to_a_silent_machine_breaks() -> None:
    """A socket to an upstream breaks after 30 s without acknowledgement, and this is no failure."""
    opened = connections._open_socket((socket.AF_INET, socket.SOCK_STREAM, 0, "", None))
    with opened:
        assert opened.getsockopt(socket.SOL_SOCKET, socket.SO_KEEPALIVE) == 1
        assert opened.getsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT) == 30_000
    assert connections._is_stale(TimeoutError(errno.ETIMEDOUT, "timed out"), 30.0)
    assert not connections._is_stale(ConnectionResetError(errno.ECONNRESET, "reset"), 30.0)
