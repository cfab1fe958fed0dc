"""The workers of a node, including linked workers of other nodes.

A node's own workers differ only in their device, and start and stop together. The fleet imports and
builds them when it starts, so that the node already listens while torch is imported. A failed
worker is never used again, and the node fails with its last own worker. Upstreams recover, and an
outage lasts while no upstream is available. Workers of other nodes join and leave
(`gateway.cluster.members`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import Final, cast

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.base import Backend, DeltaSink, KvEndpoint, Upstream, UpstreamPause
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.sent_requests import SentRequests
from draftgate.gateway.state.values import new_epoch
from draftgate.gateway.upstream_models import UpstreamModels
from draftgate.policies.capacity import WorkerUsage, with_other_gateways
from draftgate.policies.routing.types import Candidate, PrefixPull
from draftgate.policies.types import Role

NO_WORKER: Final = "no worker is available"
NO_ADAPTER: Final = "no worker has it at present"

BackendFactory = Callable[[WorkerConfig], Backend | Upstream]


class FleetWorker(SentRequests):
    """A worker and the requests of this node that run on it.

    Attributes:
        epoch: the epoch of the worker (`gateway.state.values`).
        own: whether the worker belongs to this node.
        backend: a `Backend` (`generating`) if it takes token ids, else an `Upstream`.
        leased_tokens: tokens of the leases of all gateways when the store was last read, or 0.
        hung: whether the watchdog found that the worker makes no progress (`dispatch.watchdog`).
        drained: whether the worker gets no more requests, and its streams move to other workers.
    """

    own = True

    def __init__(
        self,
        worker_id: str,
        backend: Backend | Upstream,
        epoch: str = "",
        role: Role = Role.ANY,
    ) -> None:
        super().__init__()
        self._role = role
        self.worker_id = worker_id
        self.epoch = epoch
        self.backend = backend
        self._watermark = 0
        self.leased_tokens = 0
        self.hung = self.drained = False

    @property
    def role(self) -> Role:
        """The phase of requests that the worker prefers, which its own node may set."""
        role: Role = getattr(self.backend, "role", self._role)
        return role

    @role.setter
    def role(self, role: Role) -> None:
        self._role = role

    @property
    def watermark(self) -> int:
        """Number of the last lease that the worker's load includes."""
        return self._watermark

    @property
    def load_age_s(self) -> float:
        """Age of the worker's load in seconds."""
        return 0.0

    @property
    def usage(self) -> WorkerUsage:
        """The worker's load together with the requests of this node."""
        return self.usage_at(self.backend.load())

    def candidate(
        self, at: WorkerUsage, cached_tokens: int = 0, pull: PrefixPull | None = None
    ) -> Candidate:
        """Return the routing policy's view of the worker.

        Args:
            at: the usage of the worker.
            cached_tokens: tokens of the request's prompt that are probably in its cache.
            pull: the next tokens, if the worker would pull them.
        """
        return Candidate(
            self.worker_id,
            at,
            self.reserved_tokens,
            age_s=self.load_age_s,
            numerics_class=self.backend.card.numerics_class,
            own=self.own,
            cached_tokens=cached_tokens,
            pull=pull,
        )

    @property
    def is_open(self) -> bool:
        """Whether the worker accepts requests now."""
        if self.hung or self.drained:
            return False
        backend = self.backend
        # An upstream that has failed also pauses.
        pause = getattr(backend, "pause", backend)
        return backend.failure is None if pause is backend else pause is None

    @property
    def pause(self) -> UpstreamPause | None:
        """The pause of a server that must not get requests now, or None."""
        return getattr(self.backend, "pause", None)

    @property
    def status(self) -> str:
        """Whether the worker serves: `ok`, `loading`, `hung`, `paused` or `failed`."""
        if self.backend.failure is not None:
            return "failed"
        if self.hung:
            return "hung"
        if self.pause is not None:
            return "paused"
        return "ok" if self.backend.progress >= 1.0 else "loading"

    @property
    def leaving(self) -> bool:
        """Whether the worker or its node is drained, so that its streams should move."""
        return self.drained or getattr(self.backend, "leaving", False)

    @property
    def supplies_blocks(self) -> bool:
        """Whether other workers may pull its KV blocks, also while it is leaving."""
        serves = self.backend.failure is None or getattr(self.backend, "leaving", False)
        return serves and not self.hung

    @property
    def server(self) -> str | None:
        """URL of the server that runs the worker, or None for a worker of this node."""
        return getattr(self.backend, "url", None)

    @property
    def generating(self) -> Backend:
        """The backend of a worker that takes token ids."""
        return self.backend  # type: ignore[return-value]  # `cast` is a call

    def offers(self, offer: str) -> bool:
        """Return whether the worker has what a request needs (`CapacityNeed.offer`)."""
        if not offer:
            return True
        backend = self.backend
        if hasattr(backend, "serves"):
            return bool(backend.serves(offer))
        return any(one.digest == offer for one in backend.card.capabilities.adapters)

    @property
    def kv_format(self) -> KvFormat | None:
        """The format in which the worker exchanges KV blocks, or None if it exchanges none."""
        return self.backend.card.kv_format if hasattr(self.backend, "adopt_blocks") else None

    @property
    def kv(self) -> KvEndpoint:
        """The backend of a worker with a `kv_format`."""
        return cast(KvEndpoint, self.backend)

    def submit(self, request: GenerationRequest, sink: DeltaSink, lease_number: int) -> None:
        """Send a request, whose deltas the sink gets.

        Args:
            lease_number: number of the request's lease, or 0 without a lease.

        Raises:
            BackendFailed: the worker rejects the request or has failed.
        """
        self.generating.submit(request, sink)
        # The load includes the request from now on.
        self._watermark = max(self._watermark, lease_number)


