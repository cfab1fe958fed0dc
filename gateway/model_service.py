"""A model of a node: its workers, their queue, and what requests for the model need."""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from random import Random
from typing import cast

from draftgate.backends.generation_defaults import GenerationDefaults
from draftgate.backends.types import Task
from draftgate.gateway.assembly import (
    WaitingRules,
    build_dispatcher,
    build_forwarder,
    loop_time_s,
)
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.cluster.members import Members, Reach
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.values import chains_of
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.flows import Flows
from draftgate.gateway.dispatch.queue import CentralQueue
from draftgate.gateway.dispatch.upstreams.costs import Priced, UpstreamCosts
from draftgate.gateway.dispatch.upstreams.rules import ForwardingRules
from draftgate.gateway.errors import NotOffered, Starting
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.json_lines import JsonLinesFile
from draftgate.gateway.lifecycle import RETRY_STARTING_S, Lifecycle
from draftgate.gateway.logs import log
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.state.store import Store
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.initial_series import create_series
from draftgate.gateway.telemetry.live import ActivityMeter, Recent
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.telemetry.tenant_gauges import follow_queue
from draftgate.gateway.upstream_servers import UpstreamServers
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.quotas import Quota
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.routing.preferences import Preferences
from draftgate.policies.scaling import (
    WITH_MOVES,
    WITHOUT_MOVES,
    DemandView,
    ScalingAdvice,
    ScalingAdvisor,
    ScalingReason,
)
from draftgate.policies.types import Role, WorkerLoad


@dataclass(frozen=True, slots=True)
class NodeParts:
    """What the models of a node share.

    Attributes:
        flows: the flows, whose hops may need different models.
        reach: a function that returns the backend for a worker of another node, or None if the node
            does not search for such workers.
    """

    store: Store
    lifecycle: Lifecycle
    decisions: Decisions
    policy: SpeculationPolicy
    flows: Flows
    reach: Reach | None


