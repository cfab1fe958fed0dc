"""The division of a flow's remaining time over its hops, and what it means for a hop.

The time of a hop is its wait and its service at the present speed of the workers. The later hops
of a flow wait at least for the later hops of the flows that began before it:

    time   = wait + prompt tokens x prompt_token_s + output tokens x tpot_s
    budget = (remaining time - gaps) x time / (time + expected times of the later hops)

The budget becomes the latency targets of the hop, so that ordering, batching and speculation need
no knowledge of flows. Admission decides about a whole flow at its first hop, whose first token may
be so late that the later hops, as predicted, just end in time.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

from draftgate.policies.admission.refusals import UNKNOWN_RETRY_S
from draftgate.policies.admission.types import PoolView, RefusalKind, Refused
from draftgate.policies.flows.types import Division, HopForecast
from draftgate.policies.types import ServiceLevel, WorkerSpeed
from draftgate.policies.values import replace

LEAST_HOP_S: Final = 1e-3
"""Minimum predicted time of a hop in seconds, so that each hop has a budget."""

_LEAST_SHARE: Final = 0.1
"""Minimum share of the remaining time for the hops. The time that a client takes between hops is a
forecast from its earlier flows, and must not leave nothing for the hops. (Chosen, not tuned.)"""

DECODE_SHARE: Final = 0.8
"""Share of a hop's spare time for its further tokens. The rest is for its wait and its prompt.

