"""The data of the live page, with samples and values of the last minute's requests.

The node takes a sample each second, and keeps the samples of the last minutes for new pages. If a
node has several processes, a sample includes the activity of all of them.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections import deque
from collections.abc import Callable, Sequence
from statistics import fmean
from typing import Final, Generic, TypeVar

import msgspec

from draftgate.backends.types import SpeculationOutcome
from draftgate.gateway.telemetry.recent_drafts import (
    DraftSums,
    DraftTimes,
    RecentDrafts,
    recent_drafts,
)
from draftgate.policies.scaling import ScalingAdvice, ScalingReason
from draftgate.policies.types import WorkerLoad

Loads = Callable[[], Sequence[WorkerLoad | None]]
"""A function that returns the load of every worker in order, or None for a failed worker. The
result is empty before the start."""

WINDOW_S: Final = 60.0
"""Age in seconds at which values are dropped."""

MOST_KEPT: Final = 2048
"""Maximum values of each kind. Sorting them takes less than 1 ms."""

LEAST_JUDGED: Final = 20
"""Requests from which an attainment is computed. A single request of fewer would change it by more
than 5%. (Chosen, not tuned, 2026-11-23.)"""


class LatencyPercentiles(msgspec.Struct, frozen=True):
    """Nearest-rank percentiles, in seconds."""

    p50: float
    p90: float
    p99: float


T = TypeVar("T")


class _Window(Generic[T]):
    """The values of the last `WINDOW_S` seconds, at most `MOST_KEPT`."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._values: deque[tuple[float, T]] = deque(maxlen=MOST_KEPT)

    def add(self, value: T) -> None:
        """Add a value at the present time."""
        self._values.append((self._clock(), value))

    def values(self) -> list[T]:
        """Drop old values and return the remaining values, oldest first."""
        oldest_s = self._clock() - WINDOW_S
        while self._values and self._values[0][0] < oldest_s:
            self._values.popleft()
        return [value for _, value in self._values]


def percentiles(values: Sequence[float]) -> LatencyPercentiles | None:
    """Return the nearest-rank percentiles of some values, or None without values."""
    if not values:
        return None
    ordered = sorted(values)
    ranks = (math.ceil(share * len(ordered)) - 1 for share in (0.5, 0.9, 0.99))
    return LatencyPercentiles(*(ordered[rank] for rank in ranks))


class Recent:
    """Values of the last minute's requests, in bounded memory.

    Use the object only on the thread of the event loop.

    Attributes:
        requests: number of requests that have ended since the start.
        tokens: number of tokens generated since the start. Callers increase it.
        draft_times: the time that drafts saved in the last minutes.
    """

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        """Start empty.

        Args:
            clock: a clock that returns seconds from any origin.
        """
        self.requests = 0
        self.tokens = 0
        self.draft_times = DraftTimes(clock)
        self._ttft_s = _Window[float](clock)
        self._tpot_s = _Window[float](clock)
        self._steps = _Window[tuple[int, int]](clock)  # decode steps, and their drafted tokens
        self._met = _Window[bool](clock)

    def add_ttft(self, seconds: float) -> None:
        """Add a time to first token."""
        self._ttft_s.add(seconds)

    def add_ended(self, tpot_s: float | None, tokens: int, outcome: SpeculationOutcome) -> None:
        """Add the TPOT, output tokens and speculation outcome of an ended request."""
        self.requests += 1
        if tpot_s is not None:
            self._tpot_s.add(tpot_s)
        # Each step adds the accepted tokens and one token of the target.
        steps = tokens - outcome.num_accepted_tokens
        if steps > 0:
            self._steps.add((steps, outcome.num_drafted_tokens))

    def add_judged(self, *, met: bool) -> None:
        """Add whether a request with latency targets met them, or False for a refused request."""
        self._met.add(met)

    def attainment(self) -> float | None:
        """Return the share of requests that met their targets, or None for too few requests."""
        found = self._met.values()
        return fmean(found) if len(found) >= LEAST_JUDGED else None

    def ttft_s(self) -> list[float]:
        """Return the times to first token."""
        return self._ttft_s.values()

    def tpot_s(self) -> list[float]:
        """Return the TPOT of the requests."""
        return self._tpot_s.values()

    def steps(self) -> tuple[int, int]:
        """Return the numbers of decode steps, and of their draft tokens, of ended requests."""
        found = self._steps.values()
        return sum(steps for steps, _ in found), sum(drafted for _, drafted in found)


