"""Speculation where engines cannot be told: upstreams that draft, and upstreams that do not."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeAlias

from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.policies.capacity import WorkerUsage
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.routing import Route
from draftgate.policies.types import RequestView, SpeculationPlan, WorkerLoad
from draftgate.policies.upstream_speculation import PoolChoice, PoolState, ReplicaPool, choose_pool

POOL_HEADER: Final = "X-Speculation-Pool"
REASON_HEADER: Final = "X-Speculation-Reason"
"""What an answer tells its client: which upstreams its request went to, and why."""

_Fits: TypeAlias = Callable[[WorkerUsage], bool]


@dataclass(frozen=True, slots=True)
class Pooled:
    """The decision for one request.

    Attributes:
        request, load: what the policy saw; the load is that of an upstream which drafts.
        avoid: ids of the upstreams that it goes to only if no other is there.
    """

    request: RequestView
    load: WorkerLoad
    choice: PoolChoice
    avoid: frozenset[str]

    @property
    def plan(self) -> SpeculationPlan:
        """The decision in words."""
        return self.choice.plan

    def headers(self, pool: ReplicaPool) -> Mapping[str, str]:
        """Return what the client is told of an answer from this pool.

        A policy's words may be anybody's, and headers hold one line of ASCII.
        """
        reason = " ".join(self.plan.reason.split()).encode("ascii", "replace").decode()
        return {POOL_HEADER: pool.value, REASON_HEADER: reason}


class Pools:
    """Decides, where there are upstreams of both kinds, and keeps what was decided."""

    def __init__(
        self, fleet: Fleet, policy: SpeculationPolicy, decisions: Decisions, metrics: Metrics
    ) -> None:
        """Use the policy that decides about speculation on this node."""
        self._fleet = fleet
        self._policy = policy
        self._decisions = decisions
        self._metrics = metrics

    def choose(self, request: RequestView, fits: _Fits) -> Pooled | None:
        """Return where a request goes; None where all upstreams that serve are of one kind.

        Args:
            fits: whether an upstream with so much on its hands has room for it.
        """
        there = [(worker, worker.usage) for worker in self._fleet.open]
        drafting = [pair for pair in there if pool_of(pair[1].load) is ReplicaPool.SPECULATING]
        plain = [pair for pair in there if pool_of(pair[1].load) is ReplicaPool.PLAIN]
        if not drafting or not plain:
            return None
        offer = _offer(drafting, fits)
        choice = choose_pool(request, self._policy, offer, _offer(plain, fits))
        others = {None: [], ReplicaPool.PLAIN: drafting, ReplicaPool.SPECULATING: plain}[
            choice.pool
        ]
        avoid = frozenset(worker.worker_id for worker, _ in others)
        return Pooled(request, offer.load, choice, avoid)

    def record(
        self, request_id: str, worker: FleetWorker, pooled: Pooled, route: Route | None
    ) -> None:
        """Keep what was decided for a request that goes to an upstream now."""
        plan = pooled.plan
        self._metrics.add(metric.DECISIONS, 1, plan.policy, plan.proposer or "none")
        self._decisions.record(
            request_id, worker.worker_id, pooled.request, pooled.load, plan, route
        )


def pool_of(load: WorkerLoad) -> ReplicaPool:
    """Return whether an upstream drafts."""
    return ReplicaPool.SPECULATING if load.proposers else ReplicaPool.PLAIN


def _offer(workers: Sequence[tuple[FleetWorker, WorkerUsage]], fits: _Fits) -> PoolState:
    """Return the best that a pool has: with room, at the least price, with the least to do."""
    rooms = [(not fits(at), at.load.price, at.load.running + at.load.waiting) for _, at in workers]
    best = min(range(len(workers)), key=rooms.__getitem__)
    return PoolState(workers[best][1].load, has_capacity=not rooms[best][0])
