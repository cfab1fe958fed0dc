"""The assembly of a dispatcher and a forwarder, for nodes and simulations."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Final

from draftgate.gateway.dispatch.admission import DEFAULT_BOUNDS, AdmissionController, Bounds
from draftgate.gateway.dispatch.claims import Claims
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.flows import Flows
from draftgate.gateway.dispatch.kv_pulls import KvPulls
from draftgate.gateway.dispatch.leases import Leases
from draftgate.gateway.dispatch.placement import Placer
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.quotas import Quotas
from draftgate.gateway.dispatch.rescheduling import Rescheduler
from draftgate.gateway.dispatch.routing import Router
from draftgate.gateway.dispatch.sharing import Sharing
from draftgate.gateway.dispatch.upstreams.forwarder import Forwarder
from draftgate.gateway.dispatch.upstreams.pools import UpstreamPools
from draftgate.gateway.dispatch.upstreams.prefixes import UpstreamPrefixes
from draftgate.gateway.dispatch.upstreams.rules import ForwardingRules
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.lifecycle import Lifecycle
from draftgate.gateway.state.store import Store
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.policies.admission.appointments import Appointments
from draftgate.policies.ordering.single import ReturningFirst
from draftgate.policies.phases.apart import UpstreamRoles
from draftgate.policies.protocols import SharesAppointments, SpeculationPolicy
from draftgate.policies.quotas import Quota
from draftgate.policies.registry import (
    admission_policy,
    ordering_policy,
    phases_policy,
    rescheduling_policy,
    routing_policy,
)
from draftgate.policies.resilience.failover import MOST_RESUMES
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.routing.types import Draw
from draftgate.policies.speculation.acceptance_history import AcceptanceHistory
from draftgate.policies.types import SpeculationPlan

BINDINGS: Final = ("late", "early")
"""The values of `WaitingRules.binding`."""


@dataclass(frozen=True, slots=True)
class WaitingRules:
    """The rules of queue, admission and routing.

    Attributes:
        ordering, admission, routing, rescheduling, phases: names of policies.
        bounds: bounds of the queue.
        most_resumes: maximum number of times that a request may resume on another worker.
        binding: `late`, or `early` to send each request to a worker at its arrival, where it
            queues.
        shared: whether other gateways use the same workers, which makes leases binding.
        moves: whether the streams of a worker that is leaving move to other workers.
        prefill_tokens: uncached prompt tokens from which upstreams with roles divide a request, or
            0 without such upstreams, where `phases` decides.
    """

    ordering: str = "fair"
    admission: str = "deadline"
    bounds: Bounds = DEFAULT_BOUNDS
    routing: str = "least_cost"
    most_resumes: int = MOST_RESUMES
    shared: bool = False
    moves: bool = True
    rescheduling: str = "off"
    binding: str = "late"
    phases: str = "together"
    prefill_tokens: int = 0


def loop_time_s() -> float:
    """Return the time of the running event loop, which is virtual in a simulation."""
    return asyncio.get_running_loop().time()


def build_dispatcher(  # noqa: PLR0913 - the parts of a node that a dispatcher uses
    fleet: Fleet,
    store: Store,
    lifecycle: Lifecycle,
    decisions: Decisions,
    policy: SpeculationPolicy,
    rules: WaitingRules,
    *,
    quotas: Mapping[str, Quota],
    draw: Draw,
    flows: Flows | None = None,
) -> Dispatcher:
    """Return the dispatcher of a fleet, which may start later.

    Args:
        policy: the speculation policy.
        quotas: quotas by tenant. Other tenants have no quota.
        draw: the source of randomness for routing.
        flows: the flows of a node with several models, or None for flows on this fleet alone.

    Raises:
        ValueError: a policy does not exist.
    """
    ordering = ReturningFirst(partial(ordering_policy, rules.ordering))
    routing, bounds = routing_policy(rules.routing), rules.bounds
    phases = phases_policy(rules.phases)
    if phases.separates and not rules.moves:
        raise ValueError(f"the phases policy {rules.phases} moves streams: remove --no-moves")
    if rules.prefill_tokens:
        phases = UpstreamRoles(rules.prefill_tokens)
    router = Router(routing, draw, KvPulls(loop_time_s), phases)
    claims = Claims(fleet, store)
    queue = CentralQueue(
        fleet,
        ordering,
        router,
        claims,
        loop_time_s,
        bounds.timeout_s,
        binds_early=rules.binding == "early",
    )
    policy_of_admission = admission_policy(rules.admission)
    history = AcceptanceHistory()
    placer = Placer(fleet, policy, decisions, history, reads_prompts=routing.reads_prompts)
    leases = Leases(store, shared=rules.shared)
    if isinstance(policy_of_admission, SharesAppointments):
        appointments = policy_of_admission.appointments
    else:
        appointments = Appointments(most=0)

    model = partial(getattr, fleet, "model_id")
    sharing = Sharing(store, history, appointments, loop_time_s, model)
    controller = AdmissionController(
        fleet,
        queue,
        policy_of_admission,
        Quotas(store, quotas, loop_time_s, model),
        bounds,
        loop_time_s,
        on_refusal=sharing.note_refusal if rules.shared else None,
    )
    dispatcher = Dispatcher(
        fleet,
        lifecycle,
        leases,
        placer,
        queue,
        controller,
        sharing,
        flows or Flows(store, loop_time_s),
        rescheduler=Rescheduler(rescheduling_policy(rules.rescheduling), fleet, queue, store),
        most_resumes=rules.most_resumes,
    )
    dispatcher.moves.enabled = rules.moves
    return dispatcher


def build_forwarder(
    fleet: Fleet,
    dispatcher: Dispatcher,
    policy: SpeculationPolicy,
    decisions: Decisions,
    metrics: Metrics,
    budget: RetryBudget,
    rules: ForwardingRules,
) -> Forwarder:
    """Return the forwarder of a fleet of upstreams, which shares the queue of its dispatcher.

    Args:
        policy: the speculation policy, which chooses between upstreams with and without drafts.
        budget: the budget of retries.
        rules: when streams continue on another upstream.
    """

    def on_decision(plan: SpeculationPlan) -> None:
        metrics.add(metric.DECISIONS, 1, plan.policy, plan.proposer or "none")

    def on_retry(cause: str, allowed: bool) -> None:
        metrics.add(metric.RETRIES, 1, cause, "allowed" if allowed else "denied")

    pools = UpstreamPools(fleet, policy, decisions, dispatcher.sharing.history, on_decision)
    count = partial(metrics.add, metric.PREDICTED_CACHED_TOKENS)
    prefixes = UpstreamPrefixes(loop_time_s, count, dispatcher.queue.router.promises)
    return Forwarder(
        fleet,
        dispatcher.queue,
        dispatcher.admission,
        pools,
        budget,
        prefixes=prefixes,
        on_retry=on_retry,
        watchdog=dispatcher.watchdog,
        rules=rules,
    )
