"""The engine behind the `Backend` protocol: where the event loop and the worker's thread meet."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator
from pathlib import Path

import torch

from backends.base import WorkerConfig
from backends.checkpoints import find_checkpoint
from backends.core.kv_blocks import KvBlocks
from backends.core.scheduler import Scheduler, SchedulerConfig
from backends.core.steps import Proposer
from backends.core.worker import Worker
from backends.engine.config import ModelConfig, read_model_config
from backends.engine.kv_pool import BLOCK_TOKENS, KvPool, num_blocks_for
from backends.engine.loop import EngineLoop, LoadedEngine
from backends.engine.model import Decoder
from backends.engine.numerics import choose_dtype, numerics_class
from backends.engine.proposers.ngram import NgramProposer
from backends.engine.runner import Runner
from backends.engine.warmup import measure_step_cost, rows_are_exact
from backends.engine.weights import load_weights
from backends.errors import BackendError, BackendFailed, CheckpointError
from backends.shipped import SHIPPED_MODEL_ID
from backends.streams import DeltaStreams
from backends.tokenizer import Tokenizer
from backends.types import Delta, GenerationRequest, ModelCard
from policies.registry import speculation_policy
from policies.types import WorkerLoad

PROPOSERS = {"ngram": NgramProposer}


class EngineBackend:
    """Runs a checkpoint in this process; satisfies `backends.base.Backend`."""

    def __init__(self, config: WorkerConfig) -> None:
        """Prepare; nothing is loaded before `start`."""
        self._config = config
        self._streams = DeltaStreams(on_abandon=self._abandon)
        self._loop = EngineLoop(lambda: load_engine(config), self)
        self._event_loop: asyncio.AbstractEventLoop | None = None
        self._loaded: asyncio.Future[LoadedEngine] | None = None
        self._engine: LoadedEngine | None = None
        self._failure: str | None = None

    @property
    def card(self) -> ModelCard:
        """What is served."""
        return self._started().card

    @property
    def tokenizer(self) -> Tokenizer:
        """The model's tokenizer."""
        return self._started().worker.tokenizer

    @property
    def failure(self) -> str | None:
        """Why the engine is broken, or None."""
        return self._failure

    @property
    def progress(self) -> float:
        """The share of loading that is done."""
        return self._loop.progress

    async def start(self) -> None:
        """Load and warm up in the worker's thread."""
        self._event_loop = asyncio.get_running_loop()
        self._loaded = self._event_loop.create_future()
        self._loop.start()
        self._engine = await self._loaded

    async def stop(self) -> None:
        """Stop after the step in progress; open streams end with an error."""
        self._failure = self._failure or "the worker was stopped"
        self._loop.stop()
        if self._loop.ident is not None:
            await asyncio.to_thread(self._loop.join)
        self._streams.fail(self._failure)

    def check(self, request: GenerationRequest) -> None:
        """Raise `RequestRejected` if the request can never run here."""
        self._started().worker.check(request)

    def generate(self, request: GenerationRequest) -> AsyncGenerator[Delta, None]:
        """Queue the request and return its deltas."""
        self.check(request)
        if self._failure is not None:
            raise BackendFailed(self._failure)
        stream = self._streams.open(request)
        self._loop.submit(request)
        return stream

    def load(self) -> WorkerLoad:
        """Return the load after the latest step."""
        return self._loop.load_snapshot

    # --- called in the worker's thread ---------------------------------------------------------

    def ready(self, engine: LoadedEngine) -> None:
        """Hand the loaded engine to `start`."""
        self._on_event_loop(self._settle, engine)

    def deltas(self, batch: list[tuple[str, Delta]]) -> None:
        """Hand a step's deltas over in one call."""
        self._on_event_loop(self._streams.deliver, batch)

    def failed(self, error: BaseException) -> None:
        """End every stream, or `start`, with the error."""
        self._on_event_loop(self._fail, error)

    # -------------------------------------------------------------------------------------------

    def _on_event_loop(self, callback: object, argument: object) -> None:
        assert self._event_loop is not None
        try:
            self._event_loop.call_soon_threadsafe(callback, argument)  # type: ignore[arg-type]
        except RuntimeError:
            # The event loop is closed: the process is on its way out and nobody listens.
            self._loop.stop()

    def _settle(self, engine: LoadedEngine) -> None:
        if self._loaded is not None and not self._loaded.done():
            self._loaded.set_result(engine)

    def _fail(self, error: BaseException) -> None:
        self._failure = f"{type(error).__name__}: {error}"
        if self._loaded is not None and not self._loaded.done():
            known = isinstance(error, BackendError | ValueError)
            self._loaded.set_exception(error if known else BackendFailed(self._failure))
        self._streams.fail(self._failure)

    def _abandon(self, request_id: str) -> None:
        self._loop.cancel(request_id)

    def _started(self) -> LoadedEngine:
        if self._engine is None:
            raise RuntimeError("the backend was not started")
        return self._engine


def load_engine(config: WorkerConfig) -> LoadedEngine:
    """Load, warm up and measure a worker. Runs in the thread that will use it.

    Raises:
        CheckpointError: the model cannot be loaded.
        ValueError: a setting does not fit, e.g. `kv_bytes` holds not even one block.
    """
    if config.threads is not None:
        torch.set_num_threads(config.threads)
    directory = find_checkpoint(config.model)
    model = read_model_config(directory)
    tokenizer = _tokenizer(directory, model)
    dtype = choose_dtype(config.dtype, directory)
    max_model_len = min(
        config.max_model_len or model.max_position_embeddings, model.max_position_embeddings
    )
    # More memory than every sequence at full length is of no use.
    most = config.max_num_seqs * -(-max_model_len // BLOCK_TOKENS)
    num_blocks = min(num_blocks_for(model, config.kv_bytes or 1 << 30, dtype.itemsize), most)
    pool = KvPool(model, num_blocks, dtype)
    decoder = Decoder(model, load_weights(directory, model, dtype), max_model_len)
    runner = Runner(decoder, pool)

    most_tokens = min(num_blocks * BLOCK_TOKENS, max_model_len)
    exact = dtype is torch.float32 and rows_are_exact(runner, most_tokens)
    scheduler = Scheduler(
        SchedulerConfig(config.max_num_seqs, config.max_step_tokens, model.eos_ids),
        KvBlocks(num_blocks, BLOCK_TOKENS),
        speculation_policy(config.speculation),
        _proposers(config.proposer),
        measure_step_cost(runner, most_tokens, num_blocks),
    )
    card = ModelCard(
        SHIPPED_MODEL_ID if config.model is None else directory.name,
        config.model or SHIPPED_MODEL_ID,
        max_model_len,
        numerics_class(directory, dtype, exact=exact),
        int(time.time()),
    )
    return LoadedEngine(Worker(scheduler, tokenizer, max_model_len), runner, card)


def _tokenizer(directory: Path, model: ModelConfig) -> Tokenizer:
    """Return the tokenizer, all of whose tokens the model knows."""
    tokenizer = Tokenizer(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{directory}: the tokenizer has {tokenizer.vocab_size} tokens, "
            f"but config.json says {model.vocab_size}"
        )
    return tokenizer


def _proposers(name: str | None) -> dict[str, Proposer]:
    """Return the proposers to offer: all, or the one named.

    Raises:
        ValueError: no such proposer.
    """
    if name is not None and name not in PROPOSERS:
        raise ValueError(f"unknown proposer {name!r}; known: {', '.join(PROPOSERS)}")
    return {key: build() for key, build in PROPOSERS.items() if name in {None, key}}
