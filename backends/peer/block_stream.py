"""The stream of KV blocks between two nodes, beside the connection for requests (`channel`).

The connection begins with an HTTP request (`upgrade`) to

    /peer/v1/workers/NUMBER/blocks?format=DIGEST

Afterwards, both nodes send frames with blocks (`backends.framing`). Deltas never wait for blocks,
because the blocks have their own connection.

The connecting node sends calls, and the other node answers each of them, in any order. The end of
the connection ends all calls.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import Final

import msgspec

from draftgate.backends.framing import Received
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.kv_transfer.transfer import CHUNK_BYTES, TransferOutcome
from draftgate.backends.peer.channel import PeerChannel
from draftgate.backends.remote_worker import KvCall, KvReply, WorkerMessage

BLOCKS_PATH: Final = "/blocks"
"""Suffix of a worker's path (`channel.WORKER_PATH`)."""

MOST_MESSAGE_BYTES: Final = 16 << 20
"""Maximum size of a message without its blocks: the hashes of 15 million tokens."""


class FetchBlocks(WorkerMessage, frozen=True):
    """Message to the other node to pull blocks into its worker, directly from a third node.

    Attributes:
        source: URL of the third node's worker.
        hashes: hash chain of the prefix.
        first: number of leading blocks that the worker holds already.
        most_s: time after which the transfer ends, in seconds, or None for no limit.
        urgent: as for `KvSource.pull_blocks`.
    """

    id: int
    source: str
    hashes: tuple[bytes, ...]
    first: int
    most_s: float | None
    urgent: bool = False


class FetchedBlocks(WorkerMessage, frozen=True):
    """Message from the other node after `FetchBlocks`.

    Attributes:
        outcome: the outcome of the transfer, or None if the node cannot reach the source.
    """

    id: int
    outcome: TransferOutcome | None


class CancelKvCall(WorkerMessage, frozen=True):
    """Message to the other node to end a call, whose answer is no longer needed."""

    id: int


class KvCallFailed(WorkerMessage, frozen=True):
    """Message from the other node that a call failed, with the reason."""

    id: int
    reason: str


BlockCommand = KvCall | FetchBlocks | CancelKvCall
BlockReport = KvReply | FetchedBlocks | KvCallFailed


def format_digest(form: KvFormat) -> str:
    """Return a digest of a format. Both ends of a stream must have the same format."""
    return hashlib.blake2b(msgspec.msgpack.encode(form), digest_size=16).hexdigest()


def block_stream(
    received: object,
    form: KvFormat,
    receive: Callable[[Received], None],
    lost: Callable[[], None],
) -> PeerChannel[Received]:
    """Return one end of a stream.

    Args:
        received: type of the messages from the other end.
        form: format of the blocks.
        receive: receives each message, and must return immediately.
        lost: callback for the end of the connection.
    """
    most_block_bytes = max(CHUNK_BYTES, form.block_bytes)
    return PeerChannel(
        received, MOST_MESSAGE_BYTES, receive, lost, most_block_bytes=most_block_bytes
    )
