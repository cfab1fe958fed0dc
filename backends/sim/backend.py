"""`--backend sim`: the production scheduler on a simulated device."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator, Callable, Sequence
from contextvars import Context, copy_context
from typing import Final

from msgspec import structs

from draftgate.backends.base import DeltaSink
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.exchange import (
    ExportBlocks,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.kv_transfer.transfer import (
    WINDOW_CHUNKS,
    OperatedBlocks,
    blocks_per_chunk,
)
from draftgate.backends.kv_transfer.turns import QueuedOperation, TransferTurns
from draftgate.backends.sim.assembly import WorkerBuilder, serving_worker
from draftgate.backends.sim.kv_link import LOCAL_LINK, KvLink, TimedExchange
from draftgate.backends.sim.model import SimExecutor
from draftgate.backends.streams import DeltaSinks
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad

TOGETHER_S: Final = 0.05
"""Time in seconds within which KV blocks arrive together in a simulation, about a long step.
(Chosen, not tuned, 2026-11-30.)"""


class SimBackend(OperatedBlocks):
    """Runs requests on a simulated device. All code except the forward pass is production code.

    The backend implements `Backend` and `KvEndpoint` of `backends.base`. Its KV blocks have no
    bytes, and take the time of a link. If the profile has a rate for copies, they also take the
    turns between steps in which a real worker copies blocks (`TransferTurns`).
    """

    recovers = False

    def __init__(
        self,
        config: WorkerConfig,
        build: WorkerBuilder = serving_worker,
        link: KvLink = LOCAL_LINK,
        skip_time: Callable[[float], bool] = lambda _seconds: False,
    ) -> None:
        """Configure the worker, which `start` builds.

        Args:
            config: the worker's settings.
            build: builds the worker.
            link: link over which other workers pull its KV blocks.
            skip_time: advances a virtual clock, and returns False if it cannot
                (`VirtualTimeLoop.skip_time`).
        """
        if config.sim_service_ms is not None:  # a single server, as in queueing theory
            config = structs.replace(config, max_num_seqs=1)
        self._config = config
        self._build = build
        self._link = link
        self._skip_time = skip_time
        self._sinks = DeltaSinks(self._end)
        self._loop: asyncio.AbstractEventLoop | None = None
        self._context: Context  # of no request
        self._turn: asyncio.Handle | None = None  # the next turn, or None while idle
        self._under_way: tuple[StepPlan, StepResult] | None = None
        self._ahead: StepPlan | None = None  # the next step, planned while the last step ran
        self._overlapped_s = 0.0  # seconds of the last step, which hide the planning of `_ahead`
        self._due_s = 0.0  # end of the last step
        self._now_s: Callable[[], float]  # virtual in a simulation
        self._failure: str | None = None
        self._worker: WorkerCore
        self._executor: SimExecutor
        self._card: ModelCard
        self._exchange: TimedExchange
        self._transfers = deque[QueuedOperation]()
        self._transfer_turns: TransferTurns
        self._operations = set[asyncio.Future[KvResult]]()  # without a result

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
        return float(self._loop is not None)

    async def start(self) -> None:
        """Build the worker and start its steps.

        Raises:
            CheckpointError: the tokenizer is missing or damaged.
            ValueError: the profile, the policy or a setting of the simulator is wrong.
        """
        loop = asyncio.get_running_loop()
        self._now_s = loop.time
        built = self._build(self._config)
        self._worker, self._executor, self._card = built.worker, built.executor, built.card
        exchange = self._exchange = built.exchange
        self._transfer_turns = TransferTurns(
            exchange, self._transfers, lambda: loop.time() + exchange.copied_s
        )
        self._loop, self._context = loop, copy_context()
        self._wake()

    async def stop(self) -> None:
        """Stop immediately. Open requests end with `BackendFailed`."""
        self._fail(self._failure or "the worker was stopped")
        if self._turn is not None:
            self._turn.cancel()

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if the worker can never run the request."""
        self._worker.admission.check(request)

    def submit(self, request: GenerationRequest, sink: DeltaSink) -> None:
        """Queue the request, and put its deltas into the sink."""
        if self._failure is not None:
            raise BackendFailed(self._failure)
        self._sinks.open(request, sink)
        self._worker.submit(request, self._now_s())
        self._wake()

    def cancel(self, request_id: str) -> None:
        """Cancel a request, if it runs."""
        self._sinks.cancel(request_id)

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change a request's pace."""
        self._worker.set_pace(request_id, pace, tpot_s)
        self._wake()

    def load(self) -> WorkerLoad:
        """Return the worker's load."""
        return self._worker.load()

    @property
    def block_bytes(self) -> int:
        """Bytes that a KV block would have, or 0 if the worker exchanges none."""
        form = self._card.kv_format
        return 0 if form is None else form.block_bytes

    def operate(self, operation: KvOperation) -> asyncio.Future[KvResult]:
        """Run an operation on the KV blocks, between two steps if copies take time."""
        if self._failure is not None or self._loop is None:
            raise BackendFailed(self._failure or "the worker was not started")
        result: asyncio.Future[KvResult] = self._loop.create_future()
        if not self._exchange.takes_time:
            result.set_result(self._exchange.run(operation, self._now_s()))
            return result

        def done(found: KvResult) -> None:
            if not result.done():
                result.set_result(found)

        self._operations.add(result)
        result.add_done_callback(self._operations.discard)
        self._transfers.append((operation, done))
        self._wake()
        return result

    async def pull_blocks(
        self, hashes: Sequence[bytes], *, urgent: bool = False
    ) -> AsyncGenerator[KvChunk, None]:
        """Yield the blocks of a part of a hash chain, several chunks together.

        Blocks take the time of a transfer with `WINDOW_CHUNKS` chunks under way. The link is idle
        if these chunks are sent before the first of them has arrived. Chunks that arrive within
        `TOGETHER_S` arrive with the last of them, so that a prompt takes a few turns of the event
        loop. A turn for each chunk would take a quarter of the time of a simulation.
        """
        link, chunk_blocks = self._link, blocks_per_chunk(self.block_bytes)
        block_s = self.block_bytes / link.bytes_per_s
        chunk_s = chunk_blocks * block_s
        idle_s = max(link.latency_s - (WINDOW_CHUNKS - 1) * chunk_s, 0.0)
        chunks = WINDOW_CHUNKS
        if not idle_s and chunks * chunk_s > TOGETHER_S:
            chunks = max(int(TOGETHER_S / chunk_s), 1)
        blocks = chunks * chunk_blocks
        # Workers copy between their steps, and so chunk by chunk.
        each = chunk_blocks if self._exchange.takes_time else blocks
        for begin in range(0, len(hashes), blocks):
            end = min(begin + blocks, len(hashes))
            parts = [tuple(hashes[n : min(n + each, end)]) for n in range(begin, end, each)]
            found = await asyncio.gather(*(self.operate(ExportBlocks(p, urgent)) for p in parts))
            exported, number = list[KvChunk](), 0
            for part, chunk in zip(parts, found, strict=True):
                assert isinstance(chunk, KvChunk)
                number += len(chunk.hashes)
                exported += [chunk] * bool(chunk.hashes)
                if len(chunk.hashes) < len(part):
                    break  # blocks after a missing one are useless
            waited_s = idle_s if begin else link.latency_s
            await asyncio.sleep(waited_s + number * block_s)
            for chunk in exported:
                yield chunk
            if number < end - begin:
                return

    def _end(self, request_id: str, cancelled: bool) -> None:
        if cancelled:
            self._worker.cancel(request_id)

    def _wake(self) -> None:
        """Plan a step in the next turn of the event loop, unless a step is under way."""
        if self._turn is None and self._loop is not None and self._failure is None:
            self._turn = self._loop.call_soon(self._begin_steps, context=self._context)

    def _fail(self, reason: str) -> None:
        """End all requests and operations."""
        self._failure = reason
        self._sinks.fail(reason)
        for result in tuple(self._operations):
            if not result.done():
                result.set_exception(BackendFailed(reason))

    def _begin_steps(self) -> None:
        """Plan the first step after an idle time."""
        self._due_s = self._now_s()
        self._run()

    def _run(self) -> None:
        """End the step that is due, and begin the next one."""
        try:
            self._run_steps()
        except Exception as error:  # noqa: BLE001 - the open requests report it
            self._fail(f"{type(error).__name__}: {error}")

    def _run_steps(self) -> None:
        """Run steps until the loop has other work, or the worker is idle."""
        worker, executor, now = self._worker, self._executor, self._now_s
        transfers, exchange = self._transfer_turns, self._exchange
        while self._failure is None:
            exchange.copied_s = 0.0
            if self._under_way is not None:
                (plan, result), self._under_way = self._under_way, None
                self._sinks.deliver(worker.complete(plan, result, now()))
                if exchange.takes_time:
                    transfers.take_busy()
            ahead = self._ahead
            following = ahead or worker.plan(now())
            if following is None:
                copying = exchange.takes_time and transfers.take_idle()
                self._turn = self._copy_for(exchange.copied_s) if copying else None
                return
            result = executor.execute(following)
            # Each step is due a step time after the due time of the last step, so late timers do
            # not add up. But no device compensates for a host that delayed it by more than a step.
            now_s = now()
            waited_s = executor.host_s if ahead is None else executor.host_s - self._overlapped_s
            waited_s = max(waited_s, 0.0) + exchange.copied_s
            started_s = max(self._due_s, now_s - result.step_s) + waited_s
            self._due_s = started_s + result.step_s
            self._ahead = worker.plan_ahead(following, now_s) if executor.launches_ahead else None
            self._overlapped_s = result.step_s
            self._under_way = following, result
            seconds = self._due_s - now_s
            if not self._skip_time(seconds):
                self._turn = self._run_after(seconds)
                return

    def _copy_for(self, seconds: float) -> asyncio.Handle:
        """Copy blocks for some seconds while no step is due, and then look for work."""
        assert self._loop is not None
        return self._loop.call_later(seconds, self._begin_steps, context=self._context)

    def _run_after(self, seconds: float) -> asyncio.Handle:
        assert self._loop is not None
        if seconds <= 0.0:
            return self._loop.call_soon(self._run, context=self._context)
        return self._loop.call_later(seconds, self._run, context=self._context)