class ModelService:
    """A model that a node serves on its own workers and those of other nodes, or its upstreams.

    Models share nothing but the devices of their workers, the flows of clients, and the state of
    the node. Each has its own queue, quotas, metrics and failover.

    Attributes:
        config: the settings of the node for this model.
        fleet: the workers.
        members: discovery of other nodes' workers, or None without a pool.
        meter: measures its requests for the live page.
    """

    def __init__(
        self,
        config: ServeConfig,
        fleet: Fleet,
        parts: NodeParts,
        quotas: Mapping[str, Quota],
        *,
        model_id: str | None = None,
        first_worker: int = 0,
        files: Sequence[JsonLinesFile] = (),
    ) -> None:
        """Build the components without starting them.

        Args:
            quotas: quotas by tenant.
            model_id: name of the model in the pool, or None if its first worker determines it.
            first_worker: number of its first own worker among those of the node.
            files: files of records, which its heartbeat writes.

        Raises:
            ValueError: a policy does not exist.
        """
        self._served: ServedModel | None = None
        self._model_id = model_id
        self._policy = parts.policy
        self._decisions = parts.decisions
        self._lifecycle = parts.lifecycle
        self.config = config
        self.fleet = fleet
        self._first_worker = first_worker
        self._used_s: float | None = None
        self.dispatcher = build_dispatcher(
            fleet,
            parts.store,
            parts.lifecycle,
            parts.decisions,
            parts.policy,
            _rules(config),
            quotas=quotas,
            draw=Random().random,
            flows=parts.flows,
        )
        queue = self.dispatcher.queue
        self.members = None
        if parts.reach is not None and not config.upstream:
            changed = queue.dispatch_waiting
            self.members = Members(fleet, parts.store, parts.reach, changed, model_id)
        self.heartbeat = Heartbeat(
            fleet, parts.store, self.dispatcher, files, self.members, first_worker
        )
        self.metrics = Metrics(self._own_loads, lambda: self.name)
        self._read_gauges()
        budget = RetryBudget(config.upstream_retry_share, config.upstream_retries_per_s)
        self.forwarder = build_forwarder(
            fleet,
            self.dispatcher,
            parts.policy,
            parts.decisions,
            self.metrics,
            budget,
            _forwarding_rules(config),
        )
        self.scaling = Scaling(
            fleet, queue, self.metrics.recent, moves=self.dispatcher.moves.reschedules
        )
        self.servers = UpstreamServers(fleet, queue, self.metrics, config.scale_to_zero_s)
        self.meter = ActivityMeter(
            self.metrics.recent, lambda: len(queue), lambda: self.scaling.advice, lambda: self.name
        )

    @cached_property
    def request_series(self) -> RequestSeries:
        """The series of `metrics` that most requests change."""
        return RequestSeries(self.metrics)

    @property
    def model_id(self) -> str:
        """The name of the model in the pool, or an empty string while unknown."""
        return self._model_id or self.fleet.model_id

    @property
    def name(self) -> str:
        """The name that clients use, or an empty string while unknown."""
        if self._served is not None:
            return self._served.name
        if not self.forwards:
            return ""
        return self.config.first_name or self.fleet.card.model_id

    @property
    def forwards(self) -> bool:
        """Whether the workers, once started, take whole requests, as upstreams do."""
        return not self.fleet.token_ids

    def may_forward(self, name: str) -> bool:
        """Return whether an upstream lists a model, or has not sent its list yet."""
        return self.fleet.upstream_models.may_serve(name)

    @property
    def listed_names(self) -> list[str]:
        """The names for errors that list the models of the node."""
        if self.forwards and not self.config.served_model_name:
            return self.fleet.upstream_models.names_for_errors()
        return [self.name] if self.is_known else []

    @property
    def names(self) -> tuple[str, ...]:
        """All names that clients may use, the first of which is `name`."""
        return (self.name, *self.config.served_model_name[1:])

    @property
    def served(self) -> ServedModel:
        """The model as clients see it.

        Raises:
            Unavailable: no worker has loaded the model.
            NotOffered: the model belongs to an upstream.
        """
        if self.forwards:
            raise NotOffered("this node only forwards requests to an upstream, which has the model")
        if self._served is None:
            self._lifecycle.require_ready()
            raise Starting("the model is still loading", retry_after_s=RETRY_STARTING_S)
        # Other nodes may have replaced the model, with another tokenizer.
        if self._served.tokenizer is not self.fleet.tokenizer:
            self._served = self._described()
        return self._served

    @property
    def is_known(self) -> bool:
        """Whether clients can use the model, or its upstreams."""
        return self._served is not None or self.forwards

    @property
    def tasks(self) -> tuple[Task, ...]:
        """The tasks that the model offers, or nothing while clients cannot use it."""
        return self.fleet.card.capabilities.tasks if self.is_known else ()

    async def start(self, prefix: str) -> None:
        """Load the model, or find a worker of another node.

        Args:
            prefix: prefix of the ids of own workers.

        Raises:
            ImportError, CheckpointError, ValueError: as in `Fleet.start`.
        """
        await self.fleet.start(prefix, self._first_worker)
        self._use_preferences()
        if self.members is not None:
            await self.members.first()
        if not self.forwards:
            self._served = self._described()
            self._log_defaults()
        else:
            self._check_fallbacks()
        create_series(self.metrics, self._policy.name, self.fleet.proposers)

    def _use_preferences(self) -> None:
        """Use the weights and prices of upstreams, if they have any."""
        backends = {one.worker_id: one.backend for one in self.fleet.workers}
        priced = {name: one for name, one in backends.items() if getattr(one, "prices", None)}
        costs = None
        if priced:
            upstreams = cast("Mapping[str, Priced]", priced)
            count = partial(_count_cost, self.metrics)
            self.forwarder.costs = costs = UpstreamCosts(upstreams, self._decisions, count)
        weights = {name: getattr(one, "weight", 1.0) for name, one in backends.items()}
        preferences = Preferences(weights, costs.estimate if costs is not None else None)
        if preferences.has_any:
            self.dispatcher.queue.router.preferences = preferences

    async def stop(self) -> None:
        """Stop the own workers and disconnect from other nodes' workers.

        Open streams end with an error.
        """
        self.fleet.ending = True
        if self.members is not None:
            await self.members.close()
        await self.fleet.stop()
        self.dispatcher.queue.dispatch_waiting()  # fail the requests that still wait

    def update_advice(self) -> None:
        """Update the scaling advice and the metrics that depend on it, about once a second."""
        self.metrics.fold()
        if self.loads():
            self.scaling.update()
        if self.forwards:
            self.servers.update()
        if (advice := self.scaling.advice) is not None:
            self.metrics.set(metric.DESIRED_WORKERS, advice.workers, self.config.pool)

    def loads(self) -> list[WorkerLoad | None]:
        """Return the load of each worker in order, or None for a failed worker."""
        workers = self.fleet.workers if self.is_known else ()
        return [one.backend.load() if one.backend.failure is None else None for one in workers]

    def _own_loads(self) -> dict[str, WorkerLoad]:
        """Return the loads of the node's own workers that have not failed, by name or number."""
        workers = self.fleet.own if self.is_known else ()
        return {
            getattr(one.backend, "name", "") or str(number): one.backend.load()
            for number, one in enumerate(workers)
            if one.backend.failure is None
        }

    def lost_for_s(self) -> float:
        """Return the seconds for which a model of other nodes has had no worker and no request."""
        now_s = loop_time_s()
        used = self.fleet.size or self.fleet.workers or len(self.dispatcher.queue)
        if used or self._used_s is None:
            self._used_s = now_s
        return now_s - self._used_s

    async def start_later(self) -> None:
        """Wait for the first worker of a model that the pool has, and log that clients can use it.

        Run this method as a task.
        """
        await self.start(prefix="")
        log(logging.INFO, "the pool has another model", model=self.name)

    def _described(self) -> ServedModel:
        card = self.fleet.card
        name = self.config.first_name or card.model_id
        fleet = self.fleet
        return ServedModel(
            name,
            fleet.tokenizer,
            card.max_model_len,
            fleet.adapters,
            defaults=self._defaults,
            max_request_tokens=self.config.max_request_tokens,
            describes_tools=not self.config.no_tool_prompt,
            eos_ids=card.eos_ids,
            further_names=self.config.served_model_name[1:],
        )

    def _check_fallbacks(self) -> None:
        """Warn about fallbacks that no upstream lists at present."""
        listed = self.fleet.upstream_models.described()
        named = {name for pair in self.config.fallbacks for name in pair.split("=", 1)}
        if listed and (missing := sorted(named - listed.keys())):
            log(logging.WARNING, "no upstream lists a model of --fallback", models=missing)

    def _log_defaults(self) -> None:
        if given := self._defaults().given():
            words = "requests get sampling parameters that they do not set from the model"
            log(logging.INFO, words, model=self.name, **given)

    def _defaults(self) -> GenerationDefaults:
        """Return the parameters of requests that do not set them.

        The worker with the first id decides, so that all gateways of a pool agree even if its
        workers differ.
        """
        workers = self.fleet.workers or (self.fleet.any,)
        if len(workers) == 1:  # the usual case
            return workers[0].backend.card.defaults
        return min(workers, key=lambda worker: worker.worker_id).backend.card.defaults

    def _read_gauges(self) -> None:
        """Read the gauges of the model when they are needed."""
        queue, fleet, read = self.dispatcher.queue, self.fleet, self.metrics.read
        claims, quotas = queue.claims, self.dispatcher.admission.quotas
        sharing = self.dispatcher.sharing
        read(metric.QUEUED, lambda: len(queue))
        read(metric.WAITING, lambda: len(queue) + self._waiting_on_workers())
        read(metric.WORKER_CLAIMS, lambda: claims.open)
        read(metric.EXPIRED_CLAIMS, lambda: sharing.expired_claims)
        read(metric.QUOTA_RESERVATIONS, lambda: quotas.open)
        read(metric.OPEN_WORKERS, lambda: len(fleet.open))
        follow_queue(self.metrics, queue)

    def _waiting_on_workers(self) -> int:
        """Return the number of sequences that wait on the node's own workers."""
        own = (worker.backend for worker in self.fleet.own)
        return sum(backend.load().waiting for backend in own if backend.failure is None)


