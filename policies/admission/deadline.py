"""Who can meet its deadline may wait; who cannot is told when it could: the default."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from draftgate.policies.admission.appointments import Appointments, Booking
from draftgate.policies.admission.class_drain import Classes, Drain
from draftgate.policies.admission.refusals import not_in_time, queue_full, shed, too_slow
from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.admission.wait_forecast import (
    Z_LIKELY,
    Z_SURE,
    Forecast,
    WaitError,
    admitted,
    drained_s,
    forecast,
)

TARGET_SHARE: Final = 0.5
"""Appointments are for when half of the wait is ahead with which a deadline is surely met: an error
either way is forgiven."""

LOW_WATER_SHARE: Final = 0.25
"""While all who wait take less than this share of it, anybody is let in, whoever is expected: the
pool is never idle because somebody might come back. Where nobody does, goodput at three times the
capacity is within 4% of its peak (simulated, tests/policies/overload.py, 2026-11-21)."""

OVERFLOW_LOG: Final = 3.0
"""Appointments are spread so thin that one in 20 = e^3 would find too much ahead of it."""

LEAST_PACE: Final = 0.7
"""Share of the pool's time that is given away by appointment at least. Less would keep a few more
of them in pools of a few seats, and send everybody away for longer."""

LEAST_RETRY_S: Final = 0.05
"""Nobody is told to come back sooner."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Future time of the pool, as one request meets it.

    Attributes:
        predicted: its wait behind those who were let in.
        booked_s, again_s: how much longer it is behind those, too, who are expected, and behind
            those of them who came in time once and were sent away.
        backlog_s: what all take who wait.
        sure_s, likely_s: the longest predicted waits with which its deadline is surely and likely
            met.
        drain: how fast it drains.
    """

    predicted: Forecast
    booked_s: float
    again_s: float
    backlog_s: float
    sure_s: float
    likely_s: float
    drain: Drain

    @property
    def low_water_s(self) -> float:
        """Return its low water, lower where better classes leave less: they are first to fill."""
        return LOW_WATER_SHARE * self.sure_s * max(self.drain.strict, self.drain.least)

    def admits(self, *, on_time: bool) -> bool:
        """Return whether a request may wait; who comes on time is before all who are expected."""
        wait_s = self.predicted.wait_s
        if on_time:
            return wait_s <= self.likely_s
        has_capacity = wait_s + self.booked_s <= self.sure_s
        return has_capacity or (wait_s <= self.sure_s and self.backlog_s <= self.low_water_s)

    def retry_s(self, *, again: bool) -> float:
        """Return in how many seconds it could be let in, in its turn."""
        others_s = self.again_s if again else self.booked_s
        ahead_s = max(self.predicted.wait_s, self.predicted.place_s)
        return ahead_s + others_s - TARGET_SHARE * self.sure_s


class Deadline:
    """Decides by the predicted wait; see `wait_forecast` and `appointments` for the formulas."""

    def __init__(self) -> None:
        """Expect nobody, and believe forecasts."""
        self._appointments = Appointments()
        self._classes = Classes()
        self._error = WaitError()

    @property
    def name(self) -> str:
        return "deadline"

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        self._appointments.expire(now_s)
        booking = self._appointments.find(view.fingerprint, now_s, view.retries)
        on_time = booking is not None and booking.is_due(now_s)
        drain = self._classes.drain(view.service.priority, now_s, self._appointments.classes)
        predicted = forecast(view, drain, self._error.factor)
        line = self._line(view, predicted, drain)
        refused = queue_full(view, predicted) or too_slow(view, predicted)
        refused = refused or shed(view, line.low_water_s)
        if refused is None and not line.admits(on_time=on_time):
            refused = not_in_time(view, predicted, 0.0 if on_time else line.booked_s)
        if booking is None:
            self._bring(view, predicted, now_s, refused)
        if refused is None:
            if booking is not None:
                self._appointments.strike(booking)
            return admitted(view, predicted)
        if booking is not None and not on_time:
            return replace(refused, retry_after_s=booking.due_s - now_s)
        return self._put_off(view, line, refused, booking, now_s)

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        waited_s = ttft_s - (admitted.ttft_s - admitted.wait_s)
        has_target = admitted.service.ttft_s is not None
        self._error.learn(admitted.wait_s, waited_s, has_target=has_target)

    def _bring(
        self, view: AdmissionView, predicted: Forecast, now_s: float, refused: Refused | None
    ) -> None:
        """Count a newcomer into what its class brings, as far as it is served."""
        share = 1.0
        if refused is not None:
            share = 0.0 if view.sheddable else self._appointments.kept_share
        self._classes.bring(view.service.priority, predicted.work_s * share, now_s)

    def _line(self, view: AdmissionView, predicted: Forecast, drain: Drain) -> _Line:
        priority, error = view.service.priority, self._error.factor
        allowed_s = _allowed_s(view, predicted)
        sure_s, likely_s = (predicted.within_s(allowed_s, z) for z in (Z_SURE, Z_LIKELY))
        pace = _pace(predicted, likely_s - LOW_WATER_SHARE * sure_s)

        def longer_s(expected_s: tuple[float, float]) -> float:
            if not any(expected_s):
                return 0.0
            better_s, own_s = (work_s / pace for work_s in expected_s)
            before_s = view.queue.ahead_s
            behind_s = drained_s(view, drain, error, before_s, (better_s, own_s))
            return (behind_s - drained_s(view, drain, error, before_s)) / drain.worse

        booked = self._appointments.ahead_s(priority, view.tenant, view.share, predicted.work_s)
        return _Line(
            predicted,
            longer_s(booked),
            longer_s(self._appointments.again_s(priority)),
            view.queue.work_s * error,
            sure_s,
            likely_s,
            drain,
        )

    def _put_off(
        self,
        view: AdmissionView,
        line: _Line,
        refused: Refused,
        booking: Booking | None,
        now_s: float,
    ) -> Refused:
        """Tell when to come back, and expect it then, unless it may be shed at any time."""
        again = booking is not None and booking.is_kept(now_s)
        retry_s = max(refused.retry_after_s, line.retry_s(again=again), LEAST_RETRY_S)
        if booking is not None:
            self._appointments.strike(booking)
        if not view.sheddable:
            work_s, priority = line.predicted.work_s, view.service.priority
            due_s = now_s + retry_s
            new = Booking(
                view.fingerprint, priority, view.tenant, work_s, due_s, now_s, again=again
            )
            self._appointments.book(new, view.share)
        return replace(refused, retry_after_s=retry_s)


def _pace(predicted: Forecast, room_s: float) -> float:
    """Return the share of the pool's time that is given away by appointment.

    Where a share p is, and newcomers fill up to the low water, what is above that is a reflected
    random walk. In heavy traffic (Kingman, 1961) it exceeds x with the chance
    exp(-2 x (1 - p) / (p x grain)) if services are as random as exponential ones.

    Args:
        room_s: the x above the low water at which who comes on time is sent away.
    """
    spread = OVERFLOW_LOG * predicted.grain_s / (2.0 * max(room_s, 1e-9))
    return max(LEAST_PACE, 1.0 / (1.0 + spread))


def _allowed_s(view: AdmissionView, predicted: Forecast) -> float:
    """Return the wait that a request's deadline allows.

    One without a target, or with one that its prompt alone takes longer than, is served as soon as
    may be.
    """
    target_s = view.service.ttft_s
    if target_s is None or target_s <= predicted.prompt_s:
        return view.max_wait_s
    return min(target_s - predicted.prompt_s, view.max_wait_s)
