"""Reasons to refuse a request, with messages for clients.

Each function returns a refusal with the minimum seconds after which the decision could change, or
None. The policy decides when the client should return.
"""

from __future__ import annotations

from typing import Final

from draftgate.policies.admission.types import AdmissionView, RefusalKind, Refused
from draftgate.policies.admission.wait_forecast import Z_LIKELY, WaitForecast

TENANT_ALPHA: Final = 8.0
"""Maximum queue length of a tenant, as a multiple of the free places (dynamic thresholds:
Choudhury, Hahne, IEEE/ACM Transactions on Networking, 1998). A single tenant may fill eight
ninths of the queue. Each of n tenants that flood the queue gets 8 / (1 + 8 n), which leaves a
place for the next tenant."""

TPOT_MARGIN: Final = 1.1
"""Factor by which the predicted TPOT may exceed its target. Step forecasts are off by some percent,
and the worker gives more draft slots to late requests. (Chosen, not tuned.)"""

UNKNOWN_RETRY_S: Final = 1.0
"""Delay of a client if the duration of requests is unknown, in seconds."""


def queue_full(view: AdmissionView, predicted: WaitForecast) -> Refused | None:
    """Refuse a request if the queue has no free place for it or for its tenant."""
    queue = view.queue
    free = queue.capacity - queue.length
    least_s = predicted.grain_s or UNKNOWN_RETRY_S
    if free <= 0:
        reason = f"the queue is full: {queue.length} requests wait"
        return Refused(least_s, RefusalKind.QUEUE_FULL, reason)
    if queue.tenant_length >= TENANT_ALPHA * free:
        reason = (
            f"{queue.tenant_length} of your requests wait already, but fewer than "
            f"{TENANT_ALPHA * free:g} may, because only {free} of {queue.capacity} places in the "
            "queue are free"
        )
        return Refused(least_s, RefusalKind.QUEUE_FULL, reason)
    return None


def too_slow(view: AdmissionView, predicted: WaitForecast) -> Refused | None:
    """Refuse a request whose TPOT target an idle pool meets but the current load would break."""
    target_s, speed = view.service.tpot_s, view.pool.speed
    if target_s is None:
        return None
    running = view.pool.running / max(view.pool.workers, 1)
    tpot_s = speed.tpot_s + speed.sequence_s
    idle_s = speed.tpot_s - speed.sequence_s * running
    if tpot_s <= target_s * TPOT_MARGIN or not running or idle_s > target_s:
        return None
    too_many = (tpot_s - target_s) / speed.sequence_s if speed.sequence_s > 0 else running
    least_s = max(too_many * view.pool.workers, 1.0) * predicted.grain_s
    tpot, bound = distinct_figures(tpot_s * 1e3, target_s * TPOT_MARGIN * 1e3)
    reason = (
        f"predicted TPOT {tpot} ms exceeds {bound} ms, which is {TPOT_MARGIN:g} times the target "
        f"of {target_s * 1e3:g} ms; {view.pool.running} sequences run"
    )
    return Refused(least_s or UNKNOWN_RETRY_S, RefusalKind.TPOT, reason)


def shed(view: AdmissionView, low_water_s: float) -> Refused | None:
    """Refuse a sheddable request if others wait for longer than the low water mark."""
    if not view.sheddable or not view.queue.length or 0 < view.queue.work_s <= low_water_s:
        return None
    waiting = f"requests of this priority are shed while {view.queue.length} others wait"
    if view.queue.work_s > 0:
        work, bound = distinct_figures(view.queue.work_s, low_water_s)
        reason = f"{waiting}, with work of {work} s, which exceeds {bound} s"
    else:
        reason = f"{waiting}, whose work is unknown"
    return Refused(view.queue.work_s or UNKNOWN_RETRY_S, RefusalKind.SHED, reason)


def times_out(view: AdmissionView, predicted: WaitForecast, waited_s: float) -> Refused | None:
    """Refuse a waiting request that would probably wait longer than it may.

    A TTFT target counts only until it is missed. A late response is then better than a refusal.
    """
    allowed_s, target_s = view.max_wait_s, view.service.ttft_s
    if target_s is not None and waited_s + predicted.prompt_s < target_s:
        allowed_s = min(allowed_s, target_s - predicted.prompt_s)
    left_s = allowed_s - waited_s
    bound_s = predicted.within_s(left_s, Z_LIKELY)
    if left_s > 0 and predicted.wait_s <= bound_s:
        return None
    if left_s > 0:
        wait, bound = distinct_figures(predicted.wait_s, bound_s)
        reason = f"predicted wait {wait} s exceeds {bound} s, after a wait of {waited_s:.2f} s"
    else:
        waited, bound = distinct_figures(waited_s, allowed_s)
        reason = f"the request has waited {waited} s of at most {bound} s"
    reason += f"; {_kept(view, target_s)}; {view.queue.length} requests wait"
    return Refused(predicted.grain_s or UNKNOWN_RETRY_S, RefusalKind.DEADLINE, reason)


def not_in_time(
    view: AdmissionView, predicted: WaitForecast, booked_s: float, bound_s: float
) -> Refused:
    """Refuse a request that would wait too long.

    Args:
        booked_s: the time that returning clients have booked before it.
        bound_s: the longest predicted wait that is admitted.
    """
    wait, bound = distinct_figures(predicted.wait_s + booked_s, bound_s)
    booked = f", with {booked_s:.2f} s that returning clients have booked," if booked_s > 0 else ""
    reason = (
        f"predicted wait {wait} s{booked} exceeds {bound} s; "
        f"{_kept(view, view.service.ttft_s, predicted.prompt_s)}; {view.queue.length} requests wait"
    )
    return Refused(predicted.grain_s, RefusalKind.DEADLINE, reason)


def distinct_figures(value: float, bound: float) -> tuple[str, str]:
    """Return a value and the bound that it violates, with as many digits as tell them apart."""
    for digits in range(2, 7):
        figures = f"{value:.{digits}f}", f"{bound:.{digits}f}"
        if figures[0] != figures[1]:
            break
    return figures


def _kept(view: AdmissionView, target_s: float | None, prompt_s: float = 0.0) -> str:
    """Return what a bound of the wait is for. It is lower, because the forecast is uncertain."""
    if target_s is None or target_s <= prompt_s:
        return f"the bound probably keeps the longest wait of {view.max_wait_s:g} s"
    prompt = f", of which the prompt takes {prompt_s:.2f} s" if prompt_s else ""
    return f"the bound probably keeps the target of {target_s:g} s for the TTFT{prompt}"