def _rules(config: ServeConfig) -> WaitingRules:
    has_roles = any(one.role is not Role.ANY for one in config.upstream)
    return WaitingRules(
        config.ordering,
        config.admission,
        Bounds(config.max_queued, config.queue_timeout_s, config.shed_priority),
        config.routing,
        config.max_resumes,
        shared=config.join is not None,
        moves=not config.no_moves,
        rescheduling=config.rescheduling,
        phases=config.phases,
        prefill_tokens=config.upstream_prefill_tokens if has_roles else 0,
    )


def _count_cost(metrics: Metrics, tenant: str, model: str, cost_usd: float | None) -> None:
    if cost_usd is None:
        metrics.add(metric.UNKNOWN_COSTS, 1, tenant, model)
    else:
        metrics.add(metric.COST, cost_usd, tenant, model)


def _forwarding_rules(config: ServeConfig) -> ForwardingRules:
    preempts = config.upstream_preemptible or any(one.preemptible for one in config.upstream)
    return ForwardingRules(
        config.upstream_kept_bytes,
        config.upstream_stall_s,
        config.max_resumes,
        chains_of(config.fallbacks),
        config.max_preemptions if preempts else 0,
        config.start_timeout_s,
    )


# The scaling advice of a node, from the loads of the pool and from its own queue and requests.


class Scaling:
    """The caller of the scaling policy.

    Use the object only on the thread of the event loop.

    Attributes:
        advice: the present advice, or None before the node had a worker.
    """

    def __init__(
        self, fleet: Fleet, queue: CentralQueue, recent: Recent, *, moves: bool = False
    ) -> None:
        """Start without advice, where streams may move between workers that keep running."""
        self.advice: ScalingAdvice | None = None
        self._advisor = ScalingAdvisor(WITH_MOVES if moves else WITHOUT_MOVES)
        self._fleet = fleet
        self._queue = queue
        self._recent = recent

    def update(self) -> None:
        """Update the advice, and log a change. Call this method about once a second."""
        serving = self._fleet.serving
        view = DemandView(
            [worker.backend.load() for worker in serving if not worker.leaving],
            [worker.backend.load() for worker in serving if worker.leaving],
            len(self._queue),
            self._queue.ordering.work_s,
            self._recent.attainment(),
        )
        advice = self._advisor.update(view, self._queue.now_s())
        if advice == self.advice or advice is None:
            return
        self.advice = advice
        if advice.reason is not ScalingReason.START:
            log(
                logging.INFO,
                "the pool should have another number of workers",
                desired_workers=advice.workers,
                workers=len(view.loads),
                reason=advice.reason.value,
                load_workers=round(advice.load, 2),
            )
