"""Tests of the pauses of upstreams, of Retry-After headers and of observed speeds."""

from __future__ import annotations

from datetime import UTC, datetime

import pytest

from draftgate.backends.openai.pauses import retry_after_s
from draftgate.backends.openai.upstream import OpenAIUpstream
from draftgate.backends.openai.upstream_load import ObservedSpeed
from draftgate.backends.worker_config import UpstreamSettings, WorkerConfig
from tests.gateway.harness import client, running, until
from tests.gateway.upstreams import Clock, forwarding, refusal, upstream, whole

BODY = {"prompt": "x"}
FAR = ("864000", "999999999", "Sun, 01 Jan 2040 00:00:00 GMT")
"""Values of `Retry-After` that would switch an upstream off for days or years."""


@pytest.mark.parametrize(
    ("text", "seconds"),
    [
        ("0", 0.0),
        (" 120 ", 120.0),
        ("Sat, 21 Nov 2026 12:00:30 GMT", 30.0),
        ("Saturday, 21-Nov-26 12:00:30 GMT", 30.0),
        ("Sat Nov 21 12:00:30 2026", 30.0),
        ("Sat, 21 Nov 2026 11:00:00 GMT", 0.0),
        ("-1", None),
        ("1.5", None),
        ("soon", None),
        ("9" * 400, None),
        ("\u0663", None),
        ("", None),
        (None, None),
    ],
)
def test_retry_after_accepts_seconds_and_dates(text: str | None, seconds: float | None) -> None:
    """The parser accepts seconds and all three date formats and ignores other values."""
    assert retry_after_s(text, datetime(2026, 11, 21, 12, tzinfo=UTC)) == seconds


def test_speed_is_per_choice() -> None:
    """The observed speed is per choice, and a single token gives no speed."""
    observed = ObservedSpeed()
    observed.add_stream(1.0, 1, 1, 1.0)
    assert observed.speed().tpot_s == 0.0
    observed.add_stream(1.0, 22, 2, 1.0)
    assert observed.speed().tpot_s == pytest.approx(0.1)
    observed.add_stream(2.0, 11, 1, 1.0)
    assert observed.speed().tpot_s == pytest.approx(0.12)


def test_speed_is_corrected_for_load() -> None:
    """The observed speed predicts the times at a lower or higher load."""
    observed = ObservedSpeed()
    for sequences in (1, 8, 16, 24, 32) * 12:
        observed.add_stream(0.1 * (20 + sequences), 101, 1, sequences)
    for sequences in (1, 20, 60):
        speed = observed.speed(sequences)
        assert speed.tpot_s == pytest.approx(0.001 * (20 + sequences), rel=0.05)
        assert speed.sequence_s == pytest.approx(0.001, rel=0.05)
    assert observed.speed(0) == observed.speed(1)


@pytest.mark.parametrize("longest_s", [30.0, 4.0])
@pytest.mark.parametrize("status", [429, 503])
@pytest.mark.parametrize("value", FAR)
async def test_no_response_pauses_an_upstream_for_long(
    status: int, value: str, longest_s: float
) -> None:
    """An upstream gets requests again after `--upstream-max-pause-s`, without a probe."""
    clock = Clock()
    async with (
        upstream(refusal(status, Retry_After=value, retry_after_ms="864000000")) as engine,
        forwarding(engine, clock=clock, max_pause_s=longest_s) as gateway,
        client(gateway) as http,
    ):
        refused = await http.post("/v1/completions", json=BODY)
        assert refused.status_code == status
        assert float(refused.headers["retry-after"]) == longest_s
        assert float(refused.headers["retry-after-ms"]) == longest_s * 1e3
        engine.handler = whole
        clock.now_s += longest_s - 0.1
        assert (await http.post("/v1/completions", json=BODY)).status_code == status
        clock.now_s += 0.1
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize("status", [429, 503])
async def test_successful_probe_ends_a_pause(status: int) -> None:
    """A probe during a pause ends it, and its failure does not."""
    async with (
        upstream(refusal(status, Retry_After="864000")) as engine,
        forwarding(engine, clock=Clock()) as gateway,
        client(gateway) as http,
    ):
        (worker,) = gateway.node.fleet.workers
        await http.post("/v1/completions", json=BODY)
        engine.handler, engine.status = whole, 500
        await worker.backend.probe()
        assert (await http.post("/v1/completions", json=BODY)).status_code == status
        engine.status = 200
        await worker.backend.probe()
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_probes_do_not_shorten_the_pauses_of_an_overloaded_upstream() -> None:
    """After a refusal that follows an ended pause, only an accepted request restores the trust."""
    clock = Clock()
    overloaded = refusal(429, Retry_After="10")
    async with (
        upstream(overloaded) as engine,
        forwarding(engine, clock=clock) as gateway,
        client(gateway) as http,
    ):
        (worker,) = gateway.node.fleet.workers
        for expected in (1, 2):
            await http.post("/v1/completions", json=BODY)
            await worker.backend.probe()
            assert len(engine.requests) == expected
        assert (await http.post("/v1/completions", json=BODY)).status_code == 429
        assert len(engine.requests) == 2
        engine.handler = whole
        clock.now_s += 10.0
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        engine.handler = overloaded
        await http.post("/v1/completions", json=BODY)
        engine.handler = whole
        await worker.backend.probe()
        assert (await http.post("/v1/completions", json=BODY)).status_code == 200


async def test_background_probe_ends_a_pause() -> None:
    """The node probes during a pause without a request, and `/ready` follows."""
    async with upstream(refusal(503, Retry_After="864000")) as engine:
        backend = OpenAIUpstream(
            WorkerConfig(upstream=UpstreamSettings(url=engine.url)), probe_s=0.01, poll_s=3600.0
        )
        async with running(backends=[backend]) as gateway, client(gateway) as http:
            await http.post("/v1/completions", json=BODY)
            engine.handler = whole
            await until(lambda: backend.pause is None)
            assert (await http.get("/ready")).json() == {"status": "ready"}
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200


@pytest.mark.parametrize(("status", "ready"), [(429, 200), (503, 503)])
async def test_ready_and_workers_show_pauses(status: int, ready: int) -> None:
    """`/ready` names each paused upstream without its address, and fails if all are out by 503."""
    async with (
        upstream(refusal(status, Retry_After="20")) as a,
        upstream(whole) as b,
        forwarding(a, b, clock=Clock()) as gateway,
        client(gateway) as http,
    ):
        for _ in range(2):
            assert (await http.post("/v1/completions", json=BODY)).status_code == 200
        response = await http.get("/ready")
        assert response.status_code == 200
        (paused,) = response.json()["workers"]
        assert paused["status"] == "paused"
        assert f"it responded with status {status}" in paused["reason"]
        assert "20.0 s" in paused["reason"]
        listed = (await http.get("/workers")).json()["workers"]
        assert [worker["status"] for worker in listed] == ["paused", "ok"]
        b.handler = a.handler
        await http.post("/v1/completions", json=BODY)
        response = await http.get("/ready")
        assert response.status_code == ready
        assert len(response.json()["workers"]) == 2
        assert "127.0.0.1" not in response.text


async def test_one_response_does_not_end_the_health_endpoint() -> None:
    """After one 404 or 429 of `/health`, later probes read it again."""
    async with upstream(whole) as engine, forwarding(engine, clock=Clock()) as gateway:
        (worker,) = gateway.node.fleet.workers
        for status in (404, 429):
            engine.status = status
            await worker.backend.probe()
            assert worker.backend.failure is None
        engine.status = 500
        for _ in range(3):
            await worker.backend.probe()
        assert worker.backend.failure == "/health responded with status 500"
