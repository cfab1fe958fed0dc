"""Advice on the number of workers of a pool, which autoscalers follow.

    load   = largest of the signals                  a signal is a demand for workers
    fewest = ceil(load)                              with fewer workers, the pool is too busy
    most   = ceil(load / IDLE_SHARE)                 with more workers, the pool is too idle

The advice is the number of workers within these limits that is closest to the last advice. A load
that varies by less than their ratio therefore never changes the advice. Signals are means over
`MEAN_S`, and the advice falls only below the largest upper limit of the last `DOWN_S`. If requests
miss their targets, the upper limit replaces the lower one. More workers than that would not help.

Where streams move between workers (`rescheduling`), the free memory of all workers serves every
request, and a worker that should stop is empty within seconds. So less memory is kept free, and the
advice falls sooner (`WITH_MOVES`).

All signals are known to every gateway, except for its own queue and its own requests. Gateways
therefore advise different numbers only if their queues or their attainments differ. The largest
advice counts.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping, Sequence
from enum import StrEnum
from typing import Final

from draftgate.policies.types import WorkerLoad
from draftgate.policies.values import immutable

PRICE_TARGET: Final = 0.3
"""Mean price of a slot at five sixths of the highest load of a worker with decodes. The price is
the rate of tokens times the time that one more token takes, so it is proportional to the load.
(Chat on a simulated h100-8b, bench/results/scheduling.md, "Price and load", 2026-11-22.)"""

PROMPT_TARGET: Final = 0.7
"""Share of the time in which a worker computes prompts. Waits grow steeply above it. (Chosen, not
tuned, 2026-11-23.)"""

CAPACITY_TARGET: Final = 0.8
"""Share of the KV memory, and of the sequences, that a worker should use at most. The rest is for
sequences that grow and for bursts. (Chosen, not tuned, 2026-11-23.)"""

MOVES_CAPACITY_TARGET: Final = 0.9
"""`CAPACITY_TARGET` for the KV memory where streams move. Half of the reserve is for memory that is
free on one worker while another one lacks it. (Chosen, not tuned, 2026-11-30.)"""

IDLE_SHARE: Final = 0.7
"""Load of a worker, as a share of the targets, below which the pool has too many workers. Means
over `MEAN_S` vary less than this. (Chosen, not tuned, 2026-11-23.)"""

CLEAR_S: Final = 30.0
"""Seconds of queued work that justify twice the workers. (Chosen, not tuned, 2026-11-23.)"""

GOAL: Final = 0.9
"""Share of requests that should meet their targets, as in the goodput of DistServe."""

MEAN_S: Final = 30.0
"""Time constant of the means of all signals, in seconds. A worker takes about as long to load a
model, so a shorter burst is over before a further worker could help. (Chosen, not tuned,
2026-11-23.)"""

DOWN_S: Final = 300.0
"""Time in seconds for which fewer workers must suffice before the advice falls, as with the
autoscaler of Kubernetes."""

MOVES_DOWN_S: Final = 60.0
"""`DOWN_S` where streams move: twice the time in which a worker loads a model (`MEAN_S`), so that a
worker serves for longer than it takes to start. Without moves, a worker that should stop runs its
longest stream for minutes. (Chosen, not tuned, 2026-11-30.)"""


class ScalingReason(StrEnum):
    """The reason for the last change of the advice."""

    PRICE = "price"
    """Decode tokens fill the steps."""
    PROMPTS = "prompts"
    """Prompt tokens fill the steps."""
    MEMORY = "memory"
    """The KV memory is full."""
    SEQUENCES = "sequences"
    """The workers run almost as many sequences as they can."""
    QUEUE = "queue"
    """Requests wait at the gateway."""
    SLO = "slo"
    """Too many requests miss their targets, or are refused."""
    IDLE = "idle"
    """Fewer workers suffice."""
    START = "start"
    """The gateway has just started, so the advice is the present number of workers."""


@immutable
class DemandView:
    """A pool at one time, as a gateway sees it.

    Attributes:
        loads: the loads of the workers that stay, with the requests of all gateways.
        leaving: the loads of workers that are leaving. The others will get their streams.
        queued: requests in the gateway's queue.
        queue_s: their work in seconds of the pool, or 0 if unknown.
        attainment: share of the recent requests that met their targets, or None without any.
    """

    loads: Sequence[WorkerLoad]
    leaving: Sequence[WorkerLoad] = ()
    queued: int = 0
    queue_s: float = 0.0
    attainment: float | None = None


@immutable
class ScalingAdvice:
    """The number of workers that a pool should have.

    Attributes:
        workers: the number, at least 1.
        reason: the reason for its last change.
        load: the load in workers at that time.
    """

    workers: int
    reason: ScalingReason
    load: float


@immutable
class ScalingRules:
    """What the advice assumes about a pool.

    Attributes:
        memory_target: share of the KV memory that a worker should use at most.
        down_s: time in seconds for which fewer workers must suffice before the advice falls.
    """

    memory_target: float = CAPACITY_TARGET
    down_s: float = DOWN_S


WITHOUT_MOVES: Final = ScalingRules()
WITH_MOVES: Final = ScalingRules(MOVES_CAPACITY_TARGET, MOVES_DOWN_S)


def signals(view: DemandView, memory_target: float = CAPACITY_TARGET) -> dict[ScalingReason, float]:
    """Return the workers that each signal demands now, if at least one worker stays.

    Args:
        memory_target: `ScalingRules.memory_target`.
    """
    workers = len(view.loads)
    loads = [*view.loads, *view.leaving]
    demand = {
        ScalingReason.PRICE: sum(load.price for load in loads) / PRICE_TARGET,
        ScalingReason.PROMPTS: sum(load.prompt_tokens > 0 for load in loads) / PROMPT_TARGET,
        ScalingReason.MEMORY: _in_workers(
            [_used_tokens(load) for load in loads],
            [load.kv_total_tokens for load in view.loads],
            memory_target,
        ),
        ScalingReason.SEQUENCES: _in_workers(
            [load.running + load.waiting for load in loads if load.max_sequences],
            [load.max_sequences for load in view.loads],
            CAPACITY_TARGET,
        ),
        ScalingReason.QUEUE: 0.0,
    }
    if view.queued:
        more = workers * min(view.queue_s / CLEAR_S, 1.0)
        demand[ScalingReason.QUEUE] = workers + max(1.0, more)
    return demand


def _in_workers(used: Sequence[int], totals: Sequence[int], target: float) -> float:
    """Return the number of average workers that this use would fill to a share."""
    total = sum(totals)
    return sum(used) * len(totals) / (total * target) if total else 0.0


def _used_tokens(load: WorkerLoad) -> int:
    used_tokens = load.kv_total_tokens - load.kv_free_tokens
    # Prompts in the worker's queue will need memory too.
    return used_tokens + max(load.prompt_tokens, load.head_tokens)


class ScalingAdvisor:
    """The advice of a gateway, which changes as rarely as its limits allow."""

    def __init__(self, rules: ScalingRules = WITHOUT_MOVES) -> None:
        self._rules = rules
        self._advice: ScalingAdvice | None = None
        self._means: dict[ScalingReason, float] = {}
        self._since_s = self._at_s = 0.0
        self._most = deque[tuple[float, int]]()  # falling upper limits of `down_s` with their times

    def update(self, view: DemandView, now_s: float) -> ScalingAdvice | None:
        """Return the advice at a time, or None before the pool had a worker.

        Without a worker, the advice stays as it is.

        Args:
            now_s: a time that never decreases.
        """
        if not view.loads:
            return self._advice
        demand = signals(view, self._rules.memory_target)
        if self._advice is None:
            self._means, self._since_s = demand, now_s
            self._advice = ScalingAdvice(len(view.loads), ScalingReason.START, self._load)
        else:
            self._add(demand, now_s - self._at_s)
        self._at_s = now_s
        largest = self._largest_most(now_s)
        if now_s - self._since_s >= MEAN_S:
            self._raise(view.attainment)
        if now_s - self._since_s >= self._rules.down_s and largest < self._advice.workers:
            self._advice = ScalingAdvice(largest, ScalingReason.IDLE, self._load)
        return self._advice

    @property
    def _load(self) -> float:
        return max(self._means.values())

    def _raise(self, attainment: float | None) -> None:
        """Raise the advice to the lower limit."""
        assert self._advice is not None
        before, load = self._advice.workers, self._load
        fewest = math.ceil(load)
        if fewest > before:
            reason = max(self._means, key=lambda one: self._means[one])
            self._advice = ScalingAdvice(fewest, reason, load)
        elif attainment is not None and attainment < GOAL and _most(load) > before:
            self._advice = ScalingAdvice(_most(load), ScalingReason.SLO, load)

    def _add(self, demand: Mapping[ScalingReason, float], seconds: float) -> None:
        """Add the signals of a time to the means."""
        weight = -math.expm1(-seconds / MEAN_S)
        for reason, value in demand.items():
            self._means[reason] += weight * (value - self._means[reason])

    def _largest_most(self, now_s: float) -> int:
        """Add the present upper limit, and return the largest of the last `down_s`."""
        most = max(_most(self._load), 1)
        while self._most and self._most[-1][1] <= most:
            self._most.pop()
        self._most.append((now_s, most))
        while self._most[0][0] <= now_s - self._rules.down_s:
            self._most.popleft()
        return self._most[0][1]


class ServerAdvisor:
    """The advice on the number of servers of one model, which may be 0 if it is not used.

    While a server runs, the advice is that of `ScalingAdvisor`. A model without servers needs one
    as soon as a request waits for it.
    """

    def __init__(self, idle_s: float) -> None:
        """Start without advice.

        Args:
            idle_s: time without requests after which no server is needed in seconds, or 0 if at
                least one always is.
        """
        self._idle_s = idle_s
        self._used_s: float | None = None
        self._advisor = ScalingAdvisor()

    def update(self, view: DemandView, running: int, now_s: float) -> int:
        """Return the number of servers that the model should have at a time.

        Args:
            view: the servers of the model, and the requests that wait for it.
            running: requests for the model that run.
            now_s: a time that never decreases.
        """
        # The idle time of a server that runs at the start begins then.
        if view.queued or running or (self._used_s is None and view.loads):
            self._used_s = now_s
        advice = self._advisor.update(view, now_s)
        is_idle = self._used_s is None or now_s - self._used_s >= self._idle_s
        if self._idle_s and is_idle:
            self._advisor = ScalingAdvisor()  # the load of earlier servers says nothing later
            return 0
        return 1 if advice is None else max(advice.workers, 1)


def _most(load: float) -> int:
    return math.ceil(load / IDLE_SHARE)
