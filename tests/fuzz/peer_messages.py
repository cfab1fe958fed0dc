"""Targets: the messages of other nodes, and the frames that carry them and KV blocks."""

from __future__ import annotations

from typing import Any

from draftgate.backends.core.admission import Admission
from draftgate.backends.errors import RequestRejected
from draftgate.backends.framing import Codec, FrameChannel, FrameReader, FrameTooLarge, framed
from draftgate.backends.kv_transfer.exchange import AdoptBlocks
from draftgate.backends.kv_transfer.format import KvChunk, KvFormat
from draftgate.backends.peer.blocks import BlockCommand, BlockReport, block_stream
from draftgate.backends.peer.channel import MOST_COMMAND_BYTES
from draftgate.backends.remote_worker import Command, KvCall, KvReply, Report, Submit
from tests.fuzz.grammars import GRAMMARS
from tests.fuzz.http_bodies import TOKENIZER
from tests.fuzz.mutation import MSGPACK
from tests.fuzz.target import Target

ADMISSION = Admission(TOKENIZER, 8192, 65536, GRAMMARS)
COMMANDS: Codec[Command] = Codec(Command)
REPORTS: Codec[Report] = Codec(Report)
FORMAT = KvFormat("class", "uint8", 2, 2, 4)
CHUNKS: Codec[Any] = Codec(BlockCommand | BlockReport)


def read_frames(reader: FrameReader, data: bytes) -> list[tuple[bytes, memoryview]]:
    """Return the frames that these bytes complete."""
    found = []
    while data:
        buffer = reader.buffer()[: len(data)]
        buffer[:], data = data[: len(buffer)], data[len(buffer) :]
        reader.advance(len(buffer))
        while (frame := reader.next()) is not None:
            found.append(frame)
    return found


def command(data: bytes) -> None:
    """Read a command, and check its request as the worker does."""
    (frame,) = read_frames(FrameReader(MOST_COMMAND_BYTES), framed(data))
    found = COMMANDS.decode(*frame)
    if isinstance(found, Submit):
        ADMISSION.check(found.request)


def report(data: bytes) -> None:
    """Read a report of a worker."""
    REPORTS.decode(data)


def frames(data: bytes) -> None:
    """Split a stream into messages, which do not depend on the division into pieces."""
    middle = len(data) // 2
    whole, pieces = FrameReader(1 << 16, 1 << 10), FrameReader(1 << 16, 1 << 10)
    expected = read_frames(whole, data)
    assert [*read_frames(pieces, data[:middle]), *read_frames(pieces, data[middle:])] == expected


def check_chunk(chunk: KvChunk) -> None:
    """Check the blocks of a chunk. A damaged chunk has fewer blocks than hashes."""
    assert all(index < len(chunk.hashes) for index in chunk.intact(FORMAT.block_bytes))


def blocks(data: bytes) -> None:
    """Read a message about KV blocks, with the blocks of its chunk."""
    message = CHUNKS.decode(data, memoryview(bytes(FORMAT.block_bytes)))
    if isinstance(message, KvReply) and isinstance(message.result, KvChunk):
        check_chunk(message.result)
    if isinstance(message, KvCall) and isinstance(message.operation, AdoptBlocks):
        check_chunk(message.operation.chunk)


def blocks_over_a_stream(data: bytes) -> None:
    """Read frames of blocks as the event loop does."""
    received: list[object] = []
    stream: FrameChannel[Any] = block_stream(BlockCommand, FORMAT, received.append, lambda: None)
    while data and stream.reason is None:
        buffer = stream.get_buffer(len(data))
        part, data = data[: len(buffer)], data[len(buffer) :]
        buffer[: len(part)] = part
        stream.buffer_updated(len(part))


TARGETS = [
    Target("peer_command", command, (ValueError, RequestRejected), MSGPACK),
    Target("peer_report", report, (ValueError,), MSGPACK),
    Target("peer_frames", frames, (FrameTooLarge,)),
    Target("kv_blocks", blocks, (ValueError,), MSGPACK),
    Target("kv_frames", blocks_over_a_stream),
]
