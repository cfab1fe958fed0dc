"""Workers outside the gateway's process: the messages they exchange with it, and what they can run.

Such a worker is an engine in its own process, reached over a socket (`engine/channel.py`), or a
worker of another node, reached over a WebSocket (`peer/channel.py`). Messages are msgpack, in which
token ids are bytes. A link carries many requests, each under an id of its own that is used once: a
late message for an abandoned request is not mistaken for its second try.

The load of another node's worker is in `Update`, which arrives ten times a second; admission,
routing, speculation and the watchdog read it there. The worker's report in the state store
(`gateway.state.store`) has no load: only capacity and watermark for reservations, and the address,
the model and the context length for discovery.
"""

from __future__ import annotations

from typing import Any, Generic, TypeVar

import msgspec

from draftgate.backends.core.admission import Admission
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.token_ids import TokenIds, from_bytes, to_bytes
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad

Received = TypeVar("Received")


class WorkerMessage(msgspec.Struct, tag=True, frozen=True, omit_defaults=True):
    """Any message. Fields that the receiver does not know are ignored."""


class Start(WorkerMessage, frozen=True):
    """To an engine's process, as the first message: load this."""

    config: WorkerConfig


class Submit(WorkerMessage, frozen=True):
    """To the worker: run a request that has been checked.

    Attributes:
        lease_number: number of the lease on the worker's capacity; 0 without a lease.
    """

    id: str
    request: GenerationRequest
    lease_number: int = 0


class Cancel(WorkerMessage, frozen=True):
    """To the worker: end a request, if it has not ended."""

    id: str


class SetPace(WorkerMessage, frozen=True):
    """To the worker: change the pace of a request, if it has not ended."""

    id: str
    pace: Pace


class FetchTokenizer(WorkerMessage, frozen=True):
    """To a peer: send the files of the model's tokenizer."""


class Loading(WorkerMessage, frozen=True):
    """From an engine's process: the share of loading that is done."""

    share: float


class Ready(WorkerMessage, frozen=True):
    """From the worker, once it can run requests; from a peer, the first message.

    Attributes:
        epoch: of a peer: this life of the worker; each restart has a greater one.
        tokenizer: of a peer: the digest of its tokenizer's files.
        proof: of a peer: that it knows the secret, too; empty if it has none.
    """

    card: ModelCard
    epoch: str = ""
    tokenizer: str = ""
    proof: str = ""


class Update(WorkerMessage, frozen=True):
    """From the worker: what a step produced. An empty update shows that the worker is alive.

    Attributes:
        deltas: in order, each with the id of its request.
        load: of the worker, after these deltas.
        failed: requests that ended with an error after these deltas, with the reasons.
        sent_s: of a peer: the time of sending, by the clock of the deltas' `phases`.
        refusing: of a peer: why it takes no further requests; empty while it takes some.
        watermark: of a peer: number of the last lease that `load` includes.
        leaving: of a peer: whether it is shutting down in order; `failed` is due to that.
    """

    deltas: list[tuple[str, Delta]]
    load: WorkerLoad
    failed: list[tuple[str, str]] = []
    sent_s: float = 0.0
    refusing: str = ""
    watermark: int = 0
    leaving: bool = False


class Failed(WorkerMessage, frozen=True):
    """From an engine's process, as the last message: loading or a step failed.

    Attributes:
        kind: name of the error's class.
    """

    kind: str
    message: str


class TokenizerFiles(WorkerMessage, frozen=True):
    """From a peer: the files of its tokenizer, by path."""

    files: dict[str, bytes]


Command = Start | Submit | Cancel | SetPace | FetchTokenizer
Report = Loading | Ready | Update | Failed | TokenizerFiles


class Codec(Generic[Received]):
    """Encodes any message, and decodes messages of one kind."""

    def __init__(self, received: object) -> None:
        """Decode messages of this type: a struct, or a union of structs."""
        self._encoder = msgspec.msgpack.Encoder(enc_hook=_ids_to_bytes)
        self._decoder: msgspec.msgpack.Decoder[Received] = msgspec.msgpack.Decoder(
            received, dec_hook=_ids_from_bytes
        )

    def encode(self, message: WorkerMessage) -> bytes:
        """Return a message as bytes."""
        return self._encoder.encode(message)

    def decode(self, data: bytes) -> Received:
        """Return the message that these bytes encode.

        Raises:
            ValueError: they encode none.
        """
        try:
            return self._decoder.decode(data)
        except (msgspec.DecodeError, UnicodeDecodeError, RecursionError) as error:
            raise ValueError(f"not a message of this protocol: {error}") from None


def _ids_to_bytes(ids: TokenIds) -> bytes:
    return to_bytes(ids)


def _ids_from_bytes(_: type, data: Any) -> TokenIds:
    # msgspec turns a TypeError or ValueError raised here into a DecodeError.
    return from_bytes(data)


def remote_admission(card: ModelCard, tokenizer: Tokenizer) -> Admission:
    """Return what a worker with this card can run, to check requests before they are sent."""
    able = card.capabilities
    grammars = LlGrammars(tokenizer, frozenset(card.eos_ids)) if able.formats else None
    pool_tokens = card.pool_tokens or card.max_model_len
    return Admission(tokenizer, card.max_model_len, pool_tokens, grammars, embeds=able.embeddings)
