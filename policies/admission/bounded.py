"""`bounded` and `none`: admission with and without a bound on the queue."""

from __future__ import annotations

from draftgate.policies.admission.refusals import queue_full, times_out
from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.admission.wait_forecast import WaitForecast, admit, forecast_wait
from draftgate.policies.values import replace


class Bounded:
    """Admits requests until the queue is full, as most gateways do, however long requests wait."""

    name = "bounded"

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        predicted = forecast_wait(view)
        refused = queue_full(view, predicted)
        return admit(view, predicted) if refused is None else _after_wait(refused, predicted)

    def reconsider(self, view: AdmissionView, waited_s: float, now_s: float) -> Refused | None:
        return _times_out(view, waited_s)

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        pass


class Unbounded:
    """Admits every request, so the queue grows while more requests arrive than the pool serves."""

    name = "none"

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        return admit(view, forecast_wait(view))

    def reconsider(self, view: AdmissionView, waited_s: float, now_s: float) -> Refused | None:
        return _times_out(view, waited_s)

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        pass


def _times_out(view: AdmissionView, waited_s: float) -> Refused | None:
    """Refuse a waiting request that would probably wait longer than it may."""
    predicted = forecast_wait(view)
    refused = times_out(view, predicted, waited_s)
    return refused and _after_wait(refused, predicted)


def _after_wait(refused: Refused, predicted: WaitForecast) -> Refused:
    """Return a refusal whose client returns when the waiting requests have started."""
    return replace(refused, retry_after_s=max(refused.retry_after_s, predicted.wait_s))
