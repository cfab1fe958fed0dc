"""Tests of connections that a server closes without saying so."""

from __future__ import annotations

import pytest

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.sending import client
from draftgate.loadgen.sending.client import OpenAIClient, open_session
from tests.gateway.raw_upstreams import STALE, Fault, raw_upstream
from tests.loadgen.mock_server import planned


@pytest.mark.parametrize("fault", [one for one in STALE if one is not Fault.TIMEOUT_STATUS])
async def test_closed_connection_is_no_failed_request(fault: Fault) -> None:
    """A request that meets a closed connection is sent on a new one, and counts once."""
    async with (
        raw_upstream(lambda _, number: Fault.NONE if number == 1 else fault) as server,
        open_session() as session,
    ):
        sender = OpenAIClient(session, server.url, "theirs")
        records = [await sender.send_request(planned(0, None)) for _ in range(6)]
    assert [record.status for record in records] == [200] * 6
    assert server.connections == 6


async def test_server_that_drops_new_connections_fails_the_request() -> None:
    """A request on a new connection that ends without a response is sent once and fails."""
    async with (
        raw_upstream(lambda _, __: Fault.CLOSE) as server,
        open_session() as session,
    ):
        sender = OpenAIClient(session, server.url, "theirs")
        record = await sender.send_request(planned(0, None))
    assert (record.verdict, server.begun) == (Verdict.NO_CONNECTION.value, 1)


async def test_late_end_of_a_connection_is_a_fault(monkeypatch: pytest.MonkeyPatch) -> None:
    """A reused connection that ends later than a closed one would is a fault of the server."""
    monkeypatch.setattr(client, "STALE_S", 0.0)
    async with (
        raw_upstream(lambda _, number: Fault.NONE if number == 1 else Fault.CLOSE) as server,
        open_session() as session,
    ):
        sender = OpenAIClient(session, server.url, "theirs")
        records = [await sender.send_request(planned(0, None)) for _ in range(2)]
    assert [record.status for record in records] == [200, None]
