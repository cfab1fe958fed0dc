"""How long a request would wait, and how much of the pool it takes.

    residence = prompt tokens x prompt_token_s + sequences x output tokens x tpot_s    in seats
    work      = residence / seats                                                in the whole pool
    wait      = what is ahead, as its class drains (`class_drain`), and the work
                until a seat is free, less what free seats take at once
                or what the prompts ahead take to compute, if that is longer
    TTFT      = error x wait + own prompt tokens x prompt_token_s

Seats that are all busy become free like a Poisson process, whatever the times of service are (Palm,
Khintchine: many independent renewals), so a wait W for requests of w each has a variance of about
W x w, and is longer than W + z sqrt(W w) with the chance that z has.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final

from draftgate.policies.admission.class_drain import WHOLE, Drain
from draftgate.policies.admission.types import AdmissionView, Admitted, PoolView
from draftgate.policies.ordering.fair import PRESSING_SHARE
from draftgate.policies.types import WorkerLoad, WorkerSpeed

Z_SURE: Final = 1.645
"""One in twenty waits is longer: the 95th percentile of a normal error. With this chance a newcomer
is promised its deadline."""

Z_LIKELY: Final = 0.674
"""One in four waits is longer: who keeps an appointment is let in so far. Few find so much ahead:
97 to 99% of all who are let in still meet their deadline (simulated, tests/policies/overload.py,
2026-11-21)."""

_FIRST_LESSONS: Final = 20
_LASTING_LESSONS: Final = 480
_MOST_SURPRISE: Final = 2.0
"""The n-th wait moves the factor by 1 / (20 + n) of how far it was off, and by 1 / 500 in the end;
twice the forecast counts at most. Appointments a minute ahead are off by 2 s for each 3% of it, so
it has to be calm: with 1 / 33 throughout, one in four appointments could not be kept (simulated, as
above)."""

_MOST_ERROR: Final = 20.0
"""Forecasts are corrected by this factor at most, either way."""


@dataclass(frozen=True, slots=True)
class Forecast:
    """What is predicted of a request.

    Attributes:
        wait_s: until it starts, or until the prompts before its own are computed.
        place_s: the same if it had no deadline.
        prompt_s: of its own prompt.
        work_s: of the whole pool that it takes; 0 where nobody knows.
        grain_s: work of a typical request that waits, by which waits are uncertain.
    """

    wait_s: float
    place_s: float
    prompt_s: float
    work_s: float
    grain_s: float

    @property
    def ttft_s(self) -> float:
        """Seconds to its first token."""
        return self.wait_s + self.prompt_s

    def within_s(self, allowed_s: float, z: float) -> float:
        """Return the longest predicted wait that is within what is allowed, with the chance z has.

        The W for which `W + z sqrt(W x grain) = allowed`.
        """
        spread = z * math.sqrt(self.grain_s)
        root = (math.sqrt(spread * spread + 4.0 * max(allowed_s, 0.0)) - spread) / 2.0
        return root * root


def admitted(view: AdmissionView, predicted: Forecast) -> Admitted:
    """Let a request in of which this is predicted."""
    reason = "there is room"
    if predicted.wait_s > 0:
        reason = f"{view.queue.length} wait; a wait of {predicted.wait_s:.2f} s is predicted"
    return Admitted(predicted.wait_s, predicted.ttft_s, predicted.work_s, view.service, reason)


class WaitError:
    """How much longer waits are than predicted: a running factor.

    It moves by (waited - predicted) / (predicted + mean predicted). The weights depend only on
    predictions, so the factor settles where waits are right in the mean. A mean of logarithms would
    settle at 0.56 of that, because short waits are exponential.

    Requests without a target are let past by those with one, which says nothing about the pool:
    they teach only where no others do.
    """

    def __init__(self) -> None:
        """Believe forecasts."""
        self._log = 0.0
        self._mean_s = 0.0
        self._lessons = 0
        self._since_target = _FIRST_LESSONS

    @property
    def factor(self) -> float:
        """By what a forecast has to be multiplied."""
        return math.exp(self._log)

    def learn(self, predicted_s: float, waited_s: float, *, has_target: bool) -> None:
        """Learn how long somebody waited for whom a wait was predicted, this factor included.

        Nothing is learned of those who were to start at once: they say nothing about the queue.
        """
        self._since_target = 0 if has_target else self._since_target + 1
        if predicted_s <= 0.0 or 0 < self._since_target < _FIRST_LESSONS:
            return
        self._lessons = min(self._lessons + 1, _LASTING_LESSONS)
        step = 1.0 / (self._lessons + _FIRST_LESSONS)
        self._mean_s += step * (predicted_s - self._mean_s) if self._mean_s else predicted_s
        off = (max(waited_s, 0.0) - predicted_s) / (predicted_s + self._mean_s)
        moved = self._log + step * min(off, _MOST_SURPRISE)
        self._log = min(max(moved, -math.log(_MOST_ERROR)), math.log(_MOST_ERROR))


def pool_of(loads: Iterable[WorkerLoad], sequence_tokens: float = 0.0) -> PoolView:
    """Return several workers as one pool; means are of those that have run something.

    Args:
        sequence_tokens: prompt and output of a typical sequence: KV memory may hold fewer of them
            than there are seats; 0 leaves it out.
    """
    workers = list(loads)
    seats = [_seats(load, sequence_tokens) for load in workers]
    speeds = [load.speed for load in workers if load.speed.tpot_s > 0]
    return PoolView(
        workers=len(workers),
        max_sequences=sum(seats) if all(seats) else 0.0,
        running=sum(load.running + load.waiting for load in workers),
        prompt_tokens=sum(load.prompt_tokens for load in workers),
        speed=WorkerSpeed(
            _mean([speed.tpot_s for speed in speeds]),
            _mean([speed.prompt_token_s for speed in speeds if speed.prompt_token_s > 0]),
            _mean([speed.sequence_s for speed in speeds]),
        ),
    )


def forecast(view: AdmissionView, drain: Drain = WHOLE, error: float = 1.0) -> Forecast:
    """Return what is predicted of a request; its wait is 0 where nobody knows seats or speed.

    Args:
        error: by which waits were longer than predicted (`WaitError.factor`).
    """
    pool, queue = view.pool, view.queue
    prompt_s = view.prompt_tokens * pool.speed.prompt_token_s
    known = pool.max_sequences > 0 and pool.speed.tpot_s > 0
    own_s = work_s(pool, view.prompt_tokens, view.sequences * view.output_tokens)
    grain_s = queue.work_s / queue.length if queue.length and known else own_s / view.sequences
    first_s = (1.0 - max(pool.max_sequences - pool.running, 0.0)) * grain_s
    wait_s, place_s = (
        max(drained_s(view, drain, error, before_s) + error * first_s, 0.0) if known else 0.0
        for before_s in (queue.ahead_s, queue.place_s)
    )
    share_ahead = queue.ahead_s / queue.work_s if queue.work_s > 0 else 0.0
    prompts = pool.prompt_tokens + queue.prompt_tokens * share_ahead
    prompts_s = prompts * pool.speed.prompt_token_s / max(pool.workers, 1)
    return Forecast(max(wait_s, error * prompts_s), place_s, prompt_s, own_s, grain_s)


def work_s(pool: PoolView, prompt_tokens: int, output_tokens: float) -> float:
    """Return the seconds of a whole pool that some tokens take; 0 where nobody knows."""
    speed = pool.speed
    if not (pool.max_sequences > 0 and speed.tpot_s > 0):
        return 0.0
    return (
        prompt_tokens * speed.prompt_token_s + output_tokens * speed.tpot_s
    ) / pool.max_sequences


def drained_s(
    view: AdmissionView,
    drain: Drain,
    error: float,
    before_s: float,
    expected_s: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return how long what waits before a request takes, and those who are expected.

    Args:
        expected_s: those of better classes, and those of its own.
    """
    others_s = view.queue.ahead_s - view.queue.class_s
    better_s, own_s = expected_s
    target_s = view.service.ttft_s
    pressing_s = PRESSING_SHARE * (view.max_wait_s if target_s is None else target_s)
    own_s += max(before_s - others_s, 0.0)
    return drain.wait_s(error * (others_s + better_s + own_s), error * own_s, pressing_s)


def _seats(load: WorkerLoad, sequence_tokens: float) -> float:
    if not sequence_tokens or not load.kv_blocks_total:  # nobody knows the memory
        return float(load.max_sequences)
    in_memory = load.kv_blocks_total * load.kv_block_tokens / sequence_tokens
    return min(float(load.max_sequences), max(in_memory, 1.0))


def _mean(values: list[float]) -> float:
    return sum(values) / len(values) if values else 0.0
