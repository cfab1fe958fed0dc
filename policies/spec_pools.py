"""Which replicas a request goes to where some draft for every request and others never do.

The engines behind an API cannot be told to draft or not, so the decision about speculation is a
decision about where: the policy decides from the request and from the load of the replicas that
draft, and where it looks at their price, their drafts must pay at it on average
(`policies.draft_pay`), for they cannot be made shorter, and be better than none elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum

from draftgate.policies.draft_pay import DraftMeans, expected_accepted, pays
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.planning import no_speculation
from draftgate.policies.types import RequestView, SpeculationMode, SpeculationPlan, WorkerLoad


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

    Room counts first, also before a wish for no drafts: texts are the same with and without, and
    who waited for one kind of replica would keep all those waiting who come behind.
    """
    plan = policy.decide(request, drafting.load)
    wanted, why = _wanted(request, plan, drafting.load, plain.load)
    if not drafting.room and not plain.room:
        return PoolChoice(None, replace(plan, reason=f"{why}; whoever has room first takes it"))
    if not (drafting if wanted is Pool.SPECULATING else plain).room:
        wanted = Pool.PLAIN if wanted is Pool.SPECULATING else Pool.SPECULATING
        why = f"{why}, but only {wanted} replicas have room"
    return PoolChoice(wanted, _planned(request, plan, wanted, why))


def _wanted(
    request: RequestView, plan: SpeculationPlan, drafting: WorkerLoad, plain: WorkerLoad
) -> tuple[Pool, str]:
    """Return the pool that is better, for the request and for all who are there, and why."""
    asked = request.max_draft_tokens
    if plan.proposer is None:
        return Pool.PLAIN, plan.reason
    if asked is not None and asked < drafting.draft_tokens:
        usual = f"{drafting.draft_tokens:.3g} are usual"
        return Pool.PLAIN, f"at most {asked} draft tokens are asked for, and {usual}"
    if plan.price is None or plan.mode is not SpeculationMode.AUTO:
        return Pool.SPECULATING, plan.reason
    return _paid(plan.price, drafting, plain)


def _paid(price: float, drafting: WorkerLoad, plain: WorkerLoad) -> tuple[Pool, str]:
    """Return the pool that is better at a price, and why.

    Where times are known, drafts have to earn their price against a replica that may be idle: what
    a token costs, to the request and to all whom it slows down, decides (as in `policies.routing`).
    """
    means, costs_s = draft_means(drafting), (_cost_s(drafting), _cost_s(plain))
    figures = (
        f"{means.accepted:.2f} of {means.drafted:.3g} draft tokens accepted, "
        f"price {price:.3g}, {drafting.running} running"
    )
    worth = pays(price, means)
    if all(costs_s):
        worth = costs_s[0] <= costs_s[1]
        figures += "; a token costs all {:.3g} ms there, {:.3g} without drafts".format(
            *(cost_s * 1e3 for cost_s in costs_s)
        )
    if worth:
        return Pool.SPECULATING, f"drafts pay: {figures}"
    return Pool.PLAIN, f"drafts do not pay: {figures}"


def _cost_s(load: WorkerLoad) -> float:
    """Return what a token of one more costs all who are there; 0 where nobody knows."""
    return load.speed.tpot_s + (load.running + 1) * load.speed.sequence_s


def _planned(request: RequestView, plan: SpeculationPlan, pool: Pool, why: str) -> SpeculationPlan:
    """Return the plan of a request that goes to a pool, which may be other than was wanted."""
    if pool is Pool.PLAIN or plan.proposer is None:
        return no_speculation(plan.policy, request, why, plan.price)
    return replace(plan, reason=why)
