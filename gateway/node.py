"""A node: a fleet of workers with everything a handler needs around it. No HTTP here."""

from __future__ import annotations

import time
from pathlib import Path

from gateway.config import ServeConfig
from gateway.decisions import Decisions
from gateway.dispatch import Dispatcher
from gateway.fleet import Fleet
from gateway.http.requests.validation import Served
from gateway.lifecycle import Lifecycle, NodeState
from gateway.state.store import Store
from gateway.telemetry.live import Live
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import Tracing
from policies.registry import speculation_policy
from policies.types import WorkerLoad


class Node:
    """What this process consists of."""

    def __init__(self, config: ServeConfig, fleet: Fleet, store: Store, tracing: Tracing) -> None:
        """Join the parts; nothing starts yet.

        Raises:
            ValueError: the configured policy does not exist.
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
        self.dispatcher = Dispatcher(fleet, self.policy, store, self.lifecycle, self.decisions)
        self.metrics = Metrics(self._loads, self._model_name)
        self.live = Live(self._loads, self.metrics.recent)

    @property
    def state(self) -> NodeState:
        """The state, after asking the workers whether one of them is well."""
        self.lifecycle.note_failure(self.fleet.failure)
        return self.lifecycle.state

    @property
    def served(self) -> Served:
        """The model as clients see it.

        Raises:
            Unavailable: it is not loaded.
        """
        if self._served is None:
            self.lifecycle.require_ready()
            raise RuntimeError("the node is ready without a model")
        return self._served

    async def start(self) -> None:
        """Load the model; the node is ready when this returns.

        Raises:
            ImportError, CheckpointError, ValueError: as `Fleet.start`.
        """
        await self.fleet.start()
        card = self.fleet.card
        name = self.config.served_model_name or card.model_id
        self._served = Served(name, self.fleet.tokenizer, card.max_model_len)
        if self.lifecycle.state is NodeState.STARTING:
            self.lifecycle.move_to(NodeState.READY)

    def _loads(self) -> list[WorkerLoad | None]:
        """Return the load of every worker in order; None stands for one that is broken."""
        if self._served is None:
            return []
        return [
            worker.backend.load() if worker.backend.failure is None else None
            for worker in self.fleet.workers
        ]

    def _model_name(self) -> str:
        return "" if self._served is None else self._served.name
