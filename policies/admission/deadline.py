"""Admission by `deadline`, the default policy. It refuses late requests with a time to return."""

from __future__ import annotations

import math
from functools import partial
from typing import Final

from draftgate.policies.admission.appointments import Appointments, BookedWork, Booking
from draftgate.policies.admission.class_drain import ClassFlows, Drain
from draftgate.policies.admission.refusals import not_in_time, queue_full, shed, times_out, too_slow
from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.admission.wait_forecast import (
    Z_LIKELY,
    Z_SURE,
    WaitCorrection,
    WaitForecast,
    admit,
    drained_s,
    forecast_wait,
)
from draftgate.policies.values import immutable, replace

_TARGET_SHARE: Final = 0.35
"""Predicted wait at an appointment, as a share of the longest wait that surely meets the deadline.
The rest is a margin for clients that find more work ahead than predicted. With 0.5, three times the
capacity by five tenants had 2% less goodput (simulated, tests/policies/overload_servers.py, three
seeds, 2026-11-23)."""

LOW_WATER_SHARE: Final = 0.25
"""Low water mark, as a share of the longest sure wait. While the waiting requests take less time,
the pool admits any request, despite bookings. So the pool is never idle because of clients that
may not return. If no client returns, goodput at three times the capacity is within 4% of its
peak (simulated, tests/policies/overload_servers.py, 2026-11-21)."""

_PACE: Final = 0.95
"""Share of the pool's time for appointments.

The rest is for clients that the pool refuses again. When no new requests arrive, the pool may be
idle for this rest. With 0.97 and a `_TARGET_SHARE` of 0.5, five tenants lost goodput (simulated,
tests/policies/overload_servers.py, one run, 2026-11-23)."""

LEAST_RETRY_S: Final = 0.05
"""Minimum delay of a client, in seconds."""


@immutable
class _Outlook:
    """The predicted state of the pool for one request.

    Attributes:
        predicted: predicted wait after all admitted requests.
        booked_s: additional wait after all bookings.
        backlog_s: work of all waiting requests, in seconds.
        sure_s, likely_s: longest predicted waits that surely and likely meet the deadline.
        drain: drain of the request's class.
    """

    predicted: WaitForecast
    booked_s: float
    backlog_s: float
    sure_s: float
    likely_s: float
    drain: Drain

    @property
    def low_water_s(self) -> float:
        """The low water mark of the request's class.

        The mark is lower if higher-priority classes, which fill the queue first, leave less of the
        pool.
        """
        return LOW_WATER_SHARE * self.sure_s * max(self.drain.strict, self.drain.least)

    def admits(self, *, on_time: bool) -> bool:
        """Return whether the request may wait.

        A request with an appointment precedes all bookings.
        """
        wait_s = self.predicted.wait_s
        if on_time:
            return wait_s <= self.likely_s
        has_capacity = wait_s + self.booked_s <= self.sure_s
        return has_capacity or (wait_s <= self.sure_s and self.backlog_s <= self.low_water_s)

    @property
    def ahead_s(self) -> float:
        """Seconds until the pool could start the request if no client returned."""
        return max(self.predicted.wait_s, self.predicted.place_s)


