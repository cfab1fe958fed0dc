"""Forecast of a request's wait, and of the pool time that it takes.

    residence = prompt tokens x prompt_token_s + sequences x output tokens x tpot_s
    work      = residence / sequences that the pool runs concurrently
    wait      = time to drain the work ahead (`class_drain`) and the rest of a running request,
                less the work that free capacity takes immediately,
                or the time to compute all prompts ahead, if that is longer
    TTFT      = correction x wait + own prompt tokens x prompt_token_s

In a full pool, sequences end like a Poisson process, whatever the distribution of their lengths
(Palm, Khintchine: many independent renewals). A wait W for requests of w seconds each therefore has
a variance of about W x w. It exceeds W + z sqrt(W w) with the upper tail probability of z.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Final

from draftgate.policies.admission.class_drain import WHOLE, Drain
from draftgate.policies.admission.types import AdmissionView, Admitted, PoolView
from draftgate.policies.ordering.fair import PRESSING_SHARE
from draftgate.policies.types import WorkerLoad, WorkerSpeed
from draftgate.policies.values import immutable

Z_SURE: Final = 1.645
"""Certainty of the deadline of a new request: one wait in twenty is longer than predicted (95th
percentile of a normal error)."""

Z_LIKELY: Final = 0.674
"""Certainty of the deadline of a request that keeps its appointment: one wait in four is longer.
Few such requests find so much work ahead. 97 to 99% of all admitted requests still meet their
deadlines (simulated, tests/policies/overload_servers.py, 2026-11-21)."""

_FIRST_LESSONS: Final = 20
_LASTING_LESSONS: Final = 480
_MOST_SURPRISE: Final = 2.0
"""Gain of the correction. The n-th wait moves it by 1 / (20 + n) of its error, and by at least 1 /
500. A wait counts as at most twice its forecast. Each 3% of error moves an appointment a minute
ahead by 2 s, so the correction must change slowly. With a constant 1 / 33, clients could not
keep one appointment in four (simulated, tests/policies/overload_servers.py, 2026-11-21)."""

_MOST_CORRECTION: Final = 20.0
"""Largest correction factor, in either direction."""


@immutable
class WaitForecast:
    """The predicted wait of a request.

    Attributes:
        wait_s: seconds until it starts, or until the workers have computed the prompts ahead.
        place_s: the same for a request without a deadline.
        prompt_s: seconds to compute its own prompt.
        work_s: seconds of the whole pool that it takes, or 0 if unknown.
        grain_s: work of a typical waiting request, which sets the uncertainty of waits.
    """

    wait_s: float
    place_s: float
    prompt_s: float
    work_s: float
    grain_s: float

    @property
    def ttft_s(self) -> float:
        """Predicted seconds to the first token."""
        return self.wait_s + self.prompt_s

    def within_s(self, allowed_s: float, z: float) -> float:
        """Return the longest predicted wait that stays within a limit with the certainty of z.

        The wait solves `W + z sqrt(W x grain) = allowed` for W.
        """
        spread = z * math.sqrt(self.grain_s)
        root = (math.sqrt(spread * spread + 4.0 * max(allowed_s, 0.0)) - spread) / 2.0
        return root * root


def admit(view: AdmissionView, predicted: WaitForecast) -> Admitted:
    """Return the admission of a request."""
    reason = "capacity is free"
    if predicted.wait_s > 0:
        reason = f"{view.queue.length} requests wait; predicted wait {predicted.wait_s:.2f} s"
    ttft_s = predicted.wait_s + predicted.prompt_s
    return Admitted(predicted.wait_s, ttft_s, predicted.work_s, view.service, reason)


class WaitCorrection:
    """The learned factor by which waits exceed their forecasts.

    The factor moves by (waited - predicted) / (predicted + mean predicted). The weights depend only
    on predictions, so the factor settles where the mean wait is correct. A mean of logarithms would
    settle at 0.56 of that value, because short waits are exponential.

    Requests with a target overtake requests without one, whose waits therefore say little about the
    pool. Waits without a target count only while no requests with a target arrive.

    Attributes:
        factor: the factor by which forecasts are multiplied.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._log = 0.0
        self._mean_s = 0.0
        self._lessons = 0
        self._since_target = _FIRST_LESSONS

    def add_wait(self, predicted_s: float, waited_s: float, *, has_target: bool) -> None:
        """Learn from a wait that was predicted with this correction.

        Requests that were expected to start immediately contain no information about the queue.
        They are ignored.
        """
        self._since_target = 0 if has_target else self._since_target + 1
        if predicted_s <= 0.0 or 0 < self._since_target < _FIRST_LESSONS:
            return
        self._lessons = min(self._lessons + 1, _LASTING_LESSONS)
        step = 1.0 / (self._lessons + _FIRST_LESSONS)
        self._mean_s += step * (predicted_s - self._mean_s) if self._mean_s else predicted_s
        off = (max(waited_s, 0.0) - predicted_s) / (predicted_s + self._mean_s)
        moved = self._log + step * min(off, _MOST_SURPRISE)
        limit = math.log(_MOST_CORRECTION)
        self._log = min(max(moved, -limit), limit)
        self.factor = math.exp(self._log)


