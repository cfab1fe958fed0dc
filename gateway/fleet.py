"""The workers that a node can send requests to: its own, and those of others that it knows.

Its own are alike but for their device. They are imported and built when the fleet starts, so that
the node listens while torch is being loaded, and started and stopped together. One that breaks
while serving is left out from then on; the node has failed once none of its own is left. Upstreams
come back: without one there is an outage. Workers of other nodes come and go
(`gateway.cluster.members`).
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import AsyncGenerator, Callable, Sequence
from typing import Final, cast

from draftgate.backends.base import Backend, Upstream
from draftgate.backends.errors import BackendFailed
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.state.store import new_epoch
from draftgate.policies.capacity import CapacityNeed, WorkerUsage, with_other_gateways
from draftgate.policies.routing.types import Candidate

NO_WORKER: Final = "there is no worker"

BackendFactory = Callable[[WorkerConfig], Backend | Upstream]


class FleetWorker:
    """A worker, and what this node sent to it that has not ended.

    Attributes:
        epoch: which life of the worker this is (`gateway.state.store`).
        own: whether it is one of this node's, which tells others of it.
        backend: what runs them; `generating` and `upstream` say which of the two it is.
        forwards: whether requests go on as they came, to an upstream.
        reserved_tokens: tokens of prompt and output that these take at most.
        hung: whether it makes no progress, as the watchdog found (`dispatch.watchdog`).
    """

    own = True

    def __init__(self, worker_id: str, backend: Backend | Upstream, epoch: str = "") -> None:
        """Begin with nothing sent."""
        self.worker_id = worker_id
        self.epoch = epoch
        self.backend = backend
        self._watermark = 0
        self.forwards = hasattr(backend, "forward")
        self.reserved_tokens = 0
        self.hung = False
        self._sequences = self._started = 0
        self._unstarted_prompt_tokens = 0
        self._sent: dict[str, CapacityNeed] = {}
        self._unstarted: dict[str, CapacityNeed] = {}  # of these, those without a token
        self._promised: dict[str, float] = {}  # times per token

    @property
    def watermark(self) -> int:
        """Number of the last lease that its load includes."""
        return self._watermark

    @property
    def load_age_s(self) -> float:
        """How old its load is, in seconds."""
        return 0.0

    @property
    def usage(self) -> WorkerUsage:
        """What it has on its hands."""
        return WorkerUsage(
            self.backend.load(),
            self._sequences,
            self._started,
            self._unstarted_prompt_tokens,
            min(self._promised.values(), default=None),
        )

    def candidate(self, at: WorkerUsage) -> Candidate:
        """Return what a routing policy may know of it.

        Args:
            at: its occupancy.
        """
        return Candidate(
            self.worker_id,
            at,
            self.reserved_tokens,
            age_s=self.load_age_s,
            numerics_class=self.backend.card.numerics_class,
            own=self.own,
        )

    @property
    def generating(self) -> Backend:
        """The backend, which takes token ids."""
        assert not self.forwards
        return cast(Backend, self.backend)

    @property
    def upstream(self) -> Upstream:
        """The upstream, which takes requests as they came."""
        assert self.forwards
        return cast(Upstream, self.backend)

    def reserve(self, request_id: str, need: CapacityNeed) -> None:
        """Count a request in: it is about to be sent."""
        self.release(request_id)
        self._sent[request_id] = self._unstarted[request_id] = need
        self._sequences += need.sequences
        self._unstarted_prompt_tokens += need.prompt_tokens
        self.reserved_tokens += need.most_tokens
        if need.tpot_s is not None:
            self._promised[request_id] = need.tpot_s

    def run(self, request: GenerationRequest, lease_number: int) -> AsyncGenerator[Delta, None]:
        """Send a request under a lease (0: without one) and return its deltas.

        Raises:
            BackendFailed: the worker takes none, or broke.
        """
        deltas = self.generating.generate(request)
        self._watermark = max(self._watermark, lease_number)  # it is part of the load now
        return deltas

    def started(self, request_id: str) -> bool:
        """Note that a request has its first token; return whether that was news."""
        need = self._unstarted.pop(request_id, None)
        if need is None:
            return False
        self._unstarted_prompt_tokens -= need.prompt_tokens
        self._started += need.sequences
        return True

    def release(self, request_id: str) -> None:
        """Count a request out. Idempotent."""
        self.started(request_id)
        need = self._sent.pop(request_id, None)
        if need is None:
            return
        self._sequences -= need.sequences
        self._started -= need.sequences
        self.reserved_tokens -= need.most_tokens
        self._promised.pop(request_id, None)


class PeerWorker(FleetWorker):
    """A worker of another node, in one of its lives, and what this node sent to it.

    Attributes:
        gateways: nodes that may send to it, this one included.
    """

    own = False

    def __init__(self, worker_id: str, backend: PeerBackend, epoch: str) -> None:
        """Begin with nothing sent."""
        super().__init__(worker_id, backend, epoch)
        self.gateways = 2  # until it is known
        self._peer = backend

    @property
    def watermark(self) -> int:
        """Number of the last lease that its load includes."""
        return self._peer.watermark

    @property
    def load_age_s(self) -> float:
        """How old its load is, in seconds."""
        return self._peer.load_age_s

    @property
    def usage(self) -> WorkerUsage:
        """What it has on its hands, and what others have sent there."""
        return with_other_gateways(super().usage, self.gateways)

    def run(self, request: GenerationRequest, lease_number: int) -> AsyncGenerator[Delta, None]:
        """See `FleetWorker`: the lease counts once it is there."""
        return self._peer.generate(request, lease_number)


class Fleet:
    """The workers: one of its own for each configuration once it started, and those added.

    Attributes:
        workers: its own first.
        rivals: other gateways that send to the same workers unseen.
        discovers: whether workers of other nodes are looked for.
        ending: whether the node stops: what loses its worker now ends.
    """

    def __init__(
        self, load_factory: Callable[[], BackendFactory], configs: Sequence[WorkerConfig]
    ) -> None:
        """Remember what to build; `load_factory` may import for seconds and runs in a thread."""
        self._load_factory = load_factory
        self._configs = configs
        self.workers: tuple[FleetWorker, ...] = ()
        self.rivals = 0
        self.discovers = self.ending = False
        self._last: FleetWorker | None = None  # that it had

    @property
    def own(self) -> tuple[FleetWorker, ...]:
        """This node's workers."""
        return tuple(worker for worker in self.workers if worker.own)

    @property
    def serving(self) -> list[FleetWorker]:
        """The workers that are well, in order."""
        return [worker for worker in self.workers if worker.backend.failure is None]

    @property
    def open(self) -> list[FleetWorker]:
        """Of these, those that may be sent something now.

        Not who is hung, nor an upstream that has to be left alone.
        """
        return [
            worker
            for worker in self.serving
            if not worker.hung and (not worker.forwards or worker.upstream.pause is None)
        ]

    @property
    def may_grow(self) -> bool:
        """Whether more workers may be open soon: new ones, or some that come back."""
        if self.ending:
            return False
        return self.discovers or any(w.backend.recovers or w.hung for w in self.workers)

    @property
    def failure(self) -> str | None:
        """Why none of its own workers is left; None while one is, or may be again, or none was.

        Others may still serve what runs: it is the node that should begin anew.
        """
        own = self.own
        return None if any(worker.backend.recovers for worker in own) else _outage(own)

    @property
    def forwards(self) -> bool:
        """Whether the workers are upstreams."""
        return bool(self.workers) and self.workers[0].forwards

    @property
    def outage(self) -> str | None:
        """Why no worker serves now, or None while one does."""
        return _outage(self.workers) if self.workers else NO_WORKER

    @property
    def progress(self) -> float:
        """The share of loading that is done, 0 to 1: the workers' mean."""
        if not self.workers:
            return 0.0
        return sum(worker.backend.progress for worker in self.workers) / len(self.workers)

    @property
    def card(self) -> ModelCard:
        """What is served; of upstreams, what the first of them serves that was ever reached."""
        cards = [worker.backend.card for worker in self.workers or (self.any,)]
        return next((card for card in cards if card.model_id), cards[0])

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self.any.generating.tokenizer

    async def start(self, name: str | None = None) -> None:
        """Import in a thread, build its own, and start them side by side.

        What cannot start was asked for by mistake, so the first that fails fails them all; call
        `stop` then, too.

        Args:
            name: the workers' ids are this and their number; None makes one up.

        Raises:
            ImportError: what the backend needs is not installed.
            CheckpointError, ValueError: the model cannot be loaded, or a setting does not fit it.
        """
        if not self._configs:
            return
        factory = await asyncio.to_thread(self._load_factory)
        epoch = new_epoch(time.time(), secrets.token_hex(4))
        await self.start_with(factory, name or f"w-{secrets.token_hex(4)}", epoch)
        models = sorted({worker.backend.card.model_id for worker in self.workers})
        if len(models) > 1 and not self.forwards:
            raise ValueError(f"the workers serve different models: {', '.join(models)}")

    async def start_with(self, factory: BackendFactory, name: str, epoch: str = "") -> None:
        """As `start`, with a factory that is there already.

        Args:
            factory: builds a backend from each configuration.
            name: the workers' ids are this and their number.
            epoch: theirs.
        """
        self.workers = tuple(
            FleetWorker(f"{name}-{index}", factory(config), epoch)
            for index, config in enumerate(self._configs)
        )
        await asyncio.gather(*(worker.backend.start() for worker in self.workers))

    def add(self, worker: PeerWorker) -> None:
        """Send to another node's worker, too, which is there."""
        self.workers = (*self.workers, worker)

    def remove(self, worker: PeerWorker) -> None:
        """Send to it no more. Idempotent, and nothing where it was never added."""
        if worker in self.workers:
            self._last = worker
        self.workers = tuple(one for one in self.workers if one is not worker)

    async def stop(self) -> None:
        """Stop all at once; open streams end with `BackendFailed`. Idempotent."""
        await asyncio.gather(*(worker.backend.stop() for worker in self.workers))

    @property
    def any(self) -> FleetWorker:
        """A worker that stands for all; where there is none now, the last one that was.

        Raises:
            BackendFailed: there never was one.
        """
        found = self.workers[0] if self.workers else self._last
        if found is None:
            raise BackendFailed(NO_WORKER)
        return found


def _outage(workers: Sequence[FleetWorker]) -> str | None:
    """Return why none of these serves; None while one does, or where there are none."""
    if not workers or any(worker.backend.failure is None for worker in workers):
        return None
    reasons = (str(worker.backend.failure) for worker in workers)
    if workers[0].forwards:
        reasons = (f"upstream {number}: {reason}" for number, reason in enumerate(reasons, 1))
    return "; ".join(dict.fromkeys(reasons))
