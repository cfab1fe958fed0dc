"""The KV blocks of a worker of another node, over a stream of their own."""

from __future__ import annotations

import asyncio
import hashlib
from collections.abc import Callable, Sequence
from typing import Final

import aiohttp
import msgspec
from yarl import URL

from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import BackendFailed
from draftgate.backends.framing import CLOSED, Calls, FrameChannel, Received
from draftgate.backends.kv_transfer.exchange import (
    BlockCount,
    ExportBlocks,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import KvChunk, KvFormat
from draftgate.backends.kv_transfer.transfer import (
    CHUNK_BYTES,
    OperatedBlocks,
    TransferEnd,
    TransferOutcome,
)
from draftgate.backends.peer.proof import SharedSecret
from draftgate.backends.peer.upgrade import CONNECT_S, upgraded
from draftgate.backends.remote_worker import KvCall, KvReply, WorkerMessage

UNREACHABLE_S: Final = 30.0
"""Time in seconds until a node that could not reach another node tries again. An attempt costs a
transfer up to `REACH_S` of the other node. (Chosen, not tuned, 2026-11-23.)"""

OUTCOME_S: Final = 0.5
"""Time in seconds that a transfer between two other nodes may take besides the transfer itself: to
connect, and to report its outcome. (Chosen, not tuned, 2026-11-23.)"""

_BROKEN: Final = "the stream of blocks broke"
_UNEXPECTED: Final = "it sent an unexpected answer"


class PeerBlocks(OperatedBlocks):
    """Implements `KvEndpoint` of `backends.base` for a worker of another node.

    The first operation opens the stream, and so does the first one after the stream broke.
    """

    def __init__(
        self, http: aiohttp.ClientSession, url: str, secret: SharedSecret | None, form: KvFormat
    ) -> None:
        """Prepare without connecting.

        Args:
            url: URL of the worker.
            secret: secret of the cluster, or None without one.
            form: format of the blocks, which must be that of the worker.
        """
        self._http = http
        self._url = URL(url + BLOCKS_PATH)
        self._secret = secret
        self._form = form
        self._opening: asyncio.Task[_Stream] | None = None
        self._unreachable: dict[str, float] = {}  # workers, with the time of the next attempt

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self._form.block_bytes

    async def operate(self, operation: KvOperation) -> KvResult:
        """Run an operation on the blocks.

        Raises:
            BackendFailed: the worker failed, or the node cannot be reached.
        """
        stream = await self.open()
        reply = await stream.call(lambda number: KvCall(number, operation))
        if not isinstance(reply, KvReply) or not _answers(operation, reply.result):
            raise BackendFailed(_UNEXPECTED)
        return reply.result

    async def fetch(
        self,
        source: str,
        hashes: Sequence[bytes],
        first: int,
        most_s: float | None,
        *,
        urgent: bool,
    ) -> TransferOutcome | None:
        """Let the node pull blocks directly from the worker of a third node.

        Args:
            source: URL of that worker.
            hashes: hash chain of the prefix.
            first: number of leading blocks that this worker holds already.
            most_s: time after which the transfer ends, in seconds, or None for no limit.
            urgent: as for `KvEndpoint.pull_blocks`.

        Returns:
            The outcome, or None if the node cannot reach the third node.

        Raises:
            BackendFailed: the worker failed, or its node cannot be reached.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._unreachable.get(source, now_s):
            return None
        stream, chain = await self.open(), tuple(hashes)
        try:
            async with asyncio.timeout(None if most_s is None else most_s + OUTCOME_S):
                report = await stream.call(
                    lambda number: FetchBlocks(number, source, chain, first, most_s, urgent)
                )
        except TimeoutError:
            return TransferOutcome(TransferEnd.LATE)
        if not isinstance(report, FetchedBlocks):
            raise BackendFailed(_UNEXPECTED)
        if report.outcome is None:
            self._unreachable[source] = now_s + UNREACHABLE_S
        return report.outcome

    async def open(self) -> _Stream:
        """Return the open stream, which several operations may await.

        Raises:
            BackendFailed: the node cannot be reached, or does not exchange blocks with this node.
        """
        if self._opening is None or _has_ended(self._opening):
            self._opening = asyncio.create_task(self._open(), name="open a stream of blocks")
        return await asyncio.shield(self._opening)

    def close(self) -> None:
        """Close the stream, so that operations under way fail. The next one opens it again."""
        opening, self._opening = self._opening, None
        if opening is not None:
            opening.add_done_callback(_close_opened)

    async def _open(self) -> _Stream:
        url = self._url.with_query(format=format_digest(self._form))
        try:
            async with asyncio.timeout(CONNECT_S):
                return _Stream(*await upgraded(self._http, url, self._secret), self._form)
        except TimeoutError as error:
            raise BackendFailed(public_reason(error)) from None


def _answers(operation: KvOperation, result: KvResult) -> bool:
    """Return whether a result belongs to an operation, and no block to another hash."""
    if isinstance(result, KvChunk) and isinstance(operation, ExportBlocks):
        return result.hashes == operation.hashes[: len(result.hashes)]
    return isinstance(result, BlockCount) and not isinstance(operation, ExportBlocks)


def _has_ended(opening: asyncio.Task[_Stream]) -> bool:
    if not opening.done():
        return False
    failed = opening.cancelled() or opening.exception() is not None
    return failed or opening.result().channel.reason is not None


def _close_opened(opening: asyncio.Task[_Stream]) -> None:
    if not _has_ended(opening):
        opening.result().channel.fail(CLOSED)


class _Stream:
    """An open stream and its calls."""

    def __init__(
        self, response: aiohttp.ClientResponse, transport: asyncio.Transport, form: KvFormat
    ) -> None:
        self._response = response
        self._calls = Calls[BlockReport]()
        self.channel: FrameChannel[BlockReport] = block_stream(
            BlockReport, form, lambda report: self._calls.settle(report.id, report), self._end
        )
        self.channel.take_over(transport)

    async def call(self, call: Callable[[int], KvCall | FetchBlocks]) -> BlockReport:
        """Send a call, which gets this number, and return its answer.

        Raises:
            BackendFailed: the call failed, or the connection ended.
        """
        if self.channel.reason is not None:
            raise BackendFailed(_BROKEN)
        number, answer = self._calls.open()
        try:
            await self.channel.send_blocks(call(number))
            report = await answer
        except asyncio.CancelledError:
            self._calls.drop(number)
            self.channel.send(CancelKvCall(number))
            raise
        if isinstance(report, KvCallFailed):
            raise BackendFailed(report.reason)
        return report

    def _end(self) -> None:
        self._response.close()
        self._calls.fail(BackendFailed(_BROKEN))


# --- The stream of KV blocks between two nodes, beside the connection for requests (`channel`) ----
#
# The connection begins with an HTTP request (`upgrade`) to
#
#     /peer/v1/workers/NUMBER/blocks?format=DIGEST
#
# Afterwards, both nodes send frames with blocks (`backends.framing`). Deltas never wait for blocks,
# because the blocks have their own connection.
#
# The connecting node sends calls, and the other node answers each of them, in any order. The end of
# the connection ends all calls.


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
        urgent: as for `KvEndpoint.pull_blocks`.
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
) -> FrameChannel[Received]:
    """Return one end of a stream.

    Args:
        received: type of the messages from the other end.
        form: format of the blocks.
        receive: receives each message, and must return immediately.
        lost: callback for the end of the connection.
    """
    most_block_bytes = max(CHUNK_BYTES, form.block_bytes)
    return FrameChannel(
        received, MOST_MESSAGE_BYTES, receive, lost, most_block_bytes=most_block_bytes
    )
