"""A node, with a fleet of workers and the components that HTTP handlers need."""

from __future__ import annotations

import asyncio
import logging
import platform
import time
from collections.abc import Callable, Sequence
from functools import cached_property, partial
from pathlib import Path
from random import Random
from typing import Final

from draftgate import __version__
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.proof import secret_of
from draftgate.backends.peer.tokenizer import Tokenizers
from draftgate.gateway.accounts import Accounts, read_accounts
from draftgate.gateway.assembly import WaitingRules, build_dispatcher, build_forwarder
from draftgate.gateway.cluster.access import peer_access
from draftgate.gateway.cluster.address import advertised_url, is_local
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.cluster.members import Members
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.dispatch.admission import Bounds
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.embedding_cache import EmbeddingCache
from draftgate.gateway.errors import NotOffered
from draftgate.gateway.fleet import Fleet, FleetWorker
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.processes.siblings import Siblings
from draftgate.gateway.reloading import WatchedFiles
from draftgate.gateway.scaling import Scaling
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.state.guarded_responses import open_response_store
from draftgate.gateway.state.store import Store, WorkerReport
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.audit import AuditLog
from draftgate.gateway.telemetry.flow_metrics import FlowMetrics
from draftgate.gateway.telemetry.initial_series import create_series
from draftgate.gateway.telemetry.json_lines import JsonLinesFile
from draftgate.gateway.telemetry.live import Activity, Live
from draftgate.gateway.telemetry.logs import log
from draftgate.gateway.telemetry.metrics import Metrics
from draftgate.gateway.telemetry.request_series import RequestSeries
from draftgate.gateway.telemetry.tracing import Tracing
from draftgate.gateway.telemetry.worker_list import ProcessStreams, process_streams
from draftgate.policies.registry import speculation_policy
from draftgate.policies.resilience.retry_budget import RetryBudget
from draftgate.policies.types import WorkerLoad

_UNSHARED: Final = "--peer-secret-env is not set"


