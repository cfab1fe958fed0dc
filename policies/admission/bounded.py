"""The baselines: a bound for the queue, or none."""

from __future__ import annotations

from dataclasses import replace

from draftgate.policies.admission.refusals import queue_full
from draftgate.policies.admission.types import AdmissionView, Admitted, Refused
from draftgate.policies.admission.wait_forecast import admitted, forecast


class Bounded:
    """Lets in as long as the queue has places, whatever the wait; as most gateways do."""

    name = "bounded"

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        predicted = forecast(view)
        refused = queue_full(view, predicted)
        if refused is not None:
            return replace(refused, retry_after_s=max(refused.retry_after_s, predicted.wait_s))
        return admitted(view, predicted)

    def learn(self, admission: Admitted, ttft_s: float) -> None:
        pass


class Unbounded:
    """Lets everybody in: the queue grows as long as more come than are served."""

    name = "none"

    def decide(self, view: AdmissionView, now_s: float) -> Admitted | Refused:
        return admitted(view, forecast(view))

    def learn(self, admission: Admitted, ttft_s: float) -> None:
        pass
