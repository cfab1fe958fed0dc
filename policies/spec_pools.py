"""Which replicas a request goes to where some draft for every request and others never do.

The engines behind an API cannot be told to draft or not, so the decision about speculation is a
decision about where: the policy decides from the request and from the load of the replicas that
draft, and where it looks at their price, their drafts must pay at it on average
(`policies.draft_pay`), for they cannot be made shorter.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from policies.draft_pay import DraftMeans, expected_accepted, pays
from policies.protocols import SpeculationPolicy
from policies.speculation.planning import no_speculation
from policies.types import RequestView, SpeculationMode, SpeculationPlan, WorkerLoad


class Pool(StrEnum):
    """The replicas of one kind."""

    SPECULATING = "speculating"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class PoolOffer:
    """What a pool has to offer.

    Attributes:
        load: of the replica of it that is considered.
        room: whether any of it has room for the request now.
    """

    load: WorkerLoad
    room: bool


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """A request's pool.

    Attributes:
        pool: None where whoever has room first takes it.
        plan: the decision, with the reason for the pool.
    """

    pool: Pool | None
    plan: SpeculationPlan


def draft_means(load: WorkerLoad) -> DraftMeans:
    """Return the drafts of who drafts by its own rule."""
    accepted = expected_accepted(load.acceptance, load.draft_tokens)
    return DraftMeans(load.draft_tokens, accepted)


def choose_pool(
    request: RequestView, policy: SpeculationPolicy, drafting: PoolOffer, plain: PoolOffer
) -> PoolChoice:
    """Return where a request goes; both pools have a replica that serves.

    Whoever asks for no drafts waits for a plain replica. All others take the other pool if only
    that has room, and where none has, whichever has first.
    """
    plan = policy.decide(request, drafting.load)
    why_not = _unwilling(request, plan, drafting.load)
    if why_not is not None:
        return _plain(request, plan, why_not)
    wanted, why = _wanted(plan, drafting.load, plain.load)
    if not drafting.room and not plain.room:
        return PoolChoice(None, _told(plan, f"{why}; neither has room: the first that has"))
    if wanted is Pool.SPECULATING and not drafting.room:
        return _plain(request, plan, f"{why}, but only plain replicas have room")
    if wanted is Pool.PLAIN and not plain.room:
        why = f"{why}, but only speculating replicas have room"
        return PoolChoice(Pool.SPECULATING, _told(plan, why))
    if wanted is Pool.PLAIN:
        return _plain(request, plan, why)
    return PoolChoice(Pool.SPECULATING, _told(plan, why))


def _unwilling(request: RequestView, plan: SpeculationPlan, load: WorkerLoad) -> str | None:
    """Return why a request must not be drafted for, or None if it may."""
    if plan.proposer is None:
        return plan.reason
    asked = request.max_draft_tokens
    if asked is not None and asked < load.draft_tokens:
        return f"at most {asked} draft tokens are asked for, and {load.draft_tokens:.3g} are usual"
    return None


def _wanted(plan: SpeculationPlan, drafting: WorkerLoad, plain: WorkerLoad) -> tuple[Pool, str]:
    """Return the pool that is better for all who are there, and why."""
    if plan.price is None or plan.mode is not SpeculationMode.AUTO:
        return Pool.SPECULATING, plan.reason
    means = draft_means(drafting)
    figures = (
        f"{means.accepted:.2f} of {means.drafted:.3g} draft tokens accepted, "
        f"price {plan.price:.3g}, {drafting.running} running"
    )
    if pays(plan.price, means):
        return Pool.SPECULATING, f"drafts pay: {figures}"
    fast_s, slow_s = drafting.speed.tpot_s, plain.speed.tpot_s
    if 0.0 < fast_s < slow_s:
        times = f"{slow_s * 1e3:.1f} ms a token, not {fast_s * 1e3:.1f}"
        return Pool.SPECULATING, f"drafts do not pay, but plain replicas take {times}: {figures}"
    return Pool.PLAIN, f"drafts do not pay: {figures}"


def _told(plan: SpeculationPlan, why: str) -> SpeculationPlan:
    return replace(plan, reason=why)


def _plain(request: RequestView, plan: SpeculationPlan, why: str) -> PoolChoice:
    return PoolChoice(Pool.PLAIN, no_speculation(plan.policy, request, why, plan.price))