A tight TTFT target only puts the hop ahead of others, but a tight TPOT target keeps others off the
worker. Three loads of 150 flows of three hops each offered more than one worker can run. With 0.8,
217 flows met their deadlines and 1 admitted flow missed its own. With 0.5, these were 197 and 18,
and without TPOT targets 213 and 16. (Simulated with the profile cpu-demo, edf, one seed,
2026-11-26.)"""


def service_s(hop: HopForecast, speed: WorkerSpeed) -> float:
    """Return the predicted service time of a hop in seconds.

    The measured times of earlier hops are the prediction for hops elsewhere, and while the speed is
    unknown.
    """
    if hop.elsewhere or speed.tpot_s <= 0.0 or speed.prompt_token_s <= 0.0:
        return max(hop.service_s, LEAST_HOP_S)
    tokens_s = hop.prompt_tokens * speed.prompt_token_s + hop.output_tokens * speed.tpot_s
    return max(tokens_s, LEAST_HOP_S)


def divide(
    remaining_s: float,
    own: HopForecast,
    later: Sequence[HopForecast],
    speed: WorkerSpeed,
    wait_s: float = 0.0,
    later_wait_s: float = 0.0,
) -> Division:
    """Divide the remaining time of a flow over a hop and the expected later hops.

    Args:
        remaining_s: seconds to the deadline of the flow, more than 0.
        own: the hop that has arrived.
        later: the hops that are expected after it.
        speed: present speed of the workers.
        wait_s: predicted wait of the hop at the present load.
        later_wait_s: predicted wait of all later hops, by the work of flows that have begun.

    Raises:
        ValueError: no time remains.
    """
    if remaining_s <= 0.0:
        raise ValueError(f"no time remains: {remaining_s} s")
    wait_s = max(wait_s, 0.0)
    served_s = service_s(own, speed)
    own_s = wait_s + served_s
    later_served_s = sum([hop.weight * service_s(hop, speed) for hop in later])
    later_here_s = sum([h.weight * service_s(h, speed) for h in later if not h.elsewhere])
    later_s = later_served_s + max(later_wait_s, 0.0)
    gaps_s = sum([hop.weight * hop.gap_s for hop in later])
    usable_s = max(remaining_s - gaps_s, _LEAST_SHARE * remaining_s)
    budget_s = usable_s * (own_s / (own_s + later_s))
    least_s = served_s + later_s + gaps_s
    return Division(
        budget_s, own_s, served_s, later_s, later_served_s, later_here_s, gaps_s, least_s
    )


def targets(
    division: Division, own: HopForecast, speed: WorkerSpeed, wanted: ServiceLevel
) -> ServiceLevel:
    """Return the latency targets of a hop with a budget.

    A target that the request itself has remains if it is tighter. A hop without output, such as an
    embedding, has its budget as TTFT target.

    Args:
        own: the hop that has arrived.
        speed: present speed of the workers.
        wanted: targets and priority of the request.
    """
    outputs = max(own.output_tokens - 1.0, 0.0)
    spare_s = max(division.budget_s - division.own_s, 0.0)
    tpot_s = None
    decode_s = 0.0
    if outputs > 0.0 and speed.tpot_s > 0.0:
        tpot_s = speed.tpot_s + DECODE_SHARE * spare_s / outputs
        decode_s = outputs * tpot_s
    # Even a late hop gets a target, which orders it by the end of its budget.
    ttft_s = max(division.budget_s - decode_s, LEAST_HOP_S)
    return replace(
        wanted, ttft_s=_tighter(wanted.ttft_s, ttft_s), tpot_s=_tighter(wanted.tpot_s, tpot_s)
    )


def judged(
    remaining_s: float,
    division: Division,
    own: HopForecast,
    speed: WorkerSpeed,
    wanted: ServiceLevel,
) -> ServiceLevel:
    """Return the targets by which admission decides about the first hop of a flow.

    The TTFT target leaves exactly the predicted time for the rest of the flow. It equals the
    predicted TTFT if the flow just fits, and is looser than the budget if the flow has spare time.

    Args:
        remaining_s: seconds to the deadline of the flow.
        division: the division of this time.
        own: the hop that has arrived.
        speed: present speed of the workers.
        wanted: targets and priority of the request, which remain if they are tighter.
    """
    outputs = max(own.output_tokens - 1.0, 0.0)
    rest_s = outputs * speed.tpot_s + division.later_s + division.gaps_s
    ttft_s = max(remaining_s - rest_s, LEAST_HOP_S)
    return replace(wanted, ttft_s=_tighter(wanted.ttft_s, ttft_s))


def refuse_flow(
    remaining_s: float,
    division: Division,
    own: HopForecast,
    later: Sequence[HopForecast],
    pool: PoolView,
    sequence_s: float,
) -> Refused | None:
    """Refuse the first hop of a flow that would be late even if the hop itself need not wait.

    A flow that would only be late because its first hop waits is refused by admission, by the
    targets of `judged`. Admission books the time at which the client may return. An idle
    pool refuses no flow, because a return would not help. Its forecast may also be wrong, and would
    stay so without new flows.

    The time to return is when the waiting work and that of earlier flows has ended, and enough of
    the running sequences.

    Args:
        remaining_s: seconds to the deadline of the flow.
        division: the division of this time.
        own, later: the hop that has arrived, and the hops that are expected after it.
        pool: the workers.
        sequence_s: seconds in which the pool ends a sequence.
    """
    late_s = division.least_s - remaining_s
    if late_s <= 0.0:
        return None
    speed = pool.speed
    here = [hop for hop in later if not hop.elsewhere]
    outputs = own.output_tokens + sum([hop.weight * hop.output_tokens for hop in here])
    gain_s = speed.sequence_s * outputs  # what the flow gains if a worker runs one sequence less
    running = pool.running / max(pool.workers, 1)
    waits_s = division.own_s - division.service_s + division.later_s - division.later_served_s
    too_slow_s = late_s - (division.later_s - division.later_served_s)
    if waits_s <= 0.0 and not running:
        return None  # the pool is idle, so a return would not help
    too_many = min(too_slow_s / gain_s if gain_s > 0.0 else running, running)
    retry_s = waits_s + max(too_many, 0.0) * max(pool.workers, 1) * sequence_s
    reason = (
        f"the flow takes {division.least_s:.2f} s at the present load, and its deadline is in "
        f"{remaining_s:.2f} s; {pool.running} sequences run"
    )
    return Refused(max(retry_s, UNKNOWN_RETRY_S), RefusalKind.FLOW, reason)


def _tighter(target_s: float | None, other_s: float | None) -> float | None:
    """Return the tighter of two targets, where None is no target."""
    found = [one for one in (target_s, other_s) if one is not None]
    return min(found, default=None)
