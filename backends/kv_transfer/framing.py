"""Frames of messages, in which the bytes of KV blocks follow the message and are never copied.

    length of the message, length of the blocks    (4 bytes each, little-endian)
    message                                        (msgpack, `backends.remote_worker`)
    blocks

Engine processes and peers use the same frames.
"""

from __future__ import annotations

from struct import Struct
from typing import Final, Generic, TypeVar, cast

from msgspec.structs import replace

from draftgate.backends.kv_transfer.exchange import AdoptBlocks
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.remote_worker import Codec, KvCall, KvReply, WorkerMessage

LENGTHS: Final = Struct("<II")

NO_BYTES: Final = memoryview(b"")

Received = TypeVar("Received")


class FrameCodec(Generic[Received]):
    """Encodes any message, and decodes messages of one kind.

    `received` is the type of the messages to decode, a struct or a union of structs.
    """

    def __init__(self, received: object) -> None:
        self._codec: Codec[Received] = Codec(received)

    def encode(self, message: WorkerMessage) -> tuple[bytes, memoryview]:
        """Return the lengths with the message, and the bytes of its blocks."""
        message, blocks = _detached(message)
        data = self._codec.encode(message)
        return LENGTHS.pack(len(data), len(blocks)) + data, blocks

    def decode(self, data: bytes | bytearray, blocks: memoryview) -> Received:
        """Return the message of a frame.

        Raises:
            ValueError: the data is not a message.
        """
        return cast(Received, _attached(self._codec.decode(data), blocks))


def _detached(message: WorkerMessage) -> tuple[WorkerMessage, memoryview]:
    """Return a message without the bytes of its blocks, and these bytes."""
    chunk = _chunk(message)
    if chunk is None:
        return message, NO_BYTES
    return _with_chunk(message, replace(chunk, data=NO_BYTES)), chunk.data


def _attached(message: object, blocks: memoryview) -> object:
    """Return a message with the bytes of its blocks."""
    chunk = _chunk(message)
    if chunk is None or not blocks:
        return message
    return _with_chunk(cast(WorkerMessage, message), replace(chunk, data=blocks))


def _chunk(message: object) -> KvChunk | None:
    if isinstance(message, KvReply) and isinstance(message.result, KvChunk):
        return message.result
    if isinstance(message, KvCall) and isinstance(message.operation, AdoptBlocks):
        return message.operation.chunk
    return None


def _with_chunk(message: WorkerMessage, chunk: KvChunk) -> WorkerMessage:
    if isinstance(message, KvReply):
        return replace(message, result=chunk)
    assert isinstance(message, KvCall)
    return replace(message, operation=replace(message.operation, chunk=chunk))
