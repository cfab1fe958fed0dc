"""The workers of this node: started together, one chosen for each request, stopped together.

All are alike but for their device. They are imported and built when the fleet starts, so that the
node listens while torch is being loaded. A worker that breaks while serving is left out from then
on; the fleet has failed once none is left. Upstreams come back: without one there is an outage.
"""

from __future__ import annotations

import asyncio
import secrets
import time
from collections.abc import Callable, Sequence
from typing import cast

from backends.base import Backend, Upstream, WorkerConfig
from backends.errors import BackendFailed
from backends.tokenizer import Tokenizer
from backends.types import ModelCard
from gateway.state.store import new_epoch
from policies.room import Need, Occupancy
from policies.routing import Candidate

BackendFactory = Callable[[WorkerConfig], Backend | Upstream]


class FleetWorker:
    """A worker of this node, and what was sent to it and has not ended.

    Attributes:
        epoch: which life of the worker this is (`gateway.state.store`).
        watermark: number of the last lease whose request was sent to it.
        backend: what runs them; `generating` and `upstream` say which of the two it is.
        forwards: whether requests go on as they came, to an upstream.
        reserved_tokens: tokens of prompt and output that these take at most.
        hung: whether it makes no progress, as the watchdog found (`dispatch.watchdog`).
    """

    def __init__(self, worker_id: str, backend: Backend | Upstream, epoch: str = "") -> None:
        """Begin with nothing sent."""
        self.worker_id = worker_id
        self.epoch = epoch
        self.watermark = 0
        self.backend = backend
        self.forwards = hasattr(backend, "forward")
        self.reserved_tokens = 0
        self.hung = False
        self._sequences = self._started = 0
        self._unstarted_prompt_tokens = 0
        self._sent: dict[str, Need] = {}
        self._unstarted: dict[str, Need] = {}  # of these, those without a token
        self._promised: dict[str, float] = {}  # times per token

    @property
    def occupancy(self) -> Occupancy:
        """What it has on its hands."""
        return Occupancy(
            self.backend.load(),
            self._sequences,
            self._started,
            self._unstarted_prompt_tokens,
            min(self._promised.values(), default=None),
        )

    def candidate(self, at: Occupancy) -> Candidate:
        """Return what a routing policy may know of it, a worker of this process.

        Args:
            at: its occupancy.
        """
        numerics_class = self.backend.card.numerics_class
        return Candidate(self.worker_id, at, self.reserved_tokens, numerics_class=numerics_class)

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

    def reserve(self, request_id: str, need: Need) -> None:
        """Count a request in: it is about to be sent."""
        self.release(request_id)
        self._sent[request_id] = self._unstarted[request_id] = need
        self._sequences += need.sequences
        self._unstarted_prompt_tokens += need.prompt_tokens
        self.reserved_tokens += need.most_tokens
        if need.tpot_s is not None:
            self._promised[request_id] = need.tpot_s

    def sent(self, lease_number: int) -> None:
        """Note that the request of a lease was sent: from now on it is part of the load."""
        self.watermark = max(self.watermark, lease_number)

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


class Fleet:
    """The workers, one for each configuration; there are none before `start`."""

    def __init__(
        self, load_factory: Callable[[], BackendFactory], configs: Sequence[WorkerConfig]
    ) -> None:
        """Remember what to build; `load_factory` may import for seconds and runs in a thread."""
        self._load_factory = load_factory
        self._configs = configs
        self.workers: tuple[FleetWorker, ...] = ()

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
            if not worker.hung and (not worker.forwards or worker.upstream.rest is None)
        ]

    @property
    def failure(self) -> str | None:
        """Why no worker is left, or None while there is one, or may be again, or none was built."""
        return None if any(worker.backend.recovers for worker in self.workers) else self.outage

    @property
    def forwards(self) -> bool:
        """Whether the workers are upstreams."""
        return bool(self.workers) and self.workers[0].forwards

    @property
    def outage(self) -> str | None:
        """Why no worker serves now, or None while one does, or none was built yet."""
        if not self.workers or self.serving:
            return None
        reasons = (str(worker.backend.failure) for worker in self.workers)
        if self.forwards:
            reasons = (f"upstream {number}: {reason}" for number, reason in enumerate(reasons, 1))
        return "; ".join(dict.fromkeys(reasons))

    @property
    def progress(self) -> float:
        """The share of loading that is done, 0 to 1: the workers' mean."""
        if not self.workers:
            return 0.0
        return sum(worker.backend.progress for worker in self.workers) / len(self.workers)

    @property
    def card(self) -> ModelCard:
        """What is served; of upstreams, what the first of them serves that was ever reached."""
        self._any()
        cards = [worker.backend.card for worker in self.workers]
        return next((card for card in cards if card.model_id), cards[0])

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._any().generating.tokenizer

    async def start(self) -> None:
        """Import in a thread, build all, and start them side by side.

        What cannot start was asked for by mistake, so the first that fails fails them all; call
        `stop` then, too.

        Raises:
            ImportError: what the backend needs is not installed.
            CheckpointError, ValueError: the model cannot be loaded, or a setting does not fit it.
        """
        factory = await asyncio.to_thread(self._load_factory)
        epoch = new_epoch(time.time(), secrets.token_hex(4))
        await self.start_with(factory, f"w-{secrets.token_hex(4)}", epoch)
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

    async def stop(self) -> None:
        """Stop all at once; open streams end with `BackendFailed`. Idempotent."""
        await asyncio.gather(*(worker.backend.stop() for worker in self.workers))

    def _any(self) -> FleetWorker:
        if not self.workers:
            raise BackendFailed("the workers have not started")
        return self.workers[0]