class Deadline:
    """Admits a request if its predicted wait meets its deadline.

    `wait_forecast` and `appointments` explain the formulas.

    Attributes:
        appointments: the bookings, which gateways share.
    """

    name = "deadline"

    def __init__(self) -> None:
        self.appointments = Appointments()
        self._flows = ClassFlows()
        self._correction = WaitCorrection()
        self._rate = DrainRate()

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        self.appointments.expire(now_s)
        self._rate.observe(view, now_s)
        booking = self.appointments.find(view.fingerprint, now_s, view.retries)
        on_time = booking is not None and booking.is_due(now_s)
        drain = self._drain(view, now_s).lasting
        predicted = self._predict(view, drain, now_s)
        refused = queue_full(view, predicted) or too_slow(view, predicted)
        # If nothing waits and nothing is booked, free capacity meets every deadline.
        waits = predicted.wait_s > 0.0 or view.queue.length or self.appointments.classes
        if refused is None and waits:
            outlook = self._outlook(view, predicted, drain)
            refused = shed(view, outlook.low_water_s)
            if refused is None and not outlook.admits(on_time=on_time):
                booked_s, bound_s = outlook.booked_s, outlook.sure_s
                if on_time:
                    booked_s, bound_s = 0.0, outlook.likely_s
                refused = not_in_time(view, predicted, booked_s, bound_s)
        if booking is None:
            # Count a new request in the flow of its class, weighted by the chance that it is
            # served.
            share = 1.0
            if refused is not None:
                share = 0.0 if view.sheddable else self.appointments.kept_share
            # The other gateways get the rest of the flow.
            work_s = predicted.work_s * share / view.pool.share
            self._flows.add_request(view.service.priority, work_s, now_s)
        if refused is None:
            if booking is not None:
                self.appointments.close(booking)
            self._rate.admit(predicted.work_s)
            return admit(view, predicted)
        if booking is None:
            return self._postpone(view, refused, now_s, again=False)
        if not on_time:
            return replace(refused, retry_after_s=booking.due_s - now_s)
        self.appointments.close(booking)
        return self._postpone(view, refused, now_s, again=booking.is_kept(now_s))

    def reconsider(self, view: AdmissionView, waited_s: float, now_s: float) -> Refused | None:
        drain = self._drain(view, now_s).lasting
        refused = times_out(view, self._predict(view, drain, now_s), waited_s)
        if refused is None:
            return None
        # The client returns to the place that the request leaves.
        queue = replace(view.queue, place_s=view.queue.ahead_s)
        return self._postpone(replace(view, queue=queue), refused, now_s, again=True)

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        waited_s = ttft_s - (admitted.ttft_s - admitted.wait_s)
        has_target = admitted.service.ttft_s is not None
        self._correction.add_wait(admitted.wait_s, waited_s, has_target=has_target)

    def _drain(self, view: AdmissionView, now_s: float) -> Drain:
        """Return the drain of the queue of a request's class."""
        return self._flows.drain(view.service.priority, now_s, self.appointments.classes)

    def _predict(self, view: AdmissionView, drain: Drain, now_s: float) -> WaitForecast:
        """Return the wait of a request that is admitted now.

        New and returning clients of higher-priority classes overtake the request, so its wait is
        less certain.
        """
        predicted = forecast_wait(view, drain, self._correction.factor)
        if predicted.wait_s <= 0.0:
            return predicted
        longer_s = partial(self._longer_s, view, drain)
        wait_s = self.appointments.overtaken_s(
            view.service.priority, now_s, predicted.wait_s, longer_s
        )
        return replace(predicted, wait_s=wait_s, grain_s=predicted.grain_s * drain.spread**2)

    def _outlook(self, view: AdmissionView, predicted: WaitForecast, drain: Drain) -> _Outlook:
        priority = view.service.priority
        allowed_s = _allowed_s(view, predicted)
        sure_s, likely_s = (predicted.within_s(allowed_s, z) for z in (Z_SURE, Z_LIKELY))
        better_s, own_s = self.appointments.ahead_s(
            priority, view.tenant, view.share, predicted.work_s
        )
        booked_s = self._longer_s(view, drain, (better_s / _PACE, own_s / _PACE))
        return _Outlook(
            predicted,
            booked_s,
            view.queue.work_s * self._correction.factor,
            sure_s,
            likely_s,
            drain,
        )

    def _longer_s(self, view: AdmissionView, drain: Drain, booked: BookedWork) -> float:
        """Return the additional seconds that the pool takes for booked work."""
        if not any(booked):
            return 0.0
        factor, ahead_s = self._rate.factor, view.queue.ahead_s
        with_booked_s = drained_s(view, drain, factor, ahead_s, booked)
        return (with_booked_s - drained_s(view, drain, factor, ahead_s)) / drain.worse

    def _postpone(
        self, view: AdmissionView, refused: Refused, now_s: float, *, again: bool
    ) -> Refused:
        """Refuse with a time to return, and book this time unless the request is sheddable.

        Args:
            again: whether the request takes the first gap instead of a place after all bookings.
        """
        drain = self._drain(view, now_s)
        predicted = forecast_wait(view, drain, self._correction.factor)
        outlook = self._outlook(view, predicted, drain)
        start_s = outlook.ahead_s + outlook.booked_s
        if again:
            start_s = self.appointments.gap_s(
                view.service.priority,
                now_s,
                outlook.ahead_s,
                partial(self._longer_s, view, drain),
            )
        retry_s = start_s - _TARGET_SHARE * outlook.sure_s
        retry_s = max(refused.retry_after_s, retry_s, LEAST_RETRY_S)
        if not view.sheddable:
            new = Booking(
                fingerprint=view.fingerprint,
                priority=view.service.priority,
                tenant=view.tenant,
                work_s=outlook.predicted.work_s,
                due_s=now_s + retry_s,
                booked_s=now_s,
                again=again,
                share=view.share,
            )
            self.appointments.book(new)
        return replace(refused, retry_after_s=retry_s)


def _allowed_s(view: AdmissionView, predicted: WaitForecast) -> float:
    """Return the seconds that a request may wait.

    The limit is `max_wait_s` if the request has no TTFT target or the prompt alone exceeds the
    target.
    """
    target_s = view.service.ttft_s
    if target_s is None or target_s <= predicted.prompt_s:
        return view.max_wait_s
    return min(target_s - predicted.prompt_s, view.max_wait_s)


# --- The speed at which the pool works off its queue, relative to the forecast --------------------
#
# While requests wait without a break, the pool is full. The work that leaves the queue is then the
# work that the pool does:
#
#     drained = queued at the last decision + admitted then - queued now
#     factor  = seconds / drained, each summed over the intervals between decisions
#
# Other gateways' requests use the rest of the pool meanwhile, so the work of the whole pool is this
# gateway's work divided by its share of the running sequences.
#
# Intervals that begin with an empty queue do not count. An interval that ends with an empty queue
# counts at most the predicted time. Without these intervals, the factor would be 10% too large,
# because a queue empties when requests are short.
#
# A wait of a few requests contains constant parts, such as the rest of a running request. Their
# share of an appointment minutes ahead is much smaller, so `WaitCorrection` cannot predict
# appointments.


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
