"""Who can meet its deadline may wait; who cannot is told when it could: the default."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Final

from policies.admission.appointments import EARLY_S, Appointments, Booking
from policies.admission.forecast import Forecast, WaitError, forecast
from policies.admission.refusals import not_in_time, queue_full, shed, too_slow
from policies.admission.types import AdmissionView, Admitted, Refused

TARGET_SHARE: Final = 0.5
"""Appointments are for when half of the wait that a deadline allows is ahead: an error either way
is forgiven."""

LOW_WATER_SHARE: Final = 0.25
"""Below this share of the wait that its deadline allows anybody is let in, whoever may be expected:
the pool is never idle because somebody might come back."""

PACE: Final = 0.85
"""Share of the pool's time that is given away by appointment. Times of service are random, and
what they are off adds up along the line; the rest, which newcomers get, takes it up."""

LEAST_RETRY_S: Final = 0.05
"""Nobody is told to come back sooner."""


@dataclass(frozen=True, slots=True)
class _Line:
    """Future time of the pool, as one request meets it.

    Attributes:
        wait_s: of those who were let in, as far as they are before it.
        booked_s: of those who are expected before it.
        again_s: of these, who came in time and were sent away once more.
        backlog_s: of all who wait.
        allowed_s: the foreseen wait with which it almost surely meets its deadline.
    """

    wait_s: float
    booked_s: float
    again_s: float
    backlog_s: float
    allowed_s: float

    @property
    def low_water_s(self) -> float:
        return LOW_WATER_SHARE * self.allowed_s

    def admits(self, *, on_time: bool) -> bool:
        """Return whether a request may wait; who comes on time is before all who are expected."""
        if self.wait_s > self.allowed_s:
            return False
        others_s = 0.0 if on_time else self.booked_s
        return self.wait_s + others_s <= self.allowed_s or self.backlog_s <= self.low_water_s

    def retry_s(self, *, again: bool) -> float:
        """Return in how many seconds it could be let in."""
        others_s = self.again_s if again else self.booked_s
        return self.wait_s + others_s - TARGET_SHARE * self.allowed_s


class Deadline:
    """Decides by the foreseen wait; see `forecast` and `appointments` for the formulas."""

    def __init__(self) -> None:
        """Expect nobody, and believe forecasts."""
        self._appointments = Appointments()
        self._error = WaitError()

    @property
    def name(self) -> str:
        return "deadline"

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        prompt_s = admitted.ttft_s - admitted.wait_s
        self._error.learn(admitted.wait_s, ttft_s - prompt_s)

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        self._appointments.expire(now_s)
        booking = self._appointments.find(view.fingerprint, now_s, view.retries)
        on_time = booking is not None and now_s >= booking.due_s - EARLY_S
        foreseen = forecast(view, self._error.factor)
        line = self._line(view, foreseen)
        refused = (
            queue_full(view, foreseen)
            or too_slow(view, foreseen)
            or shed(view, line.low_water_s)
            or (
                None if line.admits(on_time=on_time) else not_in_time(view, foreseen, line.booked_s)
            )
        )
        if refused is None:
            if booking is not None:
                self._appointments.strike(booking)
            return Admitted(
                foreseen.wait_s, foreseen.ttft_s, foreseen.work_s, _reason(view, foreseen)
            )
        if booking is not None and not on_time:
            return replace(refused, retry_after_s=booking.due_s - now_s)
        retry_s = max(refused.retry_after_s, line.retry_s(again=on_time), LEAST_RETRY_S)
        if booking is not None:
            self._appointments.strike(booking)
        if not view.sheddable:
            self._book(view, foreseen, now_s, retry_s, again=on_time)
        return replace(refused, retry_after_s=retry_s)

    def _line(self, view: AdmissionView, foreseen: Forecast) -> _Line:
        booked_s = self._appointments.ahead_s(
            view.service.priority, view.tenant, view.share, foreseen.work_s
        )
        return _Line(
            foreseen.wait_s,
            booked_s / PACE,
            self._appointments.again_s / PACE,
            view.queue.work_s,
            foreseen.sure_wait_s(_allowed_s(view, foreseen)),
        )

    def _book(
        self, view: AdmissionView, foreseen: Forecast, now_s: float, retry_s: float, *, again: bool
    ) -> None:
        due_s, priority = now_s + retry_s, view.service.priority
        self._appointments.book(
            Booking(view.fingerprint, priority, view.tenant, foreseen.work_s, due_s, now_s, again),
            view.share,
        )


def _allowed_s(view: AdmissionView, foreseen: Forecast) -> float:
    """Return the wait that a request's deadline allows.

    One without a target, or with one that its prompt alone takes longer than, is served as soon as
    may be.
    """
    target_s = view.service.ttft_s
    if target_s is None or target_s <= foreseen.prompt_s:
        return view.max_wait_s
    return min(target_s - foreseen.prompt_s, view.max_wait_s)


def _reason(view: AdmissionView, foreseen: Forecast) -> str:
    if foreseen.wait_s <= 0:
        return "there is room"
    return f"{view.queue.length} wait; a wait of {foreseen.wait_s:.2f} s is foreseen"