def pool_of(
    loads: Iterable[WorkerLoad], sequence_tokens: float = 0.0, share: float = 1.0
) -> PoolView:
    """Return several workers as one pool, with the mean speed of the workers that have run a step.

    Args:
        sequence_tokens: prompt and output tokens of a typical sequence, by which KV memory may
            limit the number of sequences. 0 ignores memory.
        share: this gateway's share of the sequences on the workers.
    """
    limits: list[float] = []
    running = prompt_tokens = timed = timed_prompts = 0
    tpot_s = prompt_token_s = sequence_s = 0.0
    for load in loads:
        limit = float(load.max_sequences)
        if sequence_tokens and load.kv_blocks_total:  # otherwise the memory is unknown
            limit = min(limit, max(load.kv_total_tokens / sequence_tokens, 1.0))
        limits.append(limit)
        running += load.running + load.waiting
        prompt_tokens += load.prompt_tokens
        speed = load.speed
        if speed.tpot_s > 0:
            timed += 1
            tpot_s += speed.tpot_s
            sequence_s += speed.sequence_s
            if speed.prompt_token_s > 0:
                timed_prompts += 1
                prompt_token_s += speed.prompt_token_s
    return PoolView(
        workers=len(limits),
        max_sequences=sum(limits) if all(limits) else 0.0,
        running=running,
        prompt_tokens=prompt_tokens,
        speed=WorkerSpeed(
            tpot_s / (timed or 1),
            prompt_token_s / (timed_prompts or 1),
            sequence_s / (timed or 1),
        ),
        share=share,
    )


def forecast_wait(
    view: AdmissionView, drain: Drain = WHOLE, correction: float = 1.0
) -> WaitForecast:
    """Return the predicted wait of a request.

    The wait is 0 if the capacity or the speed of the pool is unknown.

    Args:
        correction: factor by which waits exceed predictions (`WaitCorrection.factor`).
    """
    pool, queue = view.pool, view.queue
    prompt_s = view.prompt_tokens * pool.speed.prompt_token_s
    known = pool.max_sequences > 0 and pool.speed.tpot_s > 0
    own_s = work_s(pool, view.prompt_tokens, view.sequences * view.output_tokens)
    grain_s = own_s / view.sequences
    if queue.length and known:
        grain_s = queue.work_s * pool.share / queue.length
    first_s = (1.0 - max(pool.max_sequences - pool.running, 0.0)) * grain_s
    wait_s = place_s = 0.0
    if known:
        ahead_s = drained_s(view, drain, correction, queue.ahead_s)
        wait_s = place_s = max(ahead_s + correction * first_s, 0.0)
        if queue.place_s != queue.ahead_s:
            ahead_s = drained_s(view, drain, correction, queue.place_s)
            place_s = max(ahead_s + correction * first_s, 0.0)
    share_ahead = queue.ahead_s / queue.work_s if queue.work_s > 0 else 0.0
    prompts = pool.prompt_tokens + queue.prompt_tokens * share_ahead / pool.share
    prompts_s = prompts * pool.speed.prompt_token_s / max(pool.workers, 1)
    return WaitForecast(max(wait_s, correction * prompts_s), place_s, prompt_s, own_s, grain_s)


def work_s(pool: PoolView, prompt_tokens: int, output_tokens: float) -> float:
    """Return the seconds of the whole pool that some tokens take, or 0 if unknown."""
    speed = pool.speed
    if not (pool.max_sequences > 0 and speed.tpot_s > 0):
        return 0.0
    residence_s = prompt_tokens * speed.prompt_token_s + output_tokens * speed.tpot_s
    return residence_s / pool.max_sequences


def drained_s(
    view: AdmissionView,
    drain: Drain,
    correction: float,
    ahead_s: float,
    booked_s: tuple[float, float] = (0.0, 0.0),
) -> float:
    """Return the seconds that the waiting requests and bookings ahead of a request take.

    Args:
        ahead_s: work of the waiting requests ahead, in seconds.
        booked_s: work of bookings in higher-priority classes, and in the request's own class.
    """
    others_s = view.queue.ahead_s - view.queue.class_s
    better_s, own_s = booked_s
    target_s = view.service.ttft_s
    pressing_s = PRESSING_SHARE * (view.max_wait_s if target_s is None else target_s)
    own_s += max(ahead_s - others_s, 0.0)
    return drain.wait_s(correction * (others_s + better_s + own_s), correction * own_s, pressing_s)
