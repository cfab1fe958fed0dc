"""Did the generator keep up? A run whose generator did not says nothing about the server."""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from types import TracebackType
from typing import Final, Self

from draftgate.loadgen.sending.clock import Clock
from draftgate.loadgen.types import ClientHealth, LoadRun, Record

TICK_S: Final = 0.01
"""How often the event loop is asked whether it answers: often enough to see stalls of the size that
the budget forbids, at 1 % of the cost of a thousand chunks a second."""


@dataclass(frozen=True, slots=True)
class Budget:
    """What a valid run may show of its own generator.

    Chosen against the tightest limit in common use, 450 ms to the first token (MLPerf LoadGen,
    llama2-70b interactive): the usual lag is at most 2 % of it, a single hiccup a quarter. A
    process above 90 % of a core queues its own events (M/D/1 at 0.9 waits 4.5 service times).

    Attributes:
        p99_lag_s, max_lag_s: sending behind schedule.
        loop_stall_s: longest time in which nothing was read or sent.
        cpu_share: of one core.
    """

    p99_lag_s: float = 0.010
    max_lag_s: float = 0.100
    loop_stall_s: float = 0.100
    cpu_share: float = 0.90


NEVER: Final = 1 << 30
"""Younger generations between two full collections of garbage: more than a run has."""


@contextmanager
def without_full_gc() -> Iterator[None]:
    """Keep Python from looking through everything there is for garbage, until left.

    Such a look stopped this process for 20 to 86 ms at 400 open streams (AMD EPYC Zen 4, Python
    3.11, 2026-11-21) and was what limited it. What becomes garbage soon is still collected; what a
    run keeps, it keeps to its end.
    """
    young, middle, old = gc.get_threshold()
    gc.set_threshold(young, middle, NEVER)
    try:
        yield
    finally:
        gc.set_threshold(young, middle, old)


class HealthMonitor:
    """Watches this process while a run goes on: CPU time, and whether the event loop answers."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self._stall_s = 0.0
        self._watch: asyncio.Task[None] | None = None
        self._started_s = 0.0
        self._cpu_s = 0.0

    def __enter__(self) -> Self:
        self._started_s, self._cpu_s = self._clock(), time.process_time()
        self._watch = asyncio.create_task(self._tick())
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._watch is not None:
            self._watch.cancel()

    def health(self, records: Sequence[Record]) -> ClientHealth:
        """Return how well the generator kept up so far, given the records of what it sent."""
        lags = sorted(lag_s(r) for record in records for r in record.requests) or [0.0]
        elapsed_s = max(self._clock() - self._started_s, 1e-9)
        return ClientHealth(
            max_lag_s=lags[-1],
            p99_lag_s=lags[round(0.99 * (len(lags) - 1))],
            cpu_share=(time.process_time() - self._cpu_s) / elapsed_s,
            loop_stall_s=self._stall_s,
        )

    async def _tick(self) -> None:
        while True:
            before_s = self._clock()
            await asyncio.sleep(TICK_S)
            self._stall_s = max(self._stall_s, self._clock() - before_s - TICK_S)


def of_processes(processes: Sequence[ClientHealth | None]) -> ClientHealth | None:
    """Return the health of a generator of several processes: it is as well as its worst one.

    None of `processes` died; None is returned if all of them did.
    """
    known = [health for health in processes if health is not None]
    if not known:
        return None
    return ClientHealth(
        max_lag_s=max(health.max_lag_s for health in known),
        p99_lag_s=max(health.p99_lag_s for health in known),
        cpu_share=max(health.cpu_share for health in known),
        loop_stall_s=max(health.loop_stall_s for health in known),
        processes=tuple(processes),
    )


def lag_s(record: Record) -> float:
    """Return how far behind schedule a request was sent by the generator's own fault.

    Setting up a connection is work of the network and the server, and does not count.
    """
    return max(0.0, record.sent_s - record.scheduled_s - record.connect_s)


def judge_health(run: LoadRun, budget: Budget | None = None) -> list[str]:
    """Return the reasons why a run is INVALID; none if it is valid.

    Raises:
        ValueError: the run carries no health, so that nothing can be said.
    """
    health, limits = run.health, budget or Budget()
    if health is None:
        raise ValueError("a run without health cannot be judged")
    reasons = list(run.lost)
    if run.interrupted:
        reasons.append("the run was interrupted before its plan was done")
    milliseconds = (
        ("p99 of the lag behind schedule", health.p99_lag_s, limits.p99_lag_s),
        ("largest lag behind schedule", health.max_lag_s, limits.max_lag_s),
        ("longest stall of the event loop", health.loop_stall_s, limits.loop_stall_s),
    )
    for name, value_s, limit_s in milliseconds:
        if value_s > limit_s:
            reasons.append(f"{name}: {value_s * 1e3:.1f} ms, allowed are {limit_s * 1e3:g} ms")
    if health.cpu_share > limits.cpu_share:
        share = f"{health.cpu_share:.0%} of a core, allowed are {limits.cpu_share:.0%}"
        reasons.append(f"CPU of the generator: {share}")
    return reasons
