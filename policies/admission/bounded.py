"""`bounded` and `none`: admission with and without a bound on the queue."""

from __future__ import annotations

from dataclasses import replace

from draftgate.policies.admission.refusals import queue_full
from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.admission.wait_forecast import admit, forecast_wait


class Bounded:
    """Admits requests until the queue is full, as most gateways do, however long requests wait."""

    name = "bounded"

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        predicted = forecast_wait(view)
        refused = queue_full(view, predicted)
        if refused is not None:
            return replace(refused, retry_after_s=max(refused.retry_after_s, predicted.wait_s))
        return admit(view, predicted)

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        pass


class Unbounded:
    """Admits every request, so the queue grows while more requests arrive than the pool serves."""

    name = "none"

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        return admit(view, forecast_wait(view))

    def learn(self, admitted: Admitted, ttft_s: float) -> None:
        pass
