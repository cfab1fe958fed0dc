"""A node: one backend with everything a handler needs around it. No HTTP here."""

from __future__ import annotations

import secrets

from backends.base import Backend
from gateway.config import ServeConfig
from gateway.dispatch import Dispatcher
from gateway.http.validation import Served
from gateway.lifecycle import Lifecycle, NodeState
from gateway.state.store import Store
from gateway.telemetry.metrics import Metrics
from gateway.telemetry.tracing import Tracing
from policies.registry import speculation_policy
from policies.types import WorkerLoad


class Node:
    """What this process consists of."""

    def __init__(
        self, config: ServeConfig, backend: Backend, store: Store, tracing: Tracing
    ) -> None:
        """Join the parts; nothing starts yet.

        Raises:
            ValueError: the configured policy does not exist.
        """
        self._served: Served | None = None
        self.config = config
        self.backend = backend
        self.store = store
        self.tracing = tracing
        self.lifecycle = Lifecycle()
        self.policy = speculation_policy(config.speculation)
        self.worker_id = f"w-{secrets.token_hex(4)}"
        self.dispatcher = Dispatcher(backend, self.policy, store, self.lifecycle, self.worker_id)
        self.metrics = Metrics(self._load, self._model_name)

    @property
    def state(self) -> NodeState:
        """The state, after asking the backend whether it is well."""
        self.lifecycle.note_failure(self.backend.failure)
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
            CheckpointError, ValueError: the model cannot be loaded, or a setting does not fit it.
        """
        await self.backend.start()
        card = self.backend.card
        name = self.config.served_model_name or card.model_id
        self._served = Served(name, self.backend.tokenizer, card.max_model_len)
        if self.lifecycle.state is NodeState.STARTING:
            self.lifecycle.move_to(NodeState.READY)

    def _load(self) -> WorkerLoad | None:
        return None if self._served is None else self.backend.load()

    def _model_name(self) -> str:
        return "" if self._served is None else self._served.name
