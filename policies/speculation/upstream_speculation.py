"""Speculation with upstream engines, which draft for every request by their own rule or never.

A gateway cannot switch speculation on or off inside such an engine. It decides only whether a
request goes to a replica that drafts or to a plain replica. This module answers two questions.

*Are drafts of a fixed length worth their time?* Assume that an engine adds `drafted` slots to each
token, of which `accepted` survive on average at any load. Its step takes `a + c x tokens` seconds.
With r sequences, the share of a step that grows with the batch is

    share = c r (1 + drafted) / (a + c r (1 + drafted))

and each verified token costs each sequence `c` seconds. The price of a slot is accepted tokens per
second x extra seconds per token, therefore

    price = r (1 + accepted) / step x c = share x (1 + accepted) / (1 + drafted),

and drafts are worth their time while `accepted > price x drafted`. At share 0 (bound by reading
weights) they always are. At share 1 (bound by arithmetic) they never are, because accepted <=
drafted. The values of a and c need not be known. Times per token, `step / (1 + accepted)`, grow
with r by the same share.

*Which replicas does a request use?* The speculation policy decides from the request and from the
load of the replicas that draft. If the policy uses the price, drafts must be worth that price. A
token must also cost less on a drafting replica than on a plain replica.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import StrEnum
from typing import Final

from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.plan_reason import PlanCause, PlanFigures, render_reason
from draftgate.policies.types import RequestView, SpeculationMode, SpeculationPlan, WorkerLoad

KNEE_TOKENS: Final = 320.0
"""Number of tokens that doubles the time of a step, before any measurement. It is the ratio of 5.9
to 6.9 ms and 18 to 21 us per token (Llama-8B bf16 on an H100, the reference scale)."""

_PRIOR_WEIGHT: Final = 64.0
"""Weight of that prior against measurements, in streams x squared sequences: 16 streams whose
batches differ by two sequences. (Chosen, not tuned, 2026-11-22.)"""

_FORGETTING: Final = 0.98
"""Decay per stream, which averages about the last 50."""

_BISECTIONS: Final = 40


@dataclass(frozen=True, slots=True)
class DraftMeans:
    """Mean number of tokens in the drafts of an engine.

    Attributes:
        drafted: tokens that are proposed and verified.
        accepted: tokens that survive, at most `drafted`.
    """

    drafted: float
    accepted: float


def expected_accepted(chance: float, drafted: float) -> float:
    """Return the expected number of accepted tokens of a draft.

    Args:
        chance: probability of each token given all previous tokens, 0 to 1.
        drafted: number of tokens in the draft.
    """
    if chance >= 1.0:
        return drafted
    return float(chance * (1.0 - chance**drafted) / (1.0 - chance))


def upstream_acceptance(means: DraftMeans) -> float:
    """Return the probability per token for which `expected_accepted` gives these means."""
    low, high = 0.0, 1.0
    for _ in range(_BISECTIONS):
        middle = (low + high) / 2
        if expected_accepted(middle, means.drafted) < means.accepted:
            low = middle
        else:
            high = middle
    return high


def fixed_draft_price(share: float, means: DraftMeans) -> float:
    """Return the slot price of an engine with drafts of a fixed length, in tokens, 0 to 1.

    Args:
        share: share of the step's time that grows with the batch, 0 to 1.
    """
    return share * (1.0 + means.accepted) / (1.0 + means.drafted)


def drafts_pay(price: float, means: DraftMeans) -> bool:
    """Return whether drafts of a fixed length earn more than they cost."""
    return means.accepted > price * means.drafted


class BatchShare:
    """The growth of an engine's times per token with its batch, as a decayed and shrunk line."""

    def __init__(self) -> None:
        self._streams = 0.0
        self._sum_s = self._sum_running = 0.0
        self._sum_squared = self._sum_product = 0.0

    def add_stream(self, tpot_s: float, running: float) -> None:
        """Learn from a stream that has ended.

        Args:
            tpot_s: mean seconds between two of its tokens, more than 0.
            running: mean number of concurrent sequences, including its own, at least 1.
        """
        self._streams = self._streams * _FORGETTING + 1.0
        self._sum_s = self._sum_s * _FORGETTING + tpot_s
        self._sum_running = self._sum_running * _FORGETTING + running
        self._sum_squared = self._sum_squared * _FORGETTING + running * running
        self._sum_product = self._sum_product * _FORGETTING + running * tpot_s

    def share(self, running: float, step_tokens: float) -> float:
        """Return the share of a step's time that grows with the batch, 0 to 1.

        Args:
            running: number of sequences in the batch.
            step_tokens: tokens of each sequence per step, including drafts.
        """
        if not self._streams:
            return _prior_share(running, step_tokens)
        mean_s, usual = self._sum_s / self._streams, self._sum_running / self._streams
        slope_s = self.slope_s(step_tokens)
        return min(slope_s * running / (mean_s + slope_s * (running - usual)), 1.0)

    def slope_s(self, step_tokens: float) -> float:
        """Return the seconds that each sequence adds to the time per token, or 0 if unknown."""
        if not self._streams:
            return 0.0
        mean_s, usual = self._sum_s / self._streams, self._sum_running / self._streams
        prior_s = _prior_share(usual, step_tokens) * mean_s / usual
        variation = max(self._sum_squared - self._streams * usual * usual, 0.0)
        covariation = self._sum_product - self._streams * usual * mean_s
        slope_s = (covariation + _PRIOR_WEIGHT * prior_s) / (variation + _PRIOR_WEIGHT)
        return min(max(slope_s, 0.0), mean_s / usual)  # the constant part cannot be negative


