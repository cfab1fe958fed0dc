"""The stub server streams on schedule, and the search finds the ceiling."""

from __future__ import annotations

import io

import pytest
from rich.console import Console

from draftgate.loadgen.sending.calibrate import (
    PACE,
    CalibrationProbe,
    CalibrationResult,
    find_highest,
    probe,
    render_ceilings,
    run_stub_server,
    succeeds,
)
from draftgate.loadgen.sending.client import ClientTimeouts, OpenAIClient, first_model, open_session
from draftgate.loadgen.sending.stub_server import TokenPace
from draftgate.loadgen.types import ChatMessage, ClientHealth, PlannedRequest
from tests.loadgen.mock_server import question

HEALTHY = ClientHealth(max_lag_s=0.004, p99_lag_s=0.0012, cpu_share=0.85, loop_stall_s=0.003)


def a_probe(rate_rps: float, *reasons: str) -> CalibrationProbe:
    excess_s = (0.001, 0.0105)
    return CalibrationProbe(
        rate_rps, rate_rps * 2, rate_rps * 100, HEALTHY, excess_s, 0.97, reasons
    )


@pytest.mark.parametrize("ceiling", [0, 1, 7, 99, 100, 101, 1000, 12345])
async def test_the_search_finds_the_ceiling(ceiling: int) -> None:
    """The search finds the true ceiling within the precision, from below, in few probes."""
    probed = []

    async def holds(load: int) -> bool:
        probed.append(load)
        return load <= ceiling

    found = await find_highest(holds)
    assert found <= ceiling
    assert ceiling - found <= max(1, 0.1 * found)
    assert len(probed) <= 16


@pytest.mark.parametrize(
    ("outcomes", "held"), [([True], True), ([False, True], True), ([False, False], False)]
)
async def test_a_load_that_fails_is_repeated(outcomes: list[bool], held: bool) -> None:
    """The search repeats a load that failed, but not a load that succeeded."""
    left = iter(outcomes)

    async def attempt() -> bool:
        return next(left)

    assert await succeeds(attempt) is held
    assert next(left, None) is None


async def test_the_stub_server_streams_on_schedule() -> None:
    """The server sends intact streams with the requested tokens, never ahead of schedule."""
    pace = TokenPace(ttft_s=0.02, itl_s=0.005)
    async with run_stub_server(pace) as url, open_session() as session:
        assert await first_model(session, url) == "stub"
        client = OpenAIClient(session, url, "stub", ClientTimeouts(10.0, 10.0))
        record = await client.send_request(PlannedRequest(0, None, question(max_tokens=5)))
        chat = question(prompt=None, messages=(ChatMessage("user", "é" * 70_000),), max_tokens=1)
        other = await client.send_request(PlannedRequest(1, None, chat))
        async with session.get(f"{url}/elsewhere") as response:
            assert response.status == 404
        async with session.post(f"{url}/v1/completions", data=b"{}") as response:
            assert response.status == 400
    assert (record.verdict, len(record.chunks)) == ("ok", 5), record.detail
    assert (other.verdict, len(other.chunks)) == ("ok", 1), other.detail
    for place, arrived in enumerate(record.chunks):
        # Timers of libuv count whole milliseconds and may fire up to 1 ms early.
        assert arrived.at_s - record.sent_s > pace.ttft_s + place * pace.itl_s - 0.0015


async def test_a_probe_offers_its_load() -> None:
    """A probe sends evenly spaced requests at the given rate and reports the server's CPU."""
    async with run_stub_server(PACE) as url, open_session() as session:
        probed = await probe(session, url, rate_rps=40, tokens=3, probe_s=0.25)
    assert probed.chunks_per_s == 120
    assert probed.open_streams == pytest.approx(40 * 0.09)
    assert not [reason for reason in probed.reasons if "failed" in reason]
    assert 0 < probed.server_cpu_share < 1.5
    assert -0.0015 < probed.ttft_excess_s[0] <= probed.ttft_excess_s[1]


def test_the_result_is_the_highest_sustained_load() -> None:
    """The highest sustained load counts, even if a lower load failed by chance."""
    rates = (a_probe(100), a_probe(400, "lag"), a_probe(200, "hiccup"), a_probe(300))
    result = CalibrationResult(rates, (a_probe(100, "2 of 9 streams failed"),))
    assert result.rate == rates[-1]
    assert result.stream is None
    console = Console(width=80, record=True, file=io.StringIO())
    console.print(render_ceilings(result))
    text = console.export_text()
    for shown in ("300", "600", "30000", "1.2 ms", "1.0 ms", "10.5 ms", "85%", "97%"):
        assert shown in text
    assert "1 token: limited by lag" in text
    assert "none sustained" in text
    assert "limited by 2 of 9 streams failed" in text
    assert "hiccup" not in text
