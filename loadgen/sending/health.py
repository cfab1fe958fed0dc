"""Judges whether the load generator kept up. Otherwise a run does not measure the server."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Final

from draftgate.loadgen.measuring.metrics import percentile
from draftgate.loadgen.sending.client import Clock
from draftgate.loadgen.types import ClientHealth, LoadRun, Record

TICK_S: Final = 0.01
"""Interval of event loop probes. It is short enough to detect stalls that make a run invalid, at 1
% of the cost of a thousand chunks per second."""

MAX_P99_LAG_S: Final = 0.010
MAX_LAG_S: Final = 0.100
MAX_LOOP_STALL_S: Final = 0.100
MAX_CPU_SHARE: Final = 0.90
"""Limits for the health of a valid run. They follow from the tightest common limit, 450 ms to the
first token (MLPerf LoadGen, llama2-70b interactive). The usual lag is at most 2 % of that limit,
and a single stall a quarter. A process above 90 % of a core queues its own events (M/D/1 at 0.9
waits 4.5 service times)."""

NEVER: Final = 1 << 30
"""Collections of the younger generations between two full collections, more than in any run."""


@contextmanager
def without_full_gc() -> Iterator[None]:
    """Suspend full garbage collections.

    A full collection stopped this process for 20 to 86 ms at 400 open streams (AMD EPYC Zen 4,
    Python 3.11, 2026-11-21). Python still collects short-lived garbage.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


@contextmanager
def monitor_health(clock: Clock) -> Iterator[Callable[[Sequence[Record]], ClientHealth]]:
    """Monitor the CPU time and the event loop of this process.

    Yields a function that returns the health so far, given the records of the sent requests.
    """
    started_s, cpu_s, stall_s = clock(), time.process_time(), 0.0

    async def probe_loop() -> None:
        nonlocal stall_s
        while True:
            before_s = clock()
            await asyncio.sleep(TICK_S)
            stall_s = max(stall_s, clock() - before_s - TICK_S)

    def health(records: Sequence[Record]) -> ClientHealth:
        lags = sorted(lag_s(r) for record in records for r in record.http_records) or [0.0]
        return ClientHealth(
            max_lag_s=lags[-1],
            p99_lag_s=percentile(lags, 0.99),
            cpu_share=(time.process_time() - cpu_s) / max(clock() - started_s, 1e-9),
            loop_stall_s=stall_s,
        )

    probing = asyncio.create_task(probe_loop())
    try:
        yield health
    finally:
        probing.cancel()


def merge_health(processes: Sequence[ClientHealth | None]) -> ClientHealth | None:
    """Return the worst of each value over several processes.

    The health of a process that died is None. The result is None if all processes died.
    """
    known = [health for health in processes if health is not None]
    if not known:
        return None
    names = ("max_lag_s", "p99_lag_s", "cpu_share", "loop_stall_s")
    worst = {name: max(getattr(health, name) for health in known) for name in names}
    return ClientHealth(**worst, processes=tuple(processes))


def lag_s(record: Record) -> float:
    """Return how late the generator itself sent a request.

    The network and the server open a connection, so that time does not count.
    """
    return max(0.0, record.sent_s - record.scheduled_s - record.connect_s)


def invalid_reasons(run: LoadRun) -> list[str]:
    """Return why a run is INVALID, or nothing if the run is valid."""
    health = run.health
    if health is None:
        unknown = "the record of the run ends early, so the generator's health is unknown"
        return [*run.lost, unknown]
    reasons = list(run.lost)
    if run.interrupted:
        reasons.append("the run was interrupted before it was complete")
    for name, value_s, limit_s in (
        ("p99 of the lag", health.p99_lag_s, MAX_P99_LAG_S),
        ("largest lag", health.max_lag_s, MAX_LAG_S),
        ("longest stall of the event loop", health.loop_stall_s, MAX_LOOP_STALL_S),
    ):
        if value_s > limit_s:
            reasons.append(f"{name}: {value_s * 1e3:.1f} ms, limit {limit_s * 1e3:g} ms")
    if health.cpu_share > MAX_CPU_SHARE:
        limit = f"limit {MAX_CPU_SHARE:.0%}"
        reasons.append(f"CPU of the generator: {health.cpu_share:.0%} of a core, {limit}")
    return reasons
