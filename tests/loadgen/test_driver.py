"""Tests of the driver: open and closed loops, interruptions, and the generator's health."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace

import pytest

from draftgate.loadgen.sending.client import OpenAIClient, open_session, start_clock
from draftgate.loadgen.sending.driver import TIMER_S, run_plan, send_on_schedule
from draftgate.loadgen.sending.health import (
    MAX_LAG_S,
    MAX_LOOP_STALL_S,
    NEVER,
    invalid_reasons,
    lag_s,
    monitor_health,
)
from draftgate.loadgen.types import ClientHealth, LoadRun, PlannedRequest, Record
from tests.loadgen.mock_server import Mock, Script, planned, question, serving

HEALTHY = ClientHealth(max_lag_s=0.002, p99_lag_s=0.001, cpu_share=0.2, loop_stall_s=0.003)


class ManualClock:
    """A clock that advances when a task sleeps."""

    def __init__(self) -> None:
        self.now_s = 0.0

    def __call__(self) -> float:
        return self.now_s

    async def sleep(self, seconds: float) -> None:
        self.now_s += seconds


async def start_times(instants, clock: ManualClock, busy_s=()):
    """Return when each request started, if starting the i-th takes busy_s[i] seconds."""
    started, busy = [], iter(busy_s)

    def send(planned: PlannedRequest, at_s: float) -> None:
        started.append((planned.index, at_s, clock()))
        clock.now_s += next(busy, 0.0)

    plan = (planned(i, at_s) for i, at_s in enumerate(instants))
    last_s = await send_on_schedule(plan, send, clock, clock.sleep)
    return started, last_s


async def test_requests_start_at_their_scheduled_times() -> None:
    """A request starts at its scheduled time, never before and at most a timer tick later."""
    instants = [0.0, 0.1, 0.1, 0.10004, 3.0]
    started, last_s = await start_times(instants, ManualClock())
    assert [index for index, _, _ in started] == [0, 1, 2, 3, 4]
    for (_, scheduled_s, at_s), instant in zip(started, instants, strict=True):
        assert scheduled_s == instant
        assert 0 <= at_s - instant <= TIMER_S
    assert last_s == 3.0


async def test_a_late_start_delays_no_other_request() -> None:
    """Late requests start immediately after a stall, and the next request is on time."""
    started, _ = await start_times([0.0, 0.1, 0.2, 0.3, 1.0], ManualClock(), busy_s=[0.25])
    late = [at_s - scheduled_s for _, scheduled_s, at_s in started]
    assert late == pytest.approx([0.0, 0.15, 0.05, 0.0, 0.0])


async def test_chunks_without_text_count_in_no_metric() -> None:
    """The record keeps the time of an empty chunk, but no metric counts the chunk."""
    plan = [planned(0, 0.0, Script(tokens=2, gap_s=0.05, role=True))]
    async with serving(Mock()) as url, open_session() as session:
        run = await run_plan(OpenAIClient(session, url, "mock"), plan)
    (one,) = run.records
    assert (one.verdict, len(one.chunks), len(one.empty_s)) == ("ok", 2, 1)
    assert one.empty_s[0] < one.chunks[0].at_s


async def test_an_open_loop_does_not_wait_for_responses() -> None:
    """Requests start on schedule while all earlier requests are open (no coordinated omission)."""
    started, over, all_started = [], [], asyncio.Event()

    def start(p: PlannedRequest) -> None:
        started.append((p.index, len(over)))
        if len(started) == 20:
            all_started.set()

    plan = [planned(i, 0.001 * i, Script(fault="silent")) for i in range(20)]
    async with serving(Mock()) as url, open_session() as session:
        running = asyncio.create_task(
            run_plan(
                OpenAIClient(session, url, "mock"), plan, on_start=start, on_record=over.append
            )
        )
        async with asyncio.timeout(60):
            await all_started.wait()
        running.cancel()
        run = await running
    assert started == [(i, 0) for i in range(20)]
    assert run.records == over
    assert {r.planned.index: r.scheduled_s for r in over} == {p.index: p.at_s for p in plan}
    assert run.duration_s >= max(r.end_s for r in over)


async def test_a_closed_loop_limits_open_requests() -> None:
    """At most `concurrency` requests are open, and each client continues after its response."""
    open_now, most = set(), []

    def start(p: PlannedRequest) -> None:
        open_now.add(p.index)
        most.append(len(open_now))

    plan = (planned(i, None) for i in range(12))
    async with serving(Mock()) as url, open_session() as session:
        run = await run_plan(
            OpenAIClient(session, url, "mock"),
            plan,
            concurrency=3,
            on_start=start,
            on_record=lambda r: open_now.discard(r.planned.index),
        )
    assert max(most) == 3
    assert sorted(r.planned.index for r in run.records) == list(range(12))
    assert {r.verdict for r in run.records} == {"ok"}
    assert run.scheduled_duration_s is None
    assert all(0 <= r.scheduled_s <= r.sent_s <= r.chunks[0].at_s for r in run.records)


async def test_crossed_streams_of_a_run_are_found() -> None:
    """The audit marks the second of two streams with the same id as crossed."""
    plan = [planned(i, None, Script(fault="same_id")) for i in range(2)]
    async with serving(Mock()) as url, open_session() as session:
        run = await run_plan(OpenAIClient(session, url, "mock"), plan, concurrency=1)
    assert [r.verdict for r in run.records] == ["ok", "crossed"]


@pytest.mark.parametrize("concurrency", [None, 2])
async def test_an_interrupted_run_keeps_its_records(concurrency: int | None) -> None:
    """A cancelled run keeps complete responses and records open requests as interrupted."""
    scripts = [Script(), Script(fault="stall"), Script(fault="stall"), Script()]
    instants = [None] * 4 if concurrency else [0.0, 0.0, 0.0, 60.0]
    plan = [planned(i, at_s, s) for i, (at_s, s) in enumerate(zip(instants, scripts, strict=True))]
    mock, complete = Mock(), asyncio.Event()
    async with serving(mock) as url, open_session() as session:
        running = asyncio.create_task(
            run_plan(
                OpenAIClient(session, url, "mock"),
                plan,
                concurrency=concurrency,
                on_record=lambda _: complete.set(),
            )
        )
        async with asyncio.timeout(60):
            await complete.wait()
            while len(mock.sent_s) < 3:  # noqa: ASYNC110 (the mock's own count)
                await asyncio.sleep(0)
        running.cancel()
        run = await running
    verdicts = {r.planned.index: r.verdict for r in run.records}
    assert verdicts == {0: "ok", 1: "interrupted", 2: "interrupted"}
    assert run.interrupted
    assert "interrupted" in invalid_reasons(run)[0]
    if concurrency is None:
        assert 0 < run.scheduled_duration_s < 60.0


@pytest.mark.parametrize(("at_s", "concurrency"), [(None, None), (0.0, 1)])
async def test_a_plan_must_fit_its_loop(at_s: float | None, concurrency: int | None) -> None:
    """The driver rejects an open loop without scheduled times and a closed loop with them."""
    async with open_session() as session:
        client = OpenAIClient(session, "", "mock")
        with pytest.raises(ExceptionGroup) as refused:
            await run_plan(client, [planned(0, at_s)], concurrency=concurrency)
    assert refused.group_contains(ValueError, match="instant")


async def test_a_stalled_loop_makes_the_run_invalid() -> None:
    """A blocked event loop exceeds the limits for lag and stall, and the run is INVALID."""

    def block(p: PlannedRequest) -> None:
        if p.index == 1:
            time.sleep(2 * MAX_LAG_S)

    plan = [planned(i, 0.02 * i) for i in range(10)]
    async with serving(Mock()) as url, open_session() as session:
        run = await run_plan(OpenAIClient(session, url, "mock"), plan, on_start=block)
    assert {r.verdict for r in run.records} == {"ok"}
    assert run.scheduled_duration_s == pytest.approx(0.18)
    assert run.health.max_lag_s > MAX_LAG_S
    assert run.health.loop_stall_s > MAX_LOOP_STALL_S
    reasons = " ".join(invalid_reasons(run))
    assert "largest lag" in reasons
    assert "stall of the event loop" in reasons


async def test_full_collections_are_suspended_during_a_run() -> None:
    """Full garbage collections are off during a run and on again afterwards."""
    before, during = gc.get_threshold(), []
    async with serving(Mock()) as url, open_session() as session:
        await run_plan(
            OpenAIClient(session, url, "mock"),
            [planned(0, 0.0)],
            on_start=lambda _: during.append(gc.get_threshold()),
        )
    assert during == [(*before[:2], NEVER)]
    assert gc.get_threshold() == before


async def test_cpu_time_of_the_process_is_counted() -> None:
    """The CPU share is CPU seconds over seconds of the run's clock."""
    clock = ManualClock()
    with monitor_health(clock) as health:
        used_s = time.process_time()
        while time.process_time() - used_s < 0.02:
            pass
        clock.now_s = 0.1
        assert 0.2 <= health([]).cpu_share <= 1.0


