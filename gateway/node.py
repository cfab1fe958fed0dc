"""A node: a fleet of workers with everything a handler needs around it. No HTTP here."""

from __future__ import annotations

import platform
import secrets
import time
from pathlib import Path
from random import Random

from gateway import __version__
from gateway.accounts import Accounts, read_accounts
from gateway.assembly import WaitingRules, build_dispatcher
from gateway.config import ServeConfig
from gateway.dispatch.admission import Bounds
from gateway.dispatch.decisions import Decisions
from gateway.errors import NotOffered
from gateway.fleet import Fleet
from gateway.forwarding.forwarder import Forwarder
from gateway.heartbeat import Heartbeat
from gateway.lifecycle import Lifecycle, NodeState
from gateway.peer_access import peer_access
from gateway.served import Served
from gateway.state.store import Store
from gateway.telemetry import figures
from gateway.telemetry.live import Live
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import Tracing
from policies.registry import speculation_policy
from policies.types import WorkerLoad


class Node:
    """What this process consists of.

    Attributes:
        epoch: tells this life of the node from those before and after a restart; later ones are
            greater, as texts.
        peer_access: which other nodes may use its workers; None if none may.
    """

    def __init__(self, config: ServeConfig, fleet: Fleet, store: Store, tracing: Tracing) -> None:
        """Join the parts; nothing starts yet.

        Raises:
            ValueError: the configured policy does not exist, the keys cannot be read, or the
                peers' secret is not there.
        """
        self._served: Served | None = None
        self.config = config
        self.fleet = fleet
        self.store = store
        self.tracing = tracing
        self.lifecycle = Lifecycle()
        self.policy = speculation_policy(config.speculation)
        path = None if config.decisions_file is None else Path(config.decisions_file)
        self.decisions = Decisions(path, time.time)
        self.accounts = _accounts(config)
        self.epoch = _new_epoch()
        self.peer_access = peer_access(config, keys=self.accounts.required)
        bounds = Bounds(config.max_queued, config.queue_timeout_s, config.shed_priority)
        rules = WaitingRules(
            config.ordering, config.admission, bounds, config.routing, config.max_resumes
        )
        self.dispatcher = build_dispatcher(
            fleet,
            store,
            self.lifecycle,
            self.decisions,
            self.policy,
            rules,
            quotas={account.name: account.quota for account in self.accounts},
            draw=Random().random,
        )
        self.heartbeat = Heartbeat(
            fleet, store, self.dispatcher.queue, self.dispatcher.leases, self.decisions
        )
        self.forwarder = Forwarder(fleet, self.dispatcher.queue, self.dispatcher.admission)
        self.metrics = Metrics(self._loads, lambda: self.model_name)
        self.live = Live(self._loads, self.metrics.recent, lambda: len(self.dispatcher.queue))

    @property
    def state(self) -> NodeState:
        """The state, after asking the workers whether one of them is well."""
        self.lifecycle.note_failure(self.fleet.failure)
        return self.lifecycle.state

    @property
    def model_name(self) -> str:
        """The name clients use; empty while nobody knows it."""
        if self._served is not None:
            return self._served.name
        if not self.fleet.forwards:
            return ""
        return self.config.served_model_name or self.fleet.card.model_id

    @property
    def served(self) -> Served:
        """The model as clients see it.

        Raises:
            Unavailable: it is not loaded.
            NotOffered: it is an upstream's.
        """
        if self._served is None:
            self.lifecycle.require_ready()
            if self.fleet.forwards:
                raise NotOffered("the upstream has the model; this node forwards requests only")
            raise RuntimeError("the node is ready without a model")
        return self._served

    async def start(self) -> None:
        """Load the model; the node is ready when this returns.

        Raises:
            ImportError, CheckpointError, ValueError: as `Fleet.start`.
        """
        await self.fleet.start()
        if not self.fleet.forwards:
            card = self.fleet.card
            name = self.config.served_model_name or card.model_id
            self._served = Served(name, self.fleet.tokenizer, card.max_model_len)
        self.metrics.set(figures.BUILD, 1, __version__, platform.python_version())
        if self.lifecycle.state is NodeState.STARTING:
            self.lifecycle.move_to(NodeState.READY)

    def _loads(self) -> list[WorkerLoad | None]:
        """Return the load of every worker in order; None stands for one that is broken."""
        if self._served is None and not self.fleet.forwards:
            return []
        return [
            worker.backend.load() if worker.backend.failure is None else None
            for worker in self.fleet.workers
        ]


def _accounts(config: ServeConfig) -> Accounts:
    path = None if config.api_keys_file is None else Path(config.api_keys_file)
    return read_accounts(path, config.api_keys)


def _new_epoch() -> str:
    return f"{time.time_ns() // 1_000_000:012x}-{secrets.token_hex(4)}"
