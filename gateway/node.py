"""A node, with its models and the components that HTTP handlers need."""

from __future__ import annotations

import asyncio
import logging
import platform
import secrets
import time
from collections.abc import AsyncIterator, Callable, Iterator, Sequence
from contextlib import asynccontextmanager, suppress
from functools import partial
from statistics import fmean
from typing import Final

from msgspec.structs import replace

from draftgate import __version__
from draftgate.gateway.accounts import Accounts
from draftgate.gateway.assembly import loop_time_s
from draftgate.gateway.batches.blobs import open_blobs
from draftgate.gateway.batches.files import Files
from draftgate.gateway.budgets import Budgets
from draftgate.gateway.cluster.access import (
    advertised_url,
    is_local,
    peer_access,
    reach_of,
    session_secret,
)
from draftgate.gateway.cluster.heartbeat import Heartbeat
from draftgate.gateway.cluster.siblings import Siblings
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import ModelPlan
from draftgate.gateway.config.values import chains_of
from draftgate.gateway.dispatch.decisions import Decisions
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.dispatch.flows import Flows
from draftgate.gateway.embedding_cache import EmbeddingCache
from draftgate.gateway.fleet import BackendFactory, Fleet, FleetWorker
from draftgate.gateway.json_lines import lines_file
from draftgate.gateway.keys import Keys, key_files
from draftgate.gateway.lifecycle import Lifecycle, NodeState
from draftgate.gateway.logs import log
from draftgate.gateway.model_service import ModelService, NodeParts
from draftgate.gateway.served_model import ServedModel
from draftgate.gateway.state.guarded.store import open_response_store
from draftgate.gateway.state.store import Store, StoreError
from draftgate.gateway.state.values import FORGET_S
from draftgate.gateway.telemetry import metric_definitions as metric
from draftgate.gateway.telemetry.audit import AuditLog
from draftgate.gateway.telemetry.live import Activity, Live
from draftgate.gateway.telemetry.metrics import Metrics, Row
from draftgate.gateway.telemetry.request_facts import LatestRequests
from draftgate.gateway.telemetry.request_series import count_flow_event
from draftgate.gateway.telemetry.worker_list import ProcessStreams, process_streams
from draftgate.gateway.tracing import Tracing
from draftgate.gateway.usage import Usage
from draftgate.policies.registry import speculation_policy

_UNSHARED: Final = "--peer-secret-env is not set"

FIND_S: Final = 2.0
"""Seconds for which a node that starts waits for the other models of its pool.

The store is read once a second. A model that takes longer is available later. (Chosen, not
tuned.)"""