SAMPLE_S: Final = 1.0

KEPT: Final = 300
"""Maximum samples, which cover five minutes. A page that opens loads 100 KB."""

RATE_S: Final = 5
"""Window of the rates in seconds. A shorter window flickers with requests of about a second."""


class Activity(msgspec.Struct, frozen=True, array_like=True):
    """The requests of one process for one model, as they count in a sample.

    Attributes:
        queued: requests in its queue.
        requests_per_s, tokens_per_s: rates over `RATE_S` seconds.
        steps, drafted_tokens: decode steps of the last minute's requests, and their draft tokens.
        ttft_s, tpot_s: values of the last minute's requests.
        desired_workers, scaling_reason: its scaling advice, or 0 and an empty text without advice.
        model: name of the model.
        drafts: the time that drafts saved in the last minutes.
    """

    queued: int = 0
    requests_per_s: float = 0.0
    tokens_per_s: float = 0.0
    steps: int = 0
    drafted_tokens: int = 0
    ttft_s: list[float] = []
    tpot_s: list[float] = []
    desired_workers: int = 0
    scaling_reason: str = ""
    model: str = ""
    drafts: DraftSums = {}


class NodeSample(msgspec.Struct, frozen=True):
    """The state of a node at one time.

    Counts are sums over the workers, while price and acceptance are means over the workers that
    draft. Failed workers are excluded. Figures of requests cover all processes of the node.

    Attributes:
        at_s: Unix time.
        price: the survival that makes a draft slot worth verifying, or None if no worker reports
            drafts.
        chosen_k: mean draft tokens per step over the last minute's requests, or None without any,
            or if no worker reports drafts.
        acceptance: running share of draft tokens that are accepted, or None if no worker reports
            drafts.
        running, waiting: sequences in the workers' batches and in their queues.
        queued: requests in the gateway's queue.
        kv_usage: share of the KV blocks in use, 0 to 1, or None if no worker reports them.
        ttft_s, tpot_s: percentiles over the last minute's requests, or None without any.
        requests_per_s: rate of ended requests, including rejected requests, over `RATE_S` seconds.
        tokens_per_s: rate of generated tokens over the same time.
        workers: number of workers that have not failed.
        desired_workers: number of workers that the pool should have (`policies.scaling`).
        scaling_reason: the reason for the last change of this number.
    """

    at_s: float
    price: float | None
    chosen_k: float | None
    acceptance: float | None
    running: int
    waiting: int
    queued: int
    kv_usage: float | None
    ttft_s: LatencyPercentiles | None
    tpot_s: LatencyPercentiles | None
    requests_per_s: float
    tokens_per_s: float
    workers: int
    desired_workers: int
    scaling_reason: str


def node_sample(
    at_s: float, loads: Sequence[WorkerLoad], activities: Sequence[Activity]
) -> NodeSample:
    """Return the sample of a node.

    Args:
        loads: the loads of the workers that have not failed, at least one.
        activities: the activity of each process of the node for each model, at least one.
    """
    blocks = sum(load.kv_blocks_total for load in loads)
    drafting = [load for load in loads if load.proposers]
    steps = sum(one.steps for one in activities)
    drafted = sum(one.drafted_tokens for one in activities)
    advised = max(activities, key=lambda one: one.desired_workers)
    desired = dict[str, int]()  # by model
    for one in activities:
        desired[one.model] = max(desired.get(one.model, 0), one.desired_workers)
    return NodeSample(
        at_s=at_s,
        price=fmean(load.price for load in drafting) if drafting else None,
        chosen_k=drafted / steps if drafting and steps else None,
        acceptance=fmean(load.acceptance for load in drafting) if drafting else None,
        running=sum(load.running for load in loads),
        waiting=sum(load.waiting for load in loads),
        queued=sum(one.queued for one in activities),
        kv_usage=1 - sum(load.kv_blocks_free for load in loads) / blocks if blocks else None,
        ttft_s=percentiles([value for one in activities for value in one.ttft_s]),
        tpot_s=percentiles([value for one in activities for value in one.tpot_s]),
        requests_per_s=sum(one.requests_per_s for one in activities),
        tokens_per_s=sum(one.tokens_per_s for one in activities),
        workers=len(loads),
        desired_workers=sum(desired.values()) if all(desired.values()) else len(loads),
        scaling_reason=advised.scaling_reason or ScalingReason.START.value,
    )


