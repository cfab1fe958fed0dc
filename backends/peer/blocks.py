"""The KV blocks of a worker of another node, over a stream of their own."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from contextlib import suppress
from itertools import count
from typing import Final

import aiohttp
from yarl import URL

from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import BackendFailed
from draftgate.backends.kv_transfer.exchange import (
    BlockCount,
    ExportBlocks,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import KvChunk, KvFormat
from draftgate.backends.kv_transfer.operated import OperatedBlocks
from draftgate.backends.kv_transfer.transfer import TransferEnd, TransferOutcome
from draftgate.backends.peer.block_stream import (
    BLOCKS_PATH,
    BlockReport,
    BlockStream,
    CancelKvCall,
    FetchBlocks,
    FetchedBlocks,
    KvCallFailed,
    format_digest,
)
from draftgate.backends.peer.proof import SharedSecret
from draftgate.backends.peer.upgrade import CONNECT_S, upgraded
from draftgate.backends.remote_worker import KvCall, KvReply

UNREACHABLE_S: Final = 30.0
"""Time in seconds until a node that could not reach another node tries again. An attempt costs a
transfer up to `REACH_S` of the other node. (Chosen, not tuned, 2026-11-23.)"""

OUTCOME_S: Final = 0.5
"""Time in seconds that a transfer between two other nodes may take besides the transfer itself: to
connect, and to report its outcome. (Chosen, not tuned, 2026-11-23.)"""

_BROKEN: Final = "the stream of blocks broke"
_UNEXPECTED: Final = "it sent an unexpected answer"


class PeerBlocks(OperatedBlocks):
    """Implements `KvSource` and `KvSink` of `backends.base` for a worker of another node.

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
        self._call_ids = count()
        self._opening: asyncio.Task[_Calls] | None = None
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
        calls = await self.open()
        reply = await calls.run(KvCall(next(self._call_ids), operation))
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
            urgent: as for `KvSource.pull_blocks`.

        Returns:
            The outcome, or None if the node cannot reach the third node.

        Raises:
            BackendFailed: the worker failed, or its node cannot be reached.
        """
        now_s = asyncio.get_running_loop().time()
        if now_s < self._unreachable.get(source, now_s):
            return None
        calls = await self.open()
        call = FetchBlocks(next(self._call_ids), source, tuple(hashes), first, most_s, urgent)
        try:
            async with asyncio.timeout(None if most_s is None else most_s + OUTCOME_S):
                report = await calls.run(call)
        except TimeoutError:
            return TransferOutcome(TransferEnd.LATE)
        if not isinstance(report, FetchedBlocks):
            raise BackendFailed(_UNEXPECTED)
        if report.outcome is None:
            self._unreachable[source] = now_s + UNREACHABLE_S
        return report.outcome

    async def open(self) -> _Calls:
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

    async def _open(self) -> _Calls:
        url = self._url.with_query(format=format_digest(self._form))
        try:
            async with asyncio.timeout(CONNECT_S):
                return _Calls(*await upgraded(self._http, url, self._secret), self._form)
        except TimeoutError as error:
            raise BackendFailed(public_reason(error)) from None


def _answers(operation: KvOperation, result: KvResult) -> bool:
    """Return whether a result belongs to an operation, and no block to another hash."""
    if isinstance(result, KvChunk) and isinstance(operation, ExportBlocks):
        return result.hashes == operation.hashes[: len(result.hashes)]
    return isinstance(result, BlockCount) and not isinstance(operation, ExportBlocks)


def _has_ended(opening: asyncio.Task[_Calls]) -> bool:
    if not opening.done():
        return False
    return opening.cancelled() or opening.exception() is not None or opening.result().ended


def _close_opened(opening: asyncio.Task[_Calls]) -> None:
    if not _has_ended(opening):
        opening.result().stream.close()


class _Calls:
    """The calls on an open stream.

    Attributes:
        ended: whether the connection has ended.
    """

    def __init__(
        self, response: aiohttp.ClientResponse, transport: asyncio.Transport, form: KvFormat
    ) -> None:
        self._response = response
        self._answers: dict[int, asyncio.Future[BlockReport]] = {}
        self.ended = False
        self.stream = BlockStream[BlockReport](BlockReport, form, self._settle, self._end)
        self.stream.take_over(transport)

    async def run(self, call: KvCall | FetchBlocks) -> BlockReport:
        """Send a call and return its answer.

        Raises:
            BackendFailed: the call failed, or the connection ended.
        """
        answer: asyncio.Future[BlockReport] = asyncio.get_running_loop().create_future()
        self._answers[call.id] = answer
        try:
            await self.stream.send(call)
            report = await answer
        except ConnectionError:
            raise BackendFailed(_BROKEN) from None
        except asyncio.CancelledError:
            self._cancel(call.id)
            raise
        finally:
            del self._answers[call.id]
        if isinstance(report, KvCallFailed):
            raise BackendFailed(report.reason)
        return report

    def _cancel(self, call_id: int) -> None:
        with suppress(ConnectionError):
            self.stream.send_now(CancelKvCall(call_id))

    def _settle(self, report: BlockReport) -> None:
        answer = self._answers.get(report.id)
        if answer is not None and not answer.done():
            answer.set_result(report)

    def _end(self) -> None:
        self.ended = True
        self._response.close()
        for answer in self._answers.values():
            if not answer.done():
                answer.set_exception(BackendFailed(_BROKEN))