class PeerWorker(FleetWorker):
    """A worker of another node in one epoch, and the requests of this node that run on it.

    Attributes:
        gateways: number of nodes that may send requests to the worker, including this node.
    """

    own = False

    def __init__(self, worker_id: str, backend: PeerBackend, epoch: str) -> None:
        super().__init__(worker_id, backend, epoch)
        self.gateways = 2  # until the store reports the number
        self._peer = backend

    @property
    def watermark(self) -> int:
        """Number of the last lease that the worker's load includes."""
        return self._peer.watermark

    @property
    def load_age_s(self) -> float:
        """Age of the worker's load in seconds."""
        return self._peer.load_age_s

    @property
    def usage(self) -> WorkerUsage:
        """The worker's load together with the requests of this and other nodes."""
        return with_other_gateways(super().usage, self.gateways)

    def submit(self, request: GenerationRequest, sink: DeltaSink, lease_number: int) -> None:
        """Send a request as for other workers. The watermark advances when it has arrived."""
        self._peer.submit(request, sink, lease_number)


class Fleet:
    """The workers of a node, one per configuration, and linked workers of other nodes.

    Attributes:
        workers: all workers, own workers first.
        rivals: number of other gateways whose requests to the same workers are unknown.
        token_ids: whether the workers, once started, take token ids instead of whole requests.
        discovers: whether the node searches for workers of other nodes.
        ending: whether the node is stopping, so that it no longer resumes requests.
    """

    def __init__(
        self, load_factory: Callable[[], BackendFactory], configs: Sequence[WorkerConfig]
    ) -> None:
        """Prepare a fleet.

        Args:
            load_factory: a function that returns the factory of backends. It runs in a thread,
                because its imports may take seconds.
            configs: one configuration per worker.
        """
        self._load_factory = load_factory
        self._configs = configs
        self.workers: tuple[FleetWorker, ...] = ()
        self.rivals = 0
        self.token_ids = True
        self.discovers = self.ending = False
        self.upstream_models = UpstreamModels()
        self._last: FleetWorker | None = None  # the last worker that was removed

    @property
    def size(self) -> int:
        """Number of own workers, which exist once the fleet has started."""
        return len(self._configs)

    @property
    def own(self) -> tuple[FleetWorker, ...]:
        """The workers of this node."""
        return tuple(worker for worker in self.workers if worker.own)

    @property
    def serving(self) -> list[FleetWorker]:
        """The workers that have not failed, in order."""
        return [worker for worker in self.workers if worker.backend.failure is None]

    def serving_with(self, offer: str) -> list[FleetWorker]:
        """Return the workers that have not failed and have what a request needs."""
        return [worker for worker in self.serving if worker.offers(offer)]

    def adapters(self) -> dict[str, AdapterCard]:
        """Return the LoRA adapters of the workers by name, those of serving workers first."""
        found: dict[str, AdapterCard] = {}
        for worker in (*self.serving, *self.workers):
            for adapter in worker.backend.card.capabilities.adapters:
                found.setdefault(adapter.name, adapter)
        return found

    @property
    def serves(self) -> bool:
        """Whether a worker has not failed."""
        return any(worker.backend.failure is None for worker in self.workers)

    def is_open_for(self, offer: str) -> bool:
        """Return whether a worker accepts requests now that has what a request needs."""
        for worker in self.workers:  # noqa: SIM110 - a generator takes several times as long
            if worker.is_open and worker.offers(offer):
                return True
        return False

    @property
    def open(self) -> list[FleetWorker]:
        """The workers that accept requests now, without hung, drained and paused workers."""
        return self.open_among(self.workers)

    def open_among(self, workers: Sequence[FleetWorker], offer: str = "") -> list[FleetWorker]:
        """Return those of some workers that accept requests now and have what a request needs."""
        found = [worker for worker in workers if worker.is_open]
        return [worker for worker in found if worker.offers(offer)] if offer else found

    @property
    def may_grow(self) -> bool:
        """Whether new or recovering workers may become available soon."""
        if self.ending:
            return False
        return self.discovers or any(w.backend.recovers or w.hung for w in self.workers)

    @property
    def failure(self) -> str | None:
        """The reason why none of the node's own workers remains, or None.

        The result is None while a worker serves or may recover. Workers of other nodes may still
        serve running requests, but this node should restart.
        """
        for worker in self.workers:
            if worker.own and worker.backend.failure is None:
                return None  # the usual case
        outage = _outage(self.own)
        recovers = outage is not None and any(worker.backend.recovers for worker in self.own)
        return None if recovers else outage

    @property
    def outage(self) -> str | None:
        """The reason why no worker serves now, or None while a worker serves."""
        return _outage(self.workers) if self.workers else NO_WORKER

    @property
    def progress(self) -> float:
        """The mean progress of loading of the workers, between 0 and 1."""
        if not self.workers:
            return 0.0
        return sum(worker.backend.progress for worker in self.workers) / len(self.workers)

    @property
    def card(self) -> ModelCard:
        """The card of the served model.

        For upstreams, this is the card of the first upstream that responded.
        """
        for worker in self.workers:
            card = worker.backend.card
            if card.model_id:
                return card  # the usual case
        return self.any.backend.card

    @property
    def model_id(self) -> str:
        """The name of the model in the pool, or an empty string if the gateway does not know it."""
        known = self.workers or self._last is not None
        return self.card.model_id if known and self.token_ids else ""

    @property
    def proposers(self) -> list[str]:
        """The names of the proposers of all serving workers, in the order of the workers."""
        names = (name for worker in self.serving for name in worker.backend.load().proposers)
        return list(dict.fromkeys(names))

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.any.generating.tokenizer

    async def start(self, name: str, first: int = 0) -> None:
        """Import the backend in a thread, and then build and start own workers concurrently.

        A worker that cannot start is a configuration error, so it fails the whole fleet. The caller
        must call `stop` also in that case.

        Args:
            name: prefix of the workers' ids.
            first: number of the first worker among those of the node.

        Raises:
            ImportError: a package that the backend needs is not installed.
            CheckpointError, ValueError: the model cannot be loaded, or a setting does not fit it.
        """
        if not self._configs:
            return
        factory = await asyncio.to_thread(self._load_factory)
        epoch = new_epoch(time.time(), secrets.token_hex(4))
        await self.start_with(factory, name, epoch, first)
        models = sorted({worker.backend.card.model_id for worker in self.workers})
        if len(models) > 1 and self.token_ids:
            raise ValueError(f"the workers serve different models: {', '.join(models)}")

    async def start_with(
        self, factory: BackendFactory, name: str, epoch: str = "", first: int = 0
    ) -> None:
        """Start own workers with an imported factory.

        Args:
            factory: a function that builds a backend from a configuration.
            name: prefix of the workers' ids. Upstreams need none without a pool.
            epoch: epoch of the workers.
            first: number of the first worker among those of the node.
        """
        self.workers = tuple(
            FleetWorker(config.worker_id(name, number), factory(config), epoch, Role(config.role))
            for number, config in enumerate(self._configs, first)
        )
        await asyncio.gather(*(worker.backend.start() for worker in self.workers))
        self.token_ids = all(one.backend.card.capabilities.token_ids for one in self.workers)
        self.upstream_models.watch([one.backend for one in self.workers])

    def add(self, worker: PeerWorker) -> None:
        """Add a linked worker of another node."""
        self.workers = (*self.workers, worker)

    def remove(self, worker: PeerWorker) -> None:
        """Remove a worker of another node, if it was added.

        The method is idempotent.
        """
        if worker in self.workers:
            self._last = worker
        self.workers = tuple(one for one in self.workers if one is not worker)

    async def stop(self) -> None:
        """Stop all workers, possibly again. Open streams end with `BackendFailed`."""
        await asyncio.gather(*(worker.backend.stop() for worker in self.workers))

    @property
    def any(self) -> FleetWorker:
        """Any worker of the fleet, or the last removed worker if the fleet is empty.

        Raises:
            BackendFailed: the fleet never had a worker.
        """
        found = self.workers[0] if self.workers else self._last
        if found is None:
            raise BackendFailed(NO_WORKER)
        return found


def _outage(workers: Sequence[FleetWorker]) -> str | None:
    """Return why none of these workers serves, or None if a worker serves or no worker exists."""
    if not workers or any(worker.backend.failure is None for worker in workers):
        return None
    reasons = (str(worker.backend.failure) for worker in workers)
    if workers[0].pause is not None:  # upstreams, each of which has a name
        reasons = (f"{worker.worker_id}: {worker.backend.failure}" for worker in workers)
    return "; ".join(dict.fromkeys(reasons))
