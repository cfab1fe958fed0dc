"""What the live page draws: a sample of the node each second, the last minutes of them kept."""

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
"""Samples that are kept, five minutes: 100 KB for a page that opens."""

RATE_S: Final = 5
"""Rates are means of so many seconds: shorter ones flicker where requests take a second."""


class Sample(msgspec.Struct, frozen=True):
    """A node at one instant.

    Of several workers counts are summed and price and acceptance are means; broken ones are left
    out.

    Attributes:
        at_s: Unix time.
        price: expected tokens a draft slot must promise.
        chosen_k: mean draft tokens of a step, of the last minute's requests; None without one.
        acceptance: running chance that a draft token is accepted.
        running, waiting: sequences in the workers' batches, and queued for them.
        queued: requests that wait in the gateway.
        kv_usage: share of the KV blocks in use, 0 to 1.
        ttft_s, tpot_s: of the last minute's requests; None where there was none.
        requests_per_s: requests that ended, refused ones too, over the last `RATE_S` seconds.
        tokens_per_s: tokens generated, over the same.
        workers: how many are well.
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
    """Samples of a node, as JSON, numbered from 1. Use on the event loop's thread."""

    def __init__(
        self,
        loads: Loads,
        recent: Recent,
        queued: Callable[[], int] = lambda: 0,
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Begin with no samples.

        Args:
            queued: how many requests wait in the gateway.
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
        """Take a sample; without a worker that is well there is nothing to take."""
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
        """End every reader: the node stops."""
        self._closed = True
        self._wake()

    async def after(self, number: int) -> tuple[int, list[bytes]]:
        """Wait for samples behind a number; return the last one's number, and all kept ones.

        Nothing is returned once the samples have ended. A reader that fell further behind than
        what is kept misses some.
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