def test_lag_excludes_connecting() -> None:
    """The generator's lag excludes the time to open a connection, but includes earlier waiting."""
    record = Record(planned(0, 1.0), 1.0, sent_s=1.5, end_s=2.0, verdict="ok", connect_s=0.3)
    assert lag_s(record) == pytest.approx(0.2)
    assert lag_s(replace(record, connect_s=0.0)) == pytest.approx(0.5)


async def test_lags_include_failed_requests() -> None:
    """The maximum and the 99th percentile cover all sent requests."""
    records = [
        Record(PlannedRequest(i, 0.0, question()), 0.0, sent_s=i / 1000, end_s=1.0, verdict="cut")
        for i in range(201)
    ]
    with monitor_health(start_clock()) as health:
        found = health(records)
    assert (found.max_lag_s, found.p99_lag_s) == (0.2, 0.198)


@pytest.mark.parametrize(
    ("change", "reason"),
    [
        ({"p99_lag_s": 0.011}, "p99 of the lag: 11.0 ms, limit 10 ms"),
        ({"max_lag_s": 0.101}, "largest lag: 101.0 ms, limit 100 ms"),
        ({"loop_stall_s": 0.2}, "longest stall of the event loop: 200.0 ms, limit 100 ms"),
        ({"cpu_share": 0.95}, "CPU of the generator: 95% of a core, limit 90%"),
    ],
)
def test_each_health_limit_has_its_reason(change: dict, reason: str) -> None:
    """A run within all limits is valid, and each exceeded limit gives its own reason."""
    assert invalid_reasons(LoadRun({}, health=HEALTHY)) == []
    assert invalid_reasons(LoadRun({}, health=replace(HEALTHY, **change))) == [reason]


def test_a_run_without_health_is_invalid() -> None:
    """A run without measured health is INVALID."""
    assert "health is unknown" in invalid_reasons(LoadRun({}))[0]