def _prior_share(running: float, step_tokens: float) -> float:
    tokens = running * step_tokens
    return tokens / (tokens + KNEE_TOKENS)


class ReplicaPool(StrEnum):
    """The replicas of one kind."""

    SPECULATING = "speculating"
    PLAIN = "plain"


@dataclass(frozen=True, slots=True)
class UpstreamPoolState:
    """The state of a pool for one request.

    Attributes:
        load: load of the replica that would run the request.
        has_capacity: whether any replica of the pool can take the request now.
    """

    load: WorkerLoad
    has_capacity: bool


@dataclass(frozen=True, slots=True)
class PoolChoice:
    """The pool of a request.

    Attributes:
        pool: pool of the request, or None if it goes to the first replica of either kind with
            capacity.
        plan: speculation plan, with the reason for the pool.
    """

    pool: ReplicaPool | None
    plan: SpeculationPlan


def draft_means(load: WorkerLoad) -> DraftMeans:
    """Return the mean drafts of an engine that drafts by its own rule."""
    return DraftMeans(load.draft_tokens, expected_accepted(load.acceptance, load.draft_tokens))


def choose_pool(
    request: RequestView,
    policy: SpeculationPolicy,
    drafting: UpstreamPoolState,
    plain: UpstreamPoolState,
) -> PoolChoice:
    """Return the pool of a request, if each pool has a replica that serves.

    Capacity takes precedence, even if the client wants no drafts. The text is the same either way.
    A request that waited for a certain kind of replica would delay all later requests.
    """
    plan = policy.decide(request, drafting.load)
    wanted, plan = _wanted_pool(request, plan, drafting.load, plain.load)
    if not drafting.has_capacity and not plain.has_capacity:
        return PoolChoice(None, _by_capacity(plan, "; the first replica with capacity takes it"))
    if not (drafting if wanted is ReplicaPool.SPECULATING else plain).has_capacity:
        speculating = wanted is ReplicaPool.SPECULATING
        wanted = ReplicaPool.PLAIN if speculating else ReplicaPool.SPECULATING
        plan = _by_capacity(plan, f", but only {wanted} replicas have capacity")
    if wanted is ReplicaPool.PLAIN:
        plan = replace(plan, proposer=None, max_draft_tokens=0)
    return PoolChoice(wanted, plan)


def _by_capacity(plan: SpeculationPlan, addition: str) -> SpeculationPlan:
    """Return a plan whose pool follows from capacity instead of its cause."""
    return _caused(plan, PlanCause.CAPACITY, PlanFigures(words=plan.reason + addition))


def _wanted_pool(
    request: RequestView, plan: SpeculationPlan, drafting: WorkerLoad, plain: WorkerLoad
) -> tuple[ReplicaPool, SpeculationPlan]:
    """Return the better pool regardless of capacity, and the plan with the reason."""
    cap = request.max_draft_tokens
    if plan.proposer is None:
        return ReplicaPool.PLAIN, plan
    if cap is not None and cap < drafting.draft_tokens:
        figures = PlanFigures(drafted=drafting.draft_tokens, client_tokens=cap)
        return ReplicaPool.PLAIN, _caused(plan, PlanCause.UPSTREAM_LENGTH, figures)
    if plan.price is None or plan.mode is not SpeculationMode.AUTO:
        return ReplicaPool.SPECULATING, plan
    means = draft_means(drafting)
    costs_s = _token_cost_s(drafting), _token_cost_s(plain) or _plain_cost_s(drafting, plain, means)
    worth = drafts_pay(plan.price, means)
    # Where speeds are known, drafts compete with a plain replica, which may be idle. The pool with
    # the lower cost of a token, to the request and to all others, wins.
    if all(costs_s):
        worth = costs_s[0] <= costs_s[1]
    cause = PlanCause.UPSTREAM_PAYS if worth else PlanCause.UPSTREAM_DOES_NOT_PAY
    figures = PlanFigures(
        price=plan.price,
        running=drafting.running,
        drafted=means.drafted,
        accepted=means.accepted,
        drafting_token_s=costs_s[0],
        plain_token_s=costs_s[1],
    )
    pool = ReplicaPool.SPECULATING if worth else ReplicaPool.PLAIN
    return pool, _caused(plan, cause, figures)


def _caused(plan: SpeculationPlan, cause: PlanCause, figures: PlanFigures) -> SpeculationPlan:
    """Return a plan with another cause."""
    reason = render_reason(cause, figures, plan.max_draft_tokens)
    return replace(plan, reason=reason, cause=cause, figures=figures)


def _token_cost_s(load: WorkerLoad) -> float:
    """Return the seconds that a token of one more request costs all requests, or 0 if unknown."""
    return load.speed.tpot_s + (load.running + 1) * load.speed.sequence_s


def _plain_cost_s(drafting: WorkerLoad, plain: WorkerLoad, means: DraftMeans) -> float:
    """Return the cost of a token on a plain replica that has completed no stream yet.

    Its steps are assumed to take as long for as many tokens. Without this estimate, drafts that
    pay would keep all requests from an idle replica, so its speed would never be known.

    Returns:
        Seconds, or 0 if the speed with drafts is unknown.
    """
    speed, accepted = drafting.speed, 1.0 + means.accepted
    fixed_s = max(speed.tpot_s - speed.sequence_s * drafting.running, 0.0) * accepted
    token_s = speed.sequence_s * accepted / (1.0 + means.drafted)
    return fixed_s + (2 * plain.running + 1) * token_s