class ActivityMeter:
    """The measurement of a process's activity for one model, once a second."""

    def __init__(
        self,
        recent: Recent,
        queued: Callable[[], int] = lambda: 0,
        advice: Callable[[], ScalingAdvice | None] = lambda: None,
        model: Callable[[], str] = lambda: "",
    ) -> None:
        """Start without rates.

        Args:
            recent: the requests of the last minute.
            queued: a function that returns the number of requests in the gateway's queue.
            advice: a function that returns the scaling advice.
            model: a function that returns the name of the model.
        """
        self._recent = recent
        self._queued = queued
        self._advice = advice
        self._model = model
        self._totals: deque[tuple[float, int, int]] = deque(maxlen=RATE_S + 1)

    def measure(self, now_s: float) -> Activity:
        """Return the activity, with rates since earlier measurements."""
        recent = self._recent
        self._totals.append((now_s, recent.requests, recent.tokens))
        then_s, requests, tokens = self._totals[0]
        span_s = max(now_s - then_s, SAMPLE_S)
        advice = self._advice()
        return Activity(
            self._queued(),
            (recent.requests - requests) / span_s,
            (recent.tokens - tokens) / span_s,
            *recent.steps(),
            recent.ttft_s(),
            recent.tpot_s(),
            0 if advice is None else advice.workers,
            "" if advice is None else advice.reason.value,
            self._model(),
            recent.draft_times.sums(),
        )


class Live:
    """The samples of a node as JSON, numbered from 1.

    Use the object only on the thread of the event loop.

    Attributes:
        activities: the requests of this process at the last sample, by model.
    """

    def __init__(
        self,
        loads: Loads,
        meters: Callable[[], Sequence[ActivityMeter]],
        now_s: Callable[[], float] = time.time,
    ) -> None:
        """Start without samples.

        Args:
            loads: a function that returns the loads of the workers.
            meters: a function that returns the meter of each model.
            now_s: the clock, in Unix time.
        """
        self.activities: list[Activity] = []
        self._others: Sequence[Activity] = ()
        self._loads = loads
        self._meters = meters
        self._now_s = now_s
        self._samples: deque[bytes] = deque(maxlen=KEPT)
        self._taken = 0
        self._closed = False
        self._changed = asyncio.Event()

    def take(self, others: Sequence[Activity] = ()) -> None:
        """Take a sample, unless all workers have failed.

        Args:
            others: the activities of the other processes of the node.
        """
        now_s = self._now_s()
        self.activities = [meter.measure(now_s) for meter in self._meters()]
        self._others = others
        loads = [load for load in self._loads() if load is not None]
        if not loads:
            return
        sample = node_sample(now_s, loads, [*self.activities, *others])
        self._samples.append(msgspec.json.encode(sample))
        self._taken += 1
        self._wake()

    def recent_drafts(self, tenant: str | None) -> RecentDrafts:
        """Return what drafts brought a tenant, or all tenants, up to the last sample."""
        activities = [*self.activities, *self._others]
        return recent_drafts((one.drafts for one in activities), tenant)

    def close(self) -> None:
        """End the streams of all readers."""
        self._closed = True
        self._wake()

    async def after(self, number: int) -> tuple[int, list[bytes]]:
        """Wait for samples after a number, and return the last number with their JSON.

        The list is empty once the samples have been closed. A reader that is more than `KEPT`
        samples late misses some.
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
