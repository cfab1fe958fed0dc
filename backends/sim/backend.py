"""`--backend sim`: the production scheduler on a simulated device."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Callable, Sequence

from msgspec import structs

from draftgate.backends.base import DeltaSink
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.exchange import (
    ExportBlocks,
    KvExchange,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.kv_transfer.transfer import OperatedBlocks, export_chunks
from draftgate.backends.sim.assembly import WorkerBuilder, serving_worker
from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink
from draftgate.backends.sim.model import SimExecutor
from draftgate.backends.streams import DeltaSinks
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad


class SimBackend(OperatedBlocks):
    """Runs requests on a simulated device. All code except the forward pass is production code.

    The backend implements `Backend` and `KvEndpoint` of `backends.base`. Its KV blocks have no
    bytes, and take the time of a link.
    """

    recovers = False

    def __init__(
        self,
        config: WorkerConfig,
        build: WorkerBuilder = serving_worker,
        link: KvLink = LOCAL_LINK,
    ) -> None:
        """Configure the worker, which `start` builds.

        Args:
            config: the worker's settings.
            build: builds the worker.
            link: link over which other workers pull its KV blocks.
        """
        if config.sim_service_ms is not None:  # a single server, as in queueing theory
            config = structs.replace(config, max_num_seqs=1)
        self._config = config
        self._build = build
        self._link = link
        self._sinks = DeltaSinks(self._end)
        self._wake = asyncio.Event()
        self._task: asyncio.Task[None] | None = None
        self._now_s: Callable[[], float]  # virtual in a simulation
        self._failure: str | None = None
        self._worker: WorkerCore
        self._executor: SimExecutor
        self._card: ModelCard
        self._exchange: KvExchange

    @property
    def card(self) -> ModelCard:
        """The model that is served."""
        return self._card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._worker.tokenizer

    @property
    def failure(self) -> str | None:
        """The reason for which the backend failed or stopped, or None while it serves."""
        return self._failure

    @property
    def progress(self) -> float:
        """0 before `start`, then 1."""
        return float(self._task is not None)

    async def start(self) -> None:
        """Build the worker and start its steps.

        Raises:
            CheckpointError: the tokenizer is missing or damaged.
            ValueError: the profile, the policy or a setting of the simulator is wrong.
        """
        self._now_s = asyncio.get_running_loop().time
        built = self._build(self._config)
        self._worker, self._executor, self._card = built.worker, built.executor, built.card
        self._exchange = built.exchange
        self._task = asyncio.create_task(self._run(), name="sim-worker")

    async def stop(self) -> None:
        """Stop immediately. Open requests end with `BackendFailed`."""
        self._failure = self._failure or "the worker was stopped"
        self._sinks.fail(self._failure)
        if self._task is not None:
            self._task.cancel()
            await asyncio.wait([self._task])

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if the worker can never run the request."""
        self._worker.admission.check(request)

    def submit(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Queue the request, and put its deltas into the sink."""
        if self._failure is not None:
            raise BackendFailed(self._failure)
        self._sinks.open(request, sink)
        self._worker.submit(request, self._now_s())
        self._wake.set()

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it runs."""
        self._sinks.cancel(request_id)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change a request's pace."""
        self._worker.set_pace(request_id, pace, tpot_s)
        self._wake.set()

    def load(self) -> WorkerLoad:
        """Return the worker's load."""
        return self._worker.load()

    @property
    def block_bytes(self) -> int:
        """Bytes that a KV block would have, or 0 if the worker exchanges none."""
        form = self._card.kv_format
        return 0 if form is None else form.block_bytes

    async def operate(self, operation: KvOperation) -> KvResult:
        """Run an operation on the KV blocks."""
        if self._failure is not None:
            raise BackendFailed(self._failure)
        return self._exchange.run(operation, self._now_s())

    def pull_blocks(
        self, hashes: Sequence[bytes], *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        """Yield the blocks of a part of a hash chain, each after its time on the link."""
        block_bytes, busy_until_s = self.block_bytes, self._now_s()

        async def export(part: tuple[bytes, ...]) -> KvChunk:
            nonlocal busy_until_s
            chunk = await self.operate(ExportBlocks(part, urgent))
            assert isinstance(chunk, KvChunk)
            now_s = self._now_s()
            sent_s = len(chunk.hashes) * block_bytes / self._link.bytes_per_s
            busy_until_s = max(busy_until_s, now_s) + sent_s
            await self._sleep(busy_until_s + self._link.latency_s - now_s)
            return chunk

        return export_chunks(export, hashes, block_bytes)

    def _end(self, request_id: str, cancelled: bool) -> None:
        if cancelled:
            self._worker.cancel(request_id)

    async def _run(self) -> None:
        try:
            await self._step_forever()
        except Exception as error:  # noqa: BLE001 - the open requests report it
            self._failure = f"{type(error).__name__}: {error}"
            self._sinks.fail(self._failure)

    async def _step_forever(self) -> None:
        worker, executor, now = self._worker, self._executor, self._now_s
        due_s = now()
        ahead: StepPlan | None = None  # the next step, planned while the last step ran
        overlapped_s = 0.0  # seconds of the last step, which hide the host's work for `ahead`
        while True:
            plan = ahead or worker.plan(now())
            if plan is None:
                self._wake.clear()
                await self._wake.wait()
                due_s = now()
                continue
            result = executor.execute(plan)
            # Each step is due a step time after the due time of the last step, so late timers do
            # not add up. But no device compensates for a host that delayed it by more than a step.
            now_s = now()
            waited_s = executor.host_s if ahead is None else executor.host_s - overlapped_s
            due_s = max(due_s, now_s - result.step_s) + max(waited_s, 0.0) + result.step_s
            ahead = worker.plan_ahead(plan, now_s) if executor.launches_ahead else None
            overlapped_s = result.step_s
            await self._sleep(due_s - now_s)
            self._sinks.deliver(worker.complete(plan, result, now()))

    async def _sleep(self, seconds: float) -> None:
        await asyncio.sleep(seconds)
