"""A loaded engine, as its thread runs it."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from msgspec import structs

from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.text_batcher import TextBatcher
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.device_turns import DeviceTurns
from draftgate.backends.engine.encoder.runner import EncoderRunner
from draftgate.backends.engine.lora.service import AdapterService
from draftgate.backends.engine.memory import UnusedMemory
from draftgate.backends.engine.recording import AcceptanceRecording
from draftgate.backends.engine.runner import ModelRunner
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.kv_transfer.exchange import KvExchange
from draftgate.policies.types import WorkerLoad


@dataclass(frozen=True, slots=True)
class LoadedEngine:
    """A loaded worker: the sans-I/O core, the runner of its steps, and the served model.

    Attributes:
        exchange: access of other workers to the KV blocks, or None if it has no KV blocks.
        proposers: by name, cheapest first.
        save_learned: stores step costs and counts of accepted drafts for the next start.
        recording: records drafts to a file, or None.
        unused_memory: returns memory to the system, or None if its memory is fixed.
        turns: the turns of the engines on its device.
        adapters: the LoRA adapters of the model, or None without any.
    """

    worker: WorkerCore | TextBatcher
    executor: ModelRunner | EncoderRunner
    exchange: KvExchange | None
    served: ServedModel
    proposers: dict[str, Proposer]
    save_learned: Callable[[], None] = lambda: None
    recording: AcceptanceRecording | None = None
    unused_memory: UnusedMemory | None = None
    turns: DeviceTurns = field(default_factory=DeviceTurns)
    adapters: AdapterService | None = None

    def load(self) -> WorkerLoad:
        """Return the load, in which requests that wait for their adapters count as waiting.

        While an adapter is loaded, steps are not counted, because a worker without other requests
        needs none.
        """
        load, adapters = self.worker.load(), self.adapters
        if adapters is None or not (adapters.waiting_sequences or adapters.is_loading):
            return load
        waiting = adapters.waiting_sequences
        return structs.replace(
            load,
            waiting=load.waiting + waiting,
            steps=None if adapters.is_loading else load.steps,
            adapter_waiting=waiting,
        )

    def close(self) -> None:
        """Close the recording, and load no further adapters."""
        if self.adapters is not None:
            self.adapters.close()
        if self.recording is not None:
            self.recording.close()
