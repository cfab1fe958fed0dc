"""Admission by `deadline`, the default policy. It refuses late requests with a time to return."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from draftgate.policies.admission.appointments import Appointments, Booking
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

TARGET_SHARE: Final = 0.5
"""Predicted wait at an appointment, as a share of the longest wait that surely meets the deadline.
Half of that wait leaves a margin for errors in either direction."""

LOW_WATER_SHARE: Final = 0.25
"""Low water mark, as a share of the longest sure wait. While the waiting requests take less time,
the pool admits any request, despite bookings. So the pool is never idle because of clients that
may not return. If no client returns, goodput at three times the capacity is within 4% of its
peak (simulated, tests/policies/overload.py, 2026-11-21)."""

OVERFLOW_LOG: Final = 3.0
"""Spacing of appointments, such that one client in 20 = e^3 finds too much work ahead."""

LEAST_PACE: Final = 0.7
"""Minimum share of the pool's time for appointments. With a lower share, pools of few sequences
would keep a few more appointments, but every client would wait longer."""

LEAST_RETRY_S: Final = 0.05
"""Minimum delay of a client, in seconds."""


@dataclass(frozen=True, slots=True)
class _Outlook:
    """The predicted state of the pool for one request.

    Attributes:
        predicted: predicted wait after all admitted requests.
        booked_s, again_s: additional wait after all bookings, and after the bookings of clients
            that returned on time and were refused again.
        backlog_s: work of all waiting requests, in seconds.
        sure_s, likely_s: longest predicted waits that surely and likely meet the deadline.
        drain: drain of the request's class.
    """

    predicted: WaitForecast
    booked_s: float
    again_s: float
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

    def retry_s(self, *, again: bool) -> float:
        """Return the seconds until the pool could admit the request in its turn."""
        others_s = self.again_s if again else self.booked_s
        ahead_s = max(self.predicted.wait_s, self.predicted.place_s)
        return ahead_s + others_s - TARGET_SHARE * self.sure_s


class Deadline:
    """Admits a request if its predicted wait meets its deadline.

    `wait_forecast` and `appointments` explain the formulas.
    """

    name = "deadline"

    def __init__(self) -> None:
        self._appointments = Appointments()
        self._flows = ClassFlows()
        self._correction = WaitCorrection()

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        self._appointments.expire(now_s)
        booking = self._appointments.find(view.fingerprint, now_s, view.retries)
        on_time = booking is not None and booking.is_due(now_s)
        drain = self._flows.drain(view.service.priority, now_s, self._appointments.classes)
        predicted = forecast_wait(view, drain, self._correction.factor)
        outlook = self._outlook(view, predicted, drain)
        refused = (
            queue_full(view, predicted)
            or too_slow(view, predicted)
            or shed(view, outlook.low_water_s)
        )
        if refused is None and not outlook.admits(on_time=on_time):
            refused = not_in_time(view, predicted, 0.0 if on_time else outlook.booked_s)
        if booking is None:
            # Count a new request in the flow of its class, weighted by the chance that it is
            # served.
            share = 1.0
            if refused is not None:
                share = 0.0 if view.sheddable else self._appointments.kept_share
            self._flows.add_request(view.service.priority, predicted.work_s * share, now_s)
        if refused is None:
            if booking is not None:
                self._appointments.close(booking)
            return admit(view, predicted)
        if booking is None:
            return self._postpone(view, outlook, refused, now_s, again=False)
        if not on_time:
            return replace(refused, retry_after_s=booking.due_s - now_s)
        self._appointments.close(booking)
        return self._postpone(view, outlook, refused, now_s, again=booking.is_kept(now_s))

    def reconsider(self, view: AdmissionView, waited_s: float, now_s: float) -> Refused | None:
        drain = self._flows.drain(view.service.priority, now_s, self._appointments.classes)
        predicted = forecast_wait(view, drain, self._correction.factor)
        refused = times_out(view, predicted, waited_s)
        if refused is None:
            return None
        # The client returns to the place that the request leaves.
        outlook = self._outlook(view, replace(predicted, place_s=predicted.wait_s), drain)
        return self._postpone(view, outlook, refused, now_s, again=True)

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        waited_s = ttft_s - (admitted.ttft_s - admitted.wait_s)
        has_target = admitted.service.ttft_s is not None
        self._correction.add_wait(admitted.wait_s, waited_s, has_target=has_target)

    def _outlook(self, view: AdmissionView, predicted: WaitForecast, drain: Drain) -> _Outlook:
        priority, factor = view.service.priority, self._correction.factor
        allowed_s = _allowed_s(view, predicted)
        sure_s, likely_s = (predicted.within_s(allowed_s, z) for z in (Z_SURE, Z_LIKELY))
        pace = _pace(predicted, likely_s - LOW_WATER_SHARE * sure_s)

        def longer_s(booked_s: tuple[float, float]) -> float:
            if not any(booked_s):
                return 0.0
            better_s, own_s = (work_s / pace for work_s in booked_s)
            ahead_s = view.queue.ahead_s
            with_booked_s = drained_s(view, drain, factor, ahead_s, (better_s, own_s))
            return (with_booked_s - drained_s(view, drain, factor, ahead_s)) / drain.worse

        booked_s = self._appointments.ahead_s(priority, view.tenant, view.share, predicted.work_s)
        return _Outlook(
            predicted,
            longer_s(booked_s),
            longer_s(self._appointments.again_s(priority)),
            view.queue.work_s * factor,
            sure_s,
            likely_s,
            drain,
        )

    def _postpone(
        self,
        view: AdmissionView,
        outlook: _Outlook,
        refused: Refused,
        now_s: float,
        *,
        again: bool,
    ) -> Refused:
        """Refuse with a time to return, and book this time unless the request is sheddable."""
        retry_s = max(refused.retry_after_s, outlook.retry_s(again=again), LEAST_RETRY_S)
        if not view.sheddable:
            work_s, priority = outlook.predicted.work_s, view.service.priority
            due_s = now_s + retry_s
            new = Booking(
                view.fingerprint, priority, view.tenant, work_s, due_s, now_s, again=again
            )
            self._appointments.book(new, view.share)
        return replace(refused, retry_after_s=retry_s)


def _pace(predicted: WaitForecast, margin_s: float) -> float:
    """Return the share of the pool's time that is available for appointments.

    Suppose that appointments take a share p, and new requests fill the pool up to the low water
    mark. The work above the mark is then a reflected random walk. In heavy traffic (Kingman, 1961)
    this work exceeds x with the probability exp(-2 x (1 - p) / (p x grain)) for exponential
    lengths.

    Args:
        margin_s: seconds above the low water mark at which a client on time is refused.
    """
    spread = OVERFLOW_LOG * predicted.grain_s / (2.0 * max(margin_s, 1e-9))
    return max(LEAST_PACE, 1.0 / (1.0 + spread))


def _allowed_s(view: AdmissionView, predicted: WaitForecast) -> float:
    """Return the seconds that a request may wait.

    The limit is `max_wait_s` if the request has no TTFT target or the prompt alone exceeds the
    target.
    """
    target_s = view.service.ttft_s
    if target_s is None or target_s <= predicted.prompt_s:
        return view.max_wait_s
    return min(target_s - predicted.prompt_s, view.max_wait_s)
