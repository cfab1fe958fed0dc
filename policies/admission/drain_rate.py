"""The speed at which the pool works off its queue, relative to the forecast.

While requests wait without a break, the pool is full. The work that leaves the queue is then the
work that the pool does:

    drained = queued at the last decision + admitted then - queued now
    factor  = seconds / drained, each summed over the intervals between decisions

Other gateways' requests use the rest of the pool meanwhile, so the work of the whole pool is this
gateway's work divided by its share of the running sequences.

Intervals that begin with an empty queue do not count. An interval that ends with an empty queue
counts at most the predicted time. Without these intervals, the factor would be 10% too large,
because a queue empties when requests are short.

A wait of a few requests contains constant parts, such as the rest of a running request. Their share
of an appointment minutes ahead is much smaller, so `WaitCorrection` cannot predict appointments.
"""

from __future__ import annotations

import math
from typing import Final

from draftgate.policies.admission.types import AdmissionView

_MEMORY_S: Final = 120.0
"""Time constant of the sums, in seconds of a full pool. A pool of 16 sequences ends about 600
requests in this time, whose mean length is known to about 3%. (Chosen, not tuned, 2026-11-23.)"""

PRIOR_S: Final = 2.0
"""Weight of the forecast itself, in seconds of a full pool. (Chosen, not tuned, 2026-11-23.)"""

MOST_FACTOR: Final = 20.0
"""Largest factor, in either direction."""


SMOOTHING_S: Final = 30.0
"""Longest time constant of the factor, in seconds of a full pool. Each request moves the estimate
by about 0.3%. Without smoothing, that would move an appointment 15 minutes ahead by 3 s, and its
neighbours would return at the same time. (Chosen, not tuned, 2026-11-23.)"""


class DrainRate:
    """The learned seconds that the pool needs for a second of predicted work.

    Attributes:
        factor: the factor by which predicted work is multiplied.
    """

    def __init__(self) -> None:
        self.factor = 1.0
        self._seconds = self._drained_s = PRIOR_S
        self._at_s = 0.0
        self._queued_s = 0.0
        self._workers = 0

    def observe(self, view: AdmissionView, now_s: float) -> None:
        """Learn from the queue before a decision."""
        queued_s, workers = view.queue.work_s * view.pool.share, view.pool.workers
        if self._queued_s > 0.0 and workers == self._workers:
            elapsed_s = now_s - self._at_s
            drained_s = (self._queued_s - queued_s) / view.pool.share
            if queued_s <= 0.0:  # the pool may have been idle at the end
                elapsed_s = min(elapsed_s, self.factor * drained_s)
            kept = math.exp(-elapsed_s / _MEMORY_S)
            self._seconds = self._seconds * kept + elapsed_s
            self._drained_s = self._drained_s * kept + drained_s
            found = self._seconds / max(self._drained_s, self._seconds / MOST_FACTOR)
            # A first estimate counts immediately, because no appointment is far ahead yet.
            weight = elapsed_s / min(self._seconds / 2.0, SMOOTHING_S)
            self.factor += min(weight, 1.0) * (max(found, 1.0 / MOST_FACTOR) - self.factor)
        self._at_s, self._queued_s, self._workers = now_s, queued_s, workers

    def admit(self, work_s: float) -> None:
        """Add the work of a request that the last observation does not contain."""
        if self._queued_s > 0.0:  # otherwise it may start immediately in a pool that is not full
            self._queued_s += work_s
