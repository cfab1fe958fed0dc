"""The adapters of an engine: loads them when requests need them, without stopping other requests.

A thread of its own reads an adapter and prepares its matrices. Between two steps, the engine's
thread then puts them into their slot.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial
from typing import Any, Final, Protocol

import torch

from draftgate.backends.core.adapter_slots import AdapterSlots
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.lora.weights import LayerPairs, LoraCheckpoint
from draftgate.backends.errors import CheckpointError
from draftgate.backends.types import GenerationRequest, Pace

logger = logging.getLogger(__name__)

_THREAD_NAME: Final = "draftgate-adapters"


class AdapterMemory(Protocol):
    """The memory of the adapters on a device."""

    def prepare(self, layers: Any, *, exact: bool) -> Any:
        """Return the matrices of an adapter for `install`. Any thread may call the method.

        Raises:
            CheckpointError: `exact` is set, and the bits of its products depend on the step.
        """
        ...

    def install(self, slot: int, prepared: Any) -> None:
        """Put an adapter into a slot. The engine's thread calls the method between two steps."""
        ...


class AdapterService:
    """Submits requests with adapters to a worker, as soon as their adapters are in memory.

    Only the engine's thread may call the methods.
    """

    def __init__(
        self,
        worker: WorkerCore,
        memory: AdapterMemory,
        checkpoints: Mapping[str, LoraCheckpoint],
        num_slots: int,
        dtype: torch.dtype,
        *,
        exact: bool,
    ) -> None:
        """Load no adapter yet.

        Args:
            checkpoints: the checked adapters, by their digests.
            num_slots: maximum number of adapters in memory.
            dtype: dtype of the model.
            exact: whether the worker promises that texts do not depend on the batch.
        """
        self._worker = worker
        self._memory = memory
        self._checkpoints = checkpoints
        self._dtype = dtype
        self._exact = exact
        self._slots = AdapterSlots(num_slots, worker.is_open)
        self._paces: dict[str, tuple[Pace, float]] = {}  # of waiting requests
        # Kernels depend on the number of threads, which each thread sets for itself.
        threads = torch.get_num_threads()
        self._reader = ThreadPoolExecutor(1, _THREAD_NAME, torch.set_num_threads, (threads,))

    def connect(
        self, run: Callable[[Callable[[], None]], None], reject: Callable[[str, str], None]
    ) -> None:
        """Set how the service reaches the engine, before the first request.

        Args:
            run: runs a function in the engine's thread between two steps. Any thread may call it.
            reject: ends a request, with the reason.
        """
        self._run, self._reject = run, reject

    @property
    def waiting_sequences(self) -> int:
        """Number of sequences that wait for their adapters."""
        return self._slots.waiting_sequences

    @property
    def is_loading(self) -> bool:
        """Whether an adapter is being loaded."""
        return self._slots.is_loading

    def submit(self, request: GenerationRequest, arrived_s: float) -> None:
        """Queue a request with an adapter, for the next call of `admit`."""
        self._slots.add(request, arrived_s)
        self._paces[request.request_id] = Pace.FULL, 0.0

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float) -> None:
        """Change a request's pace, if it still waits for its adapter."""
        if request_id in self._paces:
            self._paces[request_id] = pace, tpot_s

    def cancel(self, request_id: str) -> None:
        """Forget a request, if it still waits for its adapter."""
        if self._paces.pop(request_id, None) is not None:
            self._slots.cancel(request_id)

    def admit(self) -> None:
        """Submit the requests whose adapters are in memory, and load the next adapters."""
        if not self._paces:
            return
        for adapter, slot in self._slots.admit(self._submit):
            read = self._reader.submit(self._read, adapter)
            finish = partial(self._finish, adapter, slot, read)
            read.add_done_callback(partial(self._queue, finish))

    def close(self) -> None:
        """Load no further adapters."""
        self._reader.shutdown(wait=False, cancel_futures=True)

    def _submit(self, request: GenerationRequest, arrived_s: float, slot: int) -> None:
        self._worker.submit(request, arrived_s, slot)
        self._worker.set_pace(request.request_id, *self._paces.pop(request.request_id))

    def _queue(self, finish: Callable[[], None], _read: Future[Any]) -> None:
        self._run(finish)

    def _read(self, adapter: str) -> Any:
        layers: list[LayerPairs] = list(self._checkpoints[adapter].read(self._dtype))
        return self._memory.prepare(layers, exact=self._exact)

    def _finish(self, adapter: str, slot: int, read: Future[Any]) -> None:
        """Install an adapter, or reject the requests that wait for it."""
        error = read.exception()
        if error is None:
            self._memory.install(slot, read.result())
            self._slots.loaded(adapter)
            logger.info("loaded an adapter: %s", self._checkpoints[adapter].directory)
            return
        # Any other error, such as too little memory, is not a reason to end the engine either.
        named = isinstance(error, CheckpointError)
        reason = str(error) if named else f"the adapter cannot be loaded: {error!r}"
        logger.warning("cannot load an adapter: %s", reason, exc_info=None if named else error)
        for request in self._slots.failed(adapter):
            del self._paces[request.request_id]
            self._reject(request.request_id, reason)
