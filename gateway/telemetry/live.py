"""The samples that the live page draws: one each second, of which the last minutes are kept."""

from __future__ import annotations

import asyncio
import time
from collections import deque
from collections.abc import Callable
from statistics import fmean
from typing import Final

import msgspec

from draftgate.gateway.telemetry.metrics import Loads
from draftgate.gateway.telemetry.recent import Percentiles, Recent

SAMPLE_S: Final = 1.0

KEPT: Final = 300
"""Samples that are kept, for five minutes; a page that opens loads 100 KB."""

RATE_S: Final = 5
"""Window of the rates; over a shorter one they flicker when requests take about a second."""


class Sample(msgspec.Struct, frozen=True):
    """The state of a node at one instant.

    Counts are summed over the workers, price and acceptance are averaged. Failed workers are left
    out.

    Attributes:
        at_s: Unix time.
        price: the survival that makes a draft slot worth verifying.
        chosen_k: mean draft tokens per step over the last minute's requests; None without one.
        acceptance: running share of draft tokens that are accepted.
        running, waiting: sequences in the workers' batches, and in their queues.
        queued: requests in the gateway's queue.
        kv_usage: share of the KV blocks in use, 0 to 1.
        ttft_s, tpot_s: percentiles over the last minute's requests; None without one.
        requests_per_s: requests that ended, including refused ones, over the last `RATE_S` seconds.
        tokens_per_s: tokens generated over the same time.
        workers: number of workers that have not failed.
    """

    at_s: float
    price: float
    chosen_k: float | None
    acceptance: float
    running: int
    waiting: int
    queued: int
    kv_usage: float
    ttft_s: Percentiles | None
    tpot_s: Percentiles | None
    requests_per_s: float
    tokens_per_s: float
    workers: int


class Live:
    """The samples of a node as JSON, numbered from 1. Use on the event loop's thread."""

    def __init__(
        self,
        loads: Loads,
        recent: Recent,
        queued: Callable[[], int] = lambda: 0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Start without samples.

        Args:
            loads: the loads of the workers.
            recent: the requests of the last minute.
            queued: returns the number of requests in the gateway's queue.
            now_s: the clock, in Unix time.
        """
        self._loads = loads
        self._recent = recent
        self._queued = queued
        self._now_s = now_s
        self._samples: deque[bytes] = deque(maxlen=KEPT)
        self._totals: deque[tuple[float, int, int]] = deque(maxlen=RATE_S + 1)
        self._taken = 0
        self._closed = False
        self._changed = asyncio.Event()

    def take(self) -> None:
        """Take a sample, unless all workers have failed."""
        sample = self._sample()
        if sample is None:
            return
        self._samples.append(msgspec.json.encode(sample))
        self._taken += 1
        self._wake()

    async def run(self) -> None:
        """Take a sample each second, until cancelled."""
        while True:
            self.take()
            await asyncio.sleep(SAMPLE_S)

    def close(self) -> None:
        """End the streams of all readers."""
        self._closed = True
        self._wake()

    async def after(self, number: int) -> tuple[int, list[bytes]]:
        """Wait for samples after a number; return the number of the last one, and their JSON.

        The list is empty once the samples have been closed. A reader that fell behind by more
        than `KEPT` samples misses some.
        """
        while self._taken <= number and not self._closed:
            await self._changed.wait()
        if self._closed:
            return number, []
        new = min(self._taken - number, len(self._samples))
        return self._taken, list(self._samples)[len(self._samples) - new :]

    def _wake(self) -> None:
        changed, self._changed = self._changed, asyncio.Event()
        changed.set()

    def _sample(self) -> Sample | None:
        loads = [load for load in self._loads() if load is not None]
        if not loads:
            return None
        now_s, recent = self._now_s(), self._recent
        self._totals.append((now_s, recent.requests, recent.tokens))
        then_s, requests, tokens = self._totals[0]
        span_s = max(now_s - then_s, SAMPLE_S)
        blocks = sum(load.kv_blocks_total for load in loads)
        return Sample(
            at_s=now_s,
            price=fmean(load.price for load in loads),
            chosen_k=recent.chosen_k(),
            acceptance=fmean(load.acceptance for load in loads),
            running=sum(load.running for load in loads),
            waiting=sum(load.waiting for load in loads),
            queued=self._queued(),
            kv_usage=1 - sum(load.kv_blocks_free for load in loads) / blocks if blocks else 0.0,
            ttft_s=recent.ttft_s(),
            tpot_s=recent.tpot_s(),
            requests_per_s=(recent.requests - requests) / span_s,
            tokens_per_s=(recent.tokens - tokens) / span_s,
            workers=len(loads),
        )