class Node:
    """The components of a node.

    Attributes:
        models: the models, `MODEL` first. A node of a pool also has the models of other nodes.
        key_files: the file of API keys, which may change while the node runs.
        keys: these keys, and those that operators have created.
        accounts: the accounts of all keys that are accepted now.
        on_accounts: a callback after a change of them.
        requests: the latest requests of clients.
        audit: the audit log, or None.
        budgets: the spending of keys and teams.
        usage: what keys have used of each model.
        files: the files and batches of clients, or None if the node stores none.
        session_secret: signs the sessions of browsers.
        embeddings: embeddings of earlier texts.
        port: the port on which the node listens.
        fallbacks: the models that get the requests for a model in turn if it cannot respond.
        siblings: the other processes of the node, or None if it has one process.
        peer_access: authenticates nodes that may use its workers, or None if no node may.
    """

    def __init__(
        self,
        config: ServeConfig,
        fleets: Sequence[tuple[ModelPlan, Fleet]],
        store: Store,
        tracing: Tracing,
    ) -> None:
        """Build the components without starting them.

        Args:
            fleets: the models with their workers, `MODEL` first.

        Raises:
            ValueError: a policy does not exist, the keys cannot be read, a file cannot be written,
                or the peer secret is missing.
        """
        self.config = config
        self.store = store
        self.tracing = tracing
        self.responses = open_response_store(
            config.join, config.pool, config.response_store_bytes, config.response_store_ttl_s
        )
        self.files = None if config.files is None else Files(open_blobs(config.files), time.time)
        self.budgets = Budgets(store, time.time)
        self.usage = Usage(store, time.time)
        self.embeddings = EmbeddingCache(config.embedding_cache_bytes)
        self.lifecycle = Lifecycle()
        self.policy = speculation_policy(config.speculation)
        decisions_file = lines_file("--decisions-file", config.decisions_file)
        audit_file = lines_file("--audit-file", config.audit_file)
        self.decisions = Decisions(decisions_file, time.time)
        self.requests = LatestRequests()
        self.audit = None if audit_file is None else AuditLog(audit_file, time.time)
        self.key_files = key_files(config)
        self.keys = Keys(self.key_files.read(), store, time.time)
        self.accounts = self.keys.accounts
        self.keys.on_change = self._use_accounts
        self.on_accounts: Callable[[], None] = lambda: None
        self.peer_access = peer_access(config, keys=self.accounts.required)
        self.session_secret = session_secret(config)
        self.port = config.port
        self.fallbacks = chains_of(config.fallbacks)
        self.siblings: Siblings | None = None
        self._flows = Flows(store, loop_time_s)
        self._parts = NodeParts(
            store,
            self.lifecycle,
            self.decisions,
            self.policy,
            self._flows,
            reach_of(config),
        )
        self._files = [file for file in (decisions_file, audit_file) if file is not None]
        self.models = self._own_models(fleets)
        if (members := self.models[0].members) is not None:
            members.on_other_model = self._add_model
        self._flows.watch = partial(count_flow_event, self.metrics)
        self.budgets.on_spent = self._set_spent
        self._read_gauges()
        self._beats: dict[ModelService, asyncio.Task[None]] | None = None  # while they run
        self._starting = set[asyncio.Task[None]]()  # models of other nodes
        self._opens = False
        self.live = Live(
            lambda: [load for model in self.models for load in model.loads()],
            lambda: [model.meter for model in self.models],
        )

    @property
    def state(self) -> NodeState:
        """The state of the node, after checking its workers."""
        self.lifecycle.note_failure(self.failure)
        return self.lifecycle.state

    @property
    def failure(self) -> str | None:
        """The reason why a model of this node has lost its last own worker, or None."""
        failures = (model.fleet.failure for model in self.models)
        return next((failure for failure in failures if failure is not None), None)

    @property
    def in_flight(self) -> int:
        """Number of client requests that have arrived and not ended."""
        return self.lifecycle.in_flight.requests

    @property
    def progress(self) -> float:
        """The mean progress of loading of the models, between 0 and 1."""
        return fmean(model.fleet.progress for model in self.models)

    @property
    def fleet(self) -> Fleet:
        """The workers of the first model."""
        return self.models[0].fleet

    @property
    def dispatcher(self) -> Dispatcher:
        """The dispatcher of the first model."""
        return self.models[0].dispatcher

    @property
    def heartbeat(self) -> Heartbeat:
        """The heartbeat of the first model, which also writes the files of records."""
        return self.models[0].heartbeat

    @property
    def metrics(self) -> Metrics:
        """The metrics of the first model and of the node."""
        return self.models[0].metrics

    @property
    def served(self) -> ServedModel:
        """The first model as clients see it.

        Raises:
            Unavailable: the model is not loaded.
            NotOffered: the model belongs to an upstream.
        """
        return self.models[0].served

    def model_named(self, name: str) -> ModelService | None:
        """Return what serves the model or the adapter of this name, or None.

        A model of this node comes before one of the same name at an upstream.
        """
        for model in self.models:
            if model.serves(name):
                return model
        for model in self.models:
            if not model.is_known:
                continue
            if name in model.fleet.adapters() or (model.forwards and model.may_forward(name)):
                return model
        return None

    @property
    def may_miss_models(self) -> bool:
        """Whether the pool or upstreams may have models that this node does not know yet."""
        members = self.models[0].members
        if members is not None and members.may_miss:
            return True
        return any(model.config.upstream and not model.is_known for model in self.models)

    def workers(self) -> Iterator[tuple[ModelService, FleetWorker]]:
        """Yield all workers with their models."""
        return ((model, worker) for model in self.models for worker in model.fleet.workers)

    def own_workers(self) -> list[tuple[ModelService, FleetWorker]]:
        """Return this node's own workers, in the order of their numbers."""
        return [(model, worker) for model, worker in self.workers() if worker.own]

    def take_sample(self, others: Sequence[Activity] = ()) -> None:
        """Update the scaling advice, and take a sample for the live page, as `Live.take` does."""
        self._forget_models()
        for model in self.models:
            model.update_advice()
        self.live.take(others)

    def streams(self) -> ProcessStreams:
        """Return the streams that this process has dispatched, and their latest moves."""
        return process_streams([model.dispatcher.moves for model in self.models], self.decisions)

    def metric_rows(self) -> list[Row]:
        """Return the metrics of all models of this process."""
        return [row for model in self.models for row in model.metrics.snapshot()]

    async def start(self) -> None:
        """Load the models, or find workers of other nodes.

        The node is ready, and serves what it has, as soon as the first model is loaded or the
        upstreams have been asked for their models. All models are loaded when this method returns.

        Raises:
            ImportError, CheckpointError, ValueError: as in `Fleet.start`.
        """
        join = self.config.join
        if join is not None:
            prefix = await self._advertise(join)
        else:
            prefix = f"w-{secrets.token_hex(4)}"
        # Own models share devices, and measure the memory that is left, so they load in turn.
        own = [model for model in self.models if not model.config.upstream]
        upstreams = [model for model in self.models if model.config.upstream]
        starting = [
            asyncio.create_task(self._start_models(own, prefix)),
            asyncio.create_task(self._start_models(upstreams, prefix if join is not None else "")),
        ]
        try:
            await asyncio.gather(*starting)
        finally:
            for task in starting:
                task.cancel()
        self._check_fallbacks()

    async def _start_models(self, models: Sequence[ModelService], prefix: str) -> None:
        """Load some models in turn, each of which serves at once.

        Args:
            prefix: prefix of the ids of workers, or empty for the names of upstreams.
        """
        for model in models:
            await model.start(prefix)
            # The first model of a pool node finds the other ones of the pool.
            if model is self.models[0] or self.models[0].members is None:
                await self._open()
            if self._beats is not None:
                self._beats[model] = _beat(model)

    async def _open(self) -> None:
        """Accept requests from now on. Only the first call has an effect."""
        if self._opens:
            return
        self._opens = True
        await self._find_models()
        await self._join_store()
        self.metrics.set(metric.BUILD, 1, __version__, platform.python_version())
        if self.lifecycle.state is NodeState.STARTING:
            self.lifecycle.move_to(NodeState.READY)

    async def stop(self) -> None:
        """Stop the node's own workers and disconnect from other nodes' workers.

        Open streams end with an error.
        """
        for task in self._starting:
            task.cancel()
        await asyncio.gather(*(model.stop() for model in self.models))
        self._flows.close()
        with suppress(StoreError):
            await self.usage.report()

    @asynccontextmanager
    async def beating(self) -> AsyncIterator[None]:
        """Run the heartbeats of all models, once they are loaded, until the block ends."""
        self._beats = {model: _beat(model) for model in self.models if model.is_known}
        try:
            yield
        finally:
            beats, self._beats = self._beats, None
            for beat in beats.values():
                beat.cancel()
            await asyncio.gather(*beats.values(), return_exceptions=True)

    async def leave(self) -> None:
        """Withdraw the workers from the pool. Heartbeats then only renew leases."""
        for model in self.models:
            await model.heartbeat.leave()

    def _use_accounts(self, accounts: Accounts) -> None:
        """Use other API keys, with their quotas and limits, for all further requests."""
        self.accounts = accounts
        for model in self.models:
            model.dispatcher.admission.quotas.change(accounts.quotas)
        self.on_accounts()

    def _set_spent(self, owner: str, usd: float) -> None:
        self.metrics.set(metric.BUDGET_SPENT, usd, owner)

    def _own_models(self, fleets: Sequence[tuple[ModelPlan, Fleet]]) -> list[ModelService]:
        """Return the models that the settings name, and the upstreams."""
        models: list[ModelService] = []
        number = 0
        for plan, fleet in fleets:
            models.append(
                ModelService(
                    plan.config,
                    fleet,
                    self._parts,
                    self.accounts.quotas,
                    model_id=plan.name,
                    first_worker=number,
                    files=() if models else self._files,
                )
            )
            number += fleet.size
        return models

    def _add_model(self, model_id: str) -> None:
        """Serve a model that only other nodes of the pool have."""
        if any(model.model_id == model_id for model in self.models):
            return
        config = replace(self.config, no_worker=True, served_model_name=())
        model = ModelService(
            config, Fleet(_no_factory, ()), self._parts, self.accounts.quotas, model_id=model_id
        )
        self.models.append(model)
        task = asyncio.create_task(model.start_later(), name="find a model")
        self._starting.add(task)
        task.add_done_callback(self._starting.discard)
        if self._beats is not None:
            self._beats[model] = _beat(model)

    def _forget_models(self) -> None:
        """Drop the models of other nodes that have had no worker for `FORGET_S` seconds."""
        for model in self.models[1:]:
            if model.lost_for_s() > FORGET_S:
                self.models.remove(model)
                log(logging.INFO, "the pool has no worker of a model", model=model.model_id)
                if self._beats is not None:
                    self._beats.pop(model).cancel()
                self._starting.add(task := asyncio.create_task(model.stop()))
                task.add_done_callback(self._starting.discard)

    async def _find_models(self) -> None:
        """Wait a moment for the models that only other nodes have."""
        members = self.models[0].members
        if members is None:
            return
        await members.refresh()
        if self._starting:
            await asyncio.wait(self._starting, timeout=FIND_S)
        members.settle()

    def _check_fallbacks(self) -> None:
        """Warn about models with fallbacks, and about fallbacks, that nothing serves at present."""
        named = {*self.fallbacks, *(name for chain in self.fallbacks.values() for name in chain)}
        if missing := sorted(name for name in named if self.model_named(name) is None):
            words = "nothing serves a model of --fallback at present"
            log(logging.WARNING, words, models=missing)

    async def _join_store(self) -> None:
        """Prepare the store for the first requests, and learn how many nodes share the quotas."""
        await self.store.warm_up()
        with suppress(StoreError):  # `Keys.syncing` tries again
            await self.keys.sync()
        for model in self.models:
            await model.dispatcher.admission.quotas.renew()

    async def _advertise(self, join: str) -> str:
        """Determine this node's URL for other nodes, and return the prefix of its workers' ids.

        The prefix does not change when the node restarts at the same address. The new epoch of a
        worker then immediately ends the leases of the old epoch.

        Raises:
            ValueError: the URL cannot be determined.
        """
        url = await advertised_url(self.config, self.port)
        if self.peer_access is not None:
            for model in self.models:
                model.heartbeat.url = url
        if not self.config.no_worker:
            if self.peer_access is None:
                log(logging.WARNING, "no other node may use this node's workers", why=_UNSHARED)
            elif is_local(url, join):
                log(logging.WARNING, "no other machine can reach this node's workers", address=url)
        return url.partition("://")[2]

    def _read_gauges(self) -> None:
        """Read the gauges of the node when they are needed."""
        self.metrics.read(metric.STORE_OUT, lambda: self.store.outage is not None)
        self.metrics.read(metric.TASKS, lambda: len(asyncio.all_tasks()))


def _beat(model: ModelService) -> asyncio.Task[None]:
    return asyncio.create_task(model.heartbeat.run(), name="heartbeat")


def _no_factory() -> BackendFactory:
    raise AssertionError("a model of other nodes has no own workers")
