"""Speculation with upstreams, which chooses between upstreams with and without drafts."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final, TypeAlias

from draftgate.backends.types import SpeculationOutcome
from draftgate.gateway.dispatch.admission import Entry
from draftgate.gateway.dispatch.decisions import Decision, Decisions, MoveRecord
from draftgate.gateway.dispatch.routing import Routed
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.moves import MoveEnd
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.resilience.failover import Cause
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory
from draftgate.policies.speculation.upstream_speculation import (
    ReplicaPool,
    UpstreamPoolState,
    choose_pool,
)
from draftgate.policies.types import RequestView, Role, SpeculationPlan, WorkerLoad
from draftgate.policies.values import immutable, replace

POOL_HEADER: Final = "X-Speculation-Pool"
REASON_HEADER: Final = "X-Speculation-Reason"

_HasCapacity: TypeAlias = Callable[[WorkerUsage], bool]


@immutable
class PoolDecision:
    """The decision for one request.

    Attributes:
        request, load: the inputs of the policy. The load is that of an upstream that drafts.
        plan: the speculation plan.
        avoid: ids of upstreams of the other pool, used only if no other is open.
    """

    request: RequestView
    load: WorkerLoad
    plan: SpeculationPlan
    avoid: frozenset[str]

    def headers(self, worker: FleetWorker) -> Mapping[str, str]:
        """Return headers that show the pool of the upstream, and the reason."""
        # A third-party policy may return any text, but a header holds one line of ASCII.
        reason = " ".join(self.plan.reason.split()).encode("ascii", "replace").decode()
        pool = _pool_of(worker.backend.load())
        return {POOL_HEADER: pool.value, REASON_HEADER: reason}


class UpstreamPools:
    """The upstreams with and without drafts, and the choice between them."""

    def __init__(
        self,
        fleet: Fleet,
        policy: SpeculationPolicy,
        decisions: Decisions,
        history: AcceptanceHistory,
        on_decision: Callable[[SpeculationPlan], None],
    ) -> None:
        """Use the node's speculation policy.

        Args:
            history: the acceptance of earlier requests, which upstreams report.
            on_decision: a callback for each recorded decision.
        """
        self._fleet = fleet
        self._policy = policy
        self._decisions = decisions
        self._history = history
        self._on_decision = on_decision

    def choose(
        self, request: RequestView, tenant: str, model: str, has_capacity: _HasCapacity
    ) -> PoolDecision | None:
        """Return the pool for a request, or None if all its open upstreams are of one kind.

        Args:
            tenant, model: its tenant, and the name of its model, or empty for any.
            has_capacity: whether an upstream with this usage can run the request now.
        """
        workers = self._fleet.open_among(self._fleet.workers, model)
        if len(workers) < 2:
            return None
        open_upstreams = [(worker, worker.usage) for worker in workers]
        drafting = [
            pair for pair in open_upstreams if _pool_of(pair[1].load) is ReplicaPool.SPECULATING
        ]
        plain = [pair for pair in open_upstreams if _pool_of(pair[1].load) is ReplicaPool.PLAIN]
        if not drafting or not plain:
            return None  # the usual case
        # Upstreams for prompts draft nothing, so their kind does not matter.
        drafting = [pair for pair in drafting if pair[0].role is not Role.PREFILL]
        plain = [pair for pair in plain if pair[0].role is not Role.PREFILL]
        if not drafting or not plain:
            return None
        of_tenant, of_model = self._history.counts(tenant, model, greedy=request.temperature == 0)
        request = replace(request, tenant_drafts=of_tenant, model_drafts=of_model)
        state = _state(drafting, has_capacity)
        choice = choose_pool(request, self._policy, state, _state(plain, has_capacity))
        others = {
            None: [],
            ReplicaPool.PLAIN: drafting,
            ReplicaPool.SPECULATING: plain,
        }[choice.pool]
        avoid = frozenset(worker.worker_id for worker, _ in others)
        return PoolDecision(request, state.load, choice.plan, avoid)

    def record(
        self, request: Entry, routed: Routed, decision: PoolDecision, fallback: str = ""
    ) -> Decision:
        """Record the decision for a request before it is sent to an upstream.

        Args:
            fallback: why another model than the requested one gets the request, or empty.
        """
        self._on_decision(decision.plan)
        return self._decisions.record(
            request.decision_id,
            routed.worker.worker_id,
            decision.request,
            decision.load,
            decision.plan,
            routed.route,
            tenant=request.tenant,
            phases=routed.phases,
            fallback=fallback,
        )

    def record_other(
        self, request: Entry, routed: Routed, view: RequestView, fallback: str = ""
    ) -> Decision:
        """Record that an upstream gets a request without a choice between pools."""
        worker = routed.worker
        plan = SpeculationPlan("upstream", view.mode, None, 0, "the upstream decides")
        return self._decisions.record(
            request.decision_id,
            worker.worker_id,
            view,
            worker.backend.load(),
            plan,
            routed.route,
            tenant=request.tenant,
            phases=routed.phases,
            fallback=fallback,
        )

    def record_drafts(
        self,
        request: Entry,
        view: RequestView,
        decision: Decision | None,
        drafts: SpeculationOutcome,
    ) -> None:
        """Record the drafts that an upstream reports, in the decision and in the history."""
        if decision is not None:
            self._decisions.add_outcome(decision, drafts, choices=request.sequences)
        self._history.add_choice(
            request.tenant,
            request.needs[0].offer,
            greedy=view.temperature == 0,
            drafted=drafts.num_drafted_tokens,
            histogram=drafts.acceptance_histogram,
        )

    def record_move(
        self,
        request: Entry,
        decision: Decision | None,
        lost: str,
        worker: FleetWorker,
        cause: Cause,
        view: RequestView,
    ) -> Decision:
        """Record that another upstream gets a request, or the rest of it, and return its decision.

        Args:
            decision: the decision about the request, or None without one.
            lost: id of the upstream before.
        """
        decision = decision or self.record_other(request, Routed(worker), view)
        move = MoveRecord(lost, worker.worker_id, cause.value, MoveEnd.MOVED)
        self._decisions.add_move(request.decision_id, 0, request.tenant, decision, move)
        return decision


def _pool_of(load: WorkerLoad) -> ReplicaPool:
    return ReplicaPool.SPECULATING if load.proposers else ReplicaPool.PLAIN


def _state(
    workers: Sequence[tuple[FleetWorker, WorkerUsage]], has_capacity: _HasCapacity
) -> UpstreamPoolState:
    """Return the state of the best upstream of a pool, by capacity, price and sequences."""
    ranks = [
        (not has_capacity(at), at.load.price, at.load.running + at.load.waiting)
        for _, at in workers
    ]
    best = min(range(len(workers)), key=ranks.__getitem__)
    return UpstreamPoolState(workers[best][1].load, has_capacity=not ranks[best][0])
