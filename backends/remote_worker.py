"""Workers outside the gateway's process: their messages, and the requests that they can run.

Such a worker is an engine in its own process or a worker of another node. The gateway reaches the
engine over a socket (`engine/channel.py`) and the other node over a connection (`peer/channel.py`).
Messages are msgpack, in which token ids are bytes. They travel in frames (`framing`), in which the
bytes of KV blocks follow the message. A link carries many requests. Each has an id that is used
once, so that a late message for an abandoned request is not mistaken for its second attempt.

The load of another node's worker is in an `Update` at least ten times a second. Admission,
routing, speculation and the watchdog read the load there. The worker's report in the state store
(`gateway.state.values`) contains no load. It has capacity and watermark for reservations, and the
address, the model and the context length for discovery.
"""

from __future__ import annotations

from typing import Final, NamedTuple, Self, cast

import msgspec
from msgspec.structs import replace

from draftgate.backends.core.admission import Admission
from draftgate.backends.framing import NO_BYTES
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.kv_transfer.exchange import AdoptBlocks, KvOperation, KvResult
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import Role, WorkerLoad


class WorkerMessage(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Base class of all messages. The receiver ignores unknown fields."""

    @property
    def blocks(self) -> memoryview:
        """The bytes of KV blocks, which follow the message in its frame."""
        return NO_BYTES

    def with_blocks(self, blocks: memoryview) -> Self:
        """Return the message with these blocks in place of its own, if it has any."""
        return self


class Start(WorkerMessage, frozen=True):
    """First message to an engine's process, which loads the model."""

    config: WorkerConfig


class Submit(WorkerMessage, frozen=True):
    """Message to the worker to run a request that has been checked.

    Attributes:
        lease_number: number of the lease on the worker's capacity, or 0 without a lease.
    """

    id: str
    request: GenerationRequest
    lease_number: int = 0


class Cancel(WorkerMessage, frozen=True):
    """Message to the worker to end a request, if it has not ended."""

    id: str


class SetPace(WorkerMessage, frozen=True):
    """Message to the worker to change the pace of a request, if it has not ended.

    Attributes:
        tpot_s: as for `Backend.set_pace`.
    """

    id: str
    pace: Pace
    tpot_s: float = 0.0


class SetRole(WorkerMessage, frozen=True):
    """Message to a peer to change the role of its worker, if its `Ready` says that it can."""

    role: Role


class Alive(WorkerMessage, frozen=True):
    """Message to a peer that this node still runs. The first message to a peer.

    Attributes:
        delta_fields: number of fields of a `Delta` that this node can read. A delta is an array, in
            which an unknown field is an error. Nodes that do not state the number read 12 fields.
    """

    delta_fields: int = 12


class FetchTokenizer(WorkerMessage, frozen=True):
    """Message to a peer to send the files of the model's tokenizer."""


class Loading(WorkerMessage, frozen=True):
    """Message from an engine's process with the completed share of loading."""

    share: float


class Ready(WorkerMessage, frozen=True):
    """Message from the worker once it can run requests. A peer's answer to the first `Alive`.

    Attributes:
        epoch: epoch of a peer's worker, which each restart increases.
        tokenizer: digest of a peer's tokenizer files.
        streams_blocks: whether a peer exchanges KV blocks over a stream (`peer.block_stream`).
        changes_role: whether a peer accepts `SetRole`.
    """

    card: ModelCard
    epoch: str = ""
    tokenizer: str = ""
    streams_blocks: bool = False
    changes_role: bool = False


class Update(WorkerMessage, frozen=True):
    """Message from the worker with the deltas of a step.

    An empty update shows that the worker is alive.

    Attributes:
        deltas: deltas in order, each with the id of its request.
        load: load of the worker after these deltas, or None if a load was sent shortly before.
        failed: requests that ended with an error after these deltas, with the reasons.
        sent_s: time at which a peer sent the update, by the clock of the deltas' `phases`.
        refusing: reason for which a peer takes no further requests, or empty.
        watermark: number of the last lease that the `load` of a peer includes, if it has a load.
        leaving: whether a peer is shutting down in order, so that requests in `failed` ended for
            this reason.
        role: role of a peer.
        without_adapter: those requests in `failed` whose LoRA adapters could not be loaded.
    """

    deltas: list[tuple[str, Delta]]
    load: WorkerLoad | None = None
    failed: list[tuple[str, str]] = []
    sent_s: float = 0.0
    refusing: str = ""
    watermark: int = 0
    leaving: bool = False
    role: Role = Role.ANY
    without_adapter: tuple[str, ...] = ()


class Failed(WorkerMessage, frozen=True):
    """Last message from an engine's process, after loading or a step failed.

    Attributes:
        kind: name of the error's class.
    """

    kind: str
    message: str


class TokenizerFiles(WorkerMessage, frozen=True):
    """Message from a peer with the files of its tokenizer, by path."""

    files: dict[str, bytes]


class SharedBytes(NamedTuple):
    """The leading bytes of a slot of shared memory (`engine.shared_memory`)."""

    slot: int
    num_bytes: int


class KvCall(WorkerMessage, frozen=True):
    """Message to an engine's process to run an operation on its KV blocks.

    Attributes:
        shared: place of the bytes of a chunk that the operation stores or may return, or None if
            bytes follow the message.
    """

    id: int
    operation: KvOperation
    shared: SharedBytes | None = None

    @property
    def blocks(self) -> memoryview:
        """The bytes of a chunk to store."""
        operation = self.operation
        return operation.chunk.data if isinstance(operation, AdoptBlocks) else NO_BYTES

    def with_blocks(self, blocks: memoryview) -> Self:
        """Return the call with these bytes for its chunk, if it has one."""
        if not isinstance(self.operation, AdoptBlocks):
            return self
        chunk = replace(self.operation.chunk, data=blocks)
        return replace(self, operation=replace(self.operation, chunk=chunk))


class KvReply(WorkerMessage, frozen=True):
    """Message from an engine's process with the result of the `KvCall` of this id.

    Attributes:
        shared: place of the bytes of a chunk, or None if bytes follow the message.
    """

    id: int
    result: KvResult
    shared: SharedBytes | None = None

    @property
    def blocks(self) -> memoryview:
        """The bytes of an exported chunk."""
        return self.result.data if isinstance(self.result, KvChunk) else NO_BYTES

    def with_blocks(self, blocks: memoryview) -> Self:
        """Return the reply with these bytes for its chunk, if it has one."""
        if not isinstance(self.result, KvChunk):
            return self
        return replace(self, result=replace(self.result, data=blocks))


Command = Start | Submit | Cancel | SetPace | SetRole | Alive | FetchTokenizer | KvCall
Report = Loading | Ready | Update | Failed | TokenizerFiles | KvReply


ALIVE: Final = Alive(len(Delta._fields))
"""The `Alive` of this version."""


def readable_deltas(deltas: list[tuple[str, Delta]], num_fields: int) -> list[tuple[str, Delta]]:
    """Return deltas for a node that can read this number of their fields."""
    if num_fields >= len(Delta._fields):
        return deltas
    return [(link_id, cast(Delta, delta[:num_fields])) for link_id, delta in deltas]


def remote_admission(card: ModelCard, tokenizer: Tokenizer) -> Admission:
    """Return the limits of a worker with this card, to check requests before they are sent."""
    able = card.capabilities
    grammars = LlGrammars(tokenizer, frozenset(card.eos_ids)) if able.formats else None
    pool_tokens = card.pool_tokens or card.max_model_len
    return Admission(
        tokenizer,
        card.max_model_len,
        pool_tokens,
        grammars,
        tasks=able.tasks,
        adapters=able.adapters,
        options=able.options,
    )