class Node:
    """The components of a node.

    Attributes:
        key_files: the file of API keys, which may change while the node runs.
        audit: the audit log, or None.
        embeddings: embeddings of earlier texts.
        port: the port on which the node listens.
        siblings: the other processes of the node, or None if it has one process.
        peer_access: authenticates nodes that may use its workers, or None if no node may.
    """

    def __init__(self, config: ServeConfig, fleet: Fleet, store: Store, tracing: Tracing) -> None:
        """Build the components without starting them.

        Raises:
            ValueError: a policy does not exist, the keys cannot be read, a file cannot be written,
                or the peer secret is missing.
        """
        self._served: ServedModel | None = None
        self.config = config
        self.fleet = fleet
        self.store = store
        self.tracing = tracing
        self.responses = open_response_store(
            config.join, config.pool, config.response_store_bytes, config.response_store_ttl_s
        )
        self.embeddings = EmbeddingCache(config.embedding_cache_bytes)
        self.lifecycle = Lifecycle()
        self.policy = speculation_policy(config.speculation)
        decisions_file = _file("--decisions-file", config.decisions_file)
        audit_file = _file("--audit-file", config.audit_file)
        self.decisions = Decisions(decisions_file, time.time)
        self.audit = None if audit_file is None else AuditLog(audit_file, time.time)
        self.key_files = _key_files(config)
        self.accounts = self.key_files.read()
        self.peer_access = peer_access(config, keys=self.accounts.required)
        self.port = config.port
        self.siblings: Siblings | None = None
        self.dispatcher = build_dispatcher(
            fleet,
            store,
            self.lifecycle,
            self.decisions,
            self.policy,
            _rules(config),
            quotas=self.accounts.quotas,
            draw=Random().random,
        )
        queue = self.dispatcher.queue
        self.members = _members(config, fleet, store, queue.dispatch_waiting)
        self.heartbeat = Heartbeat(
            *(fleet, store, self.dispatcher),
            [file for file in (decisions_file, audit_file) if file is not None],
            self.members,
        )
        self.metrics = Metrics(lambda: self._loads(fleet.own), lambda: self.model_name)
        self.dispatcher.flows.observer = FlowMetrics(self.metrics)
        self._read_gauges()
        budget = RetryBudget(config.upstream_retry_share, config.upstream_retries_per_s)
        self.forwarder = build_forwarder(
            fleet, self.dispatcher, self.policy, self.decisions, self.metrics, budget
        )
        self.scaling = Scaling(fleet, queue, self.metrics.recent)
        self.live = Live(
            lambda: self._loads(fleet.workers),
            self.metrics.recent,
            lambda: len(queue),
            advice=lambda: self.scaling.advice,
        )

    @cached_property
    def request_series(self) -> RequestSeries:
        """The series of `metrics` that most requests change."""
        return RequestSeries(self.metrics)

    @property
    def state(self) -> NodeState:
        """The state of the node, after checking its workers."""
        self.lifecycle.note_failure(self.fleet.failure)
        return self.lifecycle.state

    @property
    def model_name(self) -> str:
        """The name that clients use, or an empty string while unknown."""
        if self._served is not None:
            return self._served.name
        if not self.fleet.forwards:
            return ""
        return self.config.served_model_name or self.fleet.card.model_id

    @property
    def served(self) -> ServedModel:
        """The model as clients see it.

        Raises:
            Unavailable: the model is not loaded.
            NotOffered: the model belongs to an upstream.
        """
        if self._served is None:
            self.lifecycle.require_ready()
            if self.fleet.forwards:
                raise NotOffered(
                    "this node only forwards requests to an upstream, which has the model"
                )
            raise RuntimeError("the node is ready without a model")
        return self._served

    def take_sample(self, others: Sequence[Activity] = ()) -> None:
        """Update the scaling advice, and take a sample for the live page, as `Live.take` does."""
        if self._loads(self.fleet.workers):
            self.scaling.update()
        if (advice := self.scaling.advice) is not None:
            self.metrics.set(metric.DESIRED_WORKERS, advice.workers, self.config.pool)
        self.metrics.before_reading()
        self.live.take(others)

    def streams(self) -> ProcessStreams:
        """Return the streams that this process has dispatched, and their latest moves."""
        return process_streams(self.dispatcher.moves, self.decisions)

    async def start(self) -> None:
        """Load the model, or find a worker of another node.

        The node is ready when this method returns.

        Raises:
            ImportError, CheckpointError, ValueError: as in `Fleet.start`.
        """
        join = self.config.join
        name = None if join is None else await self._advertise(join)
        await self.fleet.start(name)
        if self.members is not None:
            await self.members.first()
        if not self.fleet.forwards:
            card = self.fleet.card
            name = self.config.served_model_name or card.model_id
            self._served = ServedModel(name, self.fleet.tokenizer, card.max_model_len)
        self.metrics.set(metric.BUILD, 1, __version__, platform.python_version())
        create_series(self.metrics, self.policy.name, self.fleet.proposers)
        if self.lifecycle.state is NodeState.STARTING:
            self.lifecycle.move_to(NodeState.READY)

    async def stop(self) -> None:
        """Stop the node's own workers and disconnect from other nodes' workers.

        Open streams end with an error.
        """
        self.fleet.ending = True
        if self.members is not None:
            await self.members.close()
        await self.fleet.stop()
        self.dispatcher.flows.close()
        self.dispatcher.queue.dispatch_waiting()  # fail the requests that still wait

    def use_accounts(self, accounts: Accounts) -> None:
        """Use other API keys, with their quotas and limits, for all further requests.

        Raises:
            ValueError: the node would begin or cease to require keys, which needs a restart.
        """
        if accounts.required != self.accounts.required:
            raise ValueError("a node cannot begin or cease to require API keys while it runs")
        self.accounts = accounts
        self.dispatcher.admission.quotas.change(accounts.quotas)

    async def _advertise(self, join: str) -> str:
        """Determine this node's URL for other nodes, and return the prefix of its workers' ids.

        The prefix does not change when the node restarts at the same address. The new epoch of a
        worker then immediately ends the leases of the old epoch.

        Raises:
            ValueError: the URL cannot be determined.
        """
        url = await advertised_url(self.config, self.port)
        if self.peer_access is not None:
            self.heartbeat.url = url
        if not self.config.no_worker:
            if self.peer_access is None:
                log(logging.WARNING, "no other node may use this node's workers", why=_UNSHARED)
            elif is_local(url, join):
                log(logging.WARNING, "no other machine can reach this node's workers", address=url)
        return url.partition("://")[2]

    def _read_gauges(self) -> None:
        """Read the gauges of the node when they are needed."""
        queue, fleet, read = self.dispatcher.queue, self.fleet, self.metrics.read
        read(metric.QUEUED, lambda: len(queue))
        read(metric.WAITING, lambda: len(queue) + self._waiting_on_workers())
        read(metric.STORE_OUT, lambda: self.store.outage is not None)
        claims, quotas = queue.claims, self.dispatcher.admission.quotas
        sharing = self.dispatcher.sharing
        read(metric.WORKER_CLAIMS, lambda: claims.open)
        read(metric.EXPIRED_CLAIMS, lambda: sharing.expired_claims)
        read(metric.QUOTA_RESERVATIONS, lambda: quotas.open)
        read(metric.OPEN_WORKERS, lambda: len(fleet.open))
        read(metric.TASKS, lambda: len(asyncio.all_tasks()))

    def _waiting_on_workers(self) -> int:
        """Return the number of sequences that wait on the node's own workers."""
        own = (worker.backend for worker in self.fleet.own)
        return sum(backend.load().waiting for backend in own if backend.failure is None)

    def _loads(self, workers: Sequence[FleetWorker]) -> list[WorkerLoad | None]:
        """Return the load of each worker in order, or None for a failed worker."""
        if self._served is None and not self.fleet.forwards:
            return []
        return [
            worker.backend.load() if worker.backend.failure is None else None for worker in workers
        ]


def _rules(config: ServeConfig) -> WaitingRules:
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
    )


def _members(
    config: ServeConfig, fleet: Fleet, store: Store, changed: Callable[[FleetWorker], None]
) -> Members | None:
    """Return the discovery of other nodes' workers, or None without a pool or with upstreams.

    Raises:
        ValueError: the peer secret is missing.
    """
    if config.join is None or config.upstream:
        return None
    secret, tokenizers = secret_of(config.peer_secret_env), Tokenizers()

    def reach(report: WorkerReport) -> PeerBackend:
        return PeerBackend(report.address, secret, report.epoch, tokenizers=tokenizers)

    return Members(fleet, store, reach, changed)


def _file(setting: str, path: str | None) -> JsonLinesFile | None:
    """Return the file of a setting, or None without a path.

    Raises:
        ValueError: the file cannot be written.
    """
    return None if path is None else JsonLinesFile(Path(path), setting)


def _key_files(config: ServeConfig) -> WatchedFiles[Accounts]:
    """Return the file of API keys, if one is configured, with the keys of the environment."""
    path = None if config.api_keys_file is None else Path(config.api_keys_file)
    read = partial(read_accounts, path, config.api_keys, config.metrics_keys)
    return WatchedFiles("the API keys", [] if path is None else [path], read)
