"""What stands against a request beside its wait, and how it is told.

Each of these returns a refusal with the least seconds after which it could be otherwise; when to
come back is for the policy to say.
"""

from __future__ import annotations

from typing import Final

from draftgate.policies.admission.types import AdmissionView, RefusalKind, Refused
from draftgate.policies.admission.wait_forecast import Forecast

TENANT_ALPHA: Final = 8.0
"""A tenant may have so many times the places that are free (dynamic thresholds: Choudhury, Hahne,
IEEE/ACM Transactions on Networking, 1998). Alone it may fill eight ninths of the queue; of n that
flood it each gets 8 / (1 + 8 n), and there is a place left for the next one."""

TPOT_MARGIN: Final = 1.1
"""Tokens may be predicted so much slower than wanted: forecasts of steps are off by some percent,
and the worker's weights bring them forward for who is late. (Chosen.)"""

UNKNOWN_RETRY_S: Final = 1.0
"""When to come back where nobody knows what requests take."""


def queue_full(view: AdmissionView, predicted: Forecast) -> Refused | None:
    """Refuse who would find no place, or none for its tenant."""
    queue = view.queue
    least_s = predicted.grain_s or UNKNOWN_RETRY_S
    if queue.length >= queue.capacity:
        reason = f"the queue is full: {queue.length} requests wait"
        return Refused(least_s, RefusalKind.QUEUE_FULL, reason)
    if queue.tenant_length >= TENANT_ALPHA * (queue.capacity - queue.length):
        reason = (
            f"{queue.tenant_length} of your requests wait already, and of {queue.capacity} places "
            f"{queue.capacity - queue.length} are left for all"
        )
        return Refused(least_s, RefusalKind.QUEUE_FULL, reason)
    return None


def too_slow(view: AdmissionView, predicted: Forecast) -> Refused | None:
    """Refuse who wants its tokens faster than they come now, unless they never come so fast."""
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
    reason = (
        f"tokens would come every {tpot_s * 1e3:.0f} ms, {target_s * 1e3:.0f} ms are asked for; "
        f"{view.pool.running} sequences run"
    )
    return Refused(least_s or UNKNOWN_RETRY_S, RefusalKind.TPOT, reason)


def shed(view: AdmissionView, low_water_s: float) -> Refused | None:
    """Refuse who may be shed as soon as others wait, beyond the low water."""
    if not view.sheddable or not view.queue.length or 0 < view.queue.work_s <= low_water_s:
        return None
    reason = f"it may be shed, and {view.queue.length} requests wait"
    return Refused(view.queue.work_s or UNKNOWN_RETRY_S, RefusalKind.SHED, reason)


def not_in_time(view: AdmissionView, predicted: Forecast, booked_s: float) -> Refused:
    """Refuse who would have to wait too long."""
    waiting = f"{view.queue.length} requests wait"
    if booked_s > 0:
        waiting += f", and {booked_s:.2f} s are promised to others"
    target_s = view.service.ttft_s
    if target_s is None:
        reason = f"it would wait {predicted.wait_s:.2f} s of {view.max_wait_s:.2f} s at most"
    else:
        reason = f"its first token would take {predicted.ttft_s:.2f} s of {target_s:.2f} s at most"
    return Refused(predicted.grain_s, RefusalKind.DEADLINE, f"{reason}; {waiting}")
