"""The endpoint `GET /peer/v1/workers/NUMBER/blocks`: KV blocks of a worker for other nodes."""

from __future__ import annotations

import asyncio
import logging
import re
from typing import Final

import aiohttp
from aiohttp import web
from yarl import URL

from draftgate.backends.errors import BackendFailed
from draftgate.backends.framing import CLOSED, INVALID, FrameChannel
from draftgate.backends.kv_transfer.format import KvFormat
from draftgate.backends.kv_transfer.transfer import (
    WINDOW_CHUNKS,
    Transfer,
    TransferOutcome,
    operate_on,
)
from draftgate.backends.peer.blocks import (
    BlockCommand,
    CancelKvCall,
    FetchBlocks,
    FetchedBlocks,
    KvCallFailed,
    PeerBlocks,
    block_stream,
)
from draftgate.backends.peer.channel import WORKER_PATH
from draftgate.backends.peer.proof import SharedSecret
from draftgate.backends.remote_worker import KvCall, KvReply, WorkerMessage
from draftgate.gateway.cluster.access import is_loopback
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.logs import log

REACH_S: Final = 0.25
"""Time in seconds to connect to a third node, as long as a worker may take to answer
(`kv.fetch.ASK_S`). (Chosen, not tuned, 2026-11-23.)"""

_WORKER: Final = re.compile(re.escape(WORKER_PATH) + "[0-9]{1,3}")

MOST_CALLS: Final = 4 * WINDOW_CHUNKS
"""Maximum calls of a stream that run at the same time, for a few transfers. Further calls wait in
the socket. (Chosen, not tuned, 2026-11-23.)"""


class BlockSession:
    """The operations of another node on the blocks of a worker.

    The end of the connection cancels all operations.
    """

    def __init__(
        self,
        worker: FleetWorker,
        form: KvFormat,
        request: web.Request,
        secret: SharedSecret | None,
    ) -> None:
        """Serve a request whose connection has changed to the protocol of `peer.blocks`.

        Args:
            worker: the worker of this node.
            form: the format of its blocks.
            request: the request.
            secret: secret of the cluster, or None without one.
        """
        self._worker = worker
        self._form = form
        self._request = request
        self._secret = secret
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._ended = asyncio.Event()
        self._channel: FrameChannel[BlockCommand] = block_stream(
            BlockCommand, form, self._receive, self._ended.set
        )

    async def run(self) -> None:
        """Serve until the connection ends or the handler is cancelled."""
        transport = self._request.transport
        if transport is None:
            return  # the other node is gone
        self._channel.take_over(transport)
        try:
            await self._ended.wait()
        finally:
            self._channel.fail(CLOSED)
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            if tasks:
                await asyncio.wait(tasks)

    def _receive(self, command: BlockCommand) -> None:
        if isinstance(command, CancelKvCall):
            if command.id in self._tasks:
                self._tasks[command.id].cancel()
            return
        if command.id in self._tasks:
            self._channel.fail(INVALID)
            return
        task = self._tasks[command.id] = asyncio.create_task(self._answer(command))
        task.add_done_callback(lambda _: self._forget(command.id))
        if len(self._tasks) == MOST_CALLS:
            self._channel.pause_receiving()

    def _forget(self, call_id: int) -> None:
        del self._tasks[call_id]
        if len(self._tasks) == MOST_CALLS - 1:
            self._channel.resume_receiving()

    async def _answer(self, call: KvCall | FetchBlocks) -> None:
        """Run an operation or a transfer, and send its result."""
        message: WorkerMessage
        try:
            if isinstance(call, FetchBlocks):
                message = FetchedBlocks(call.id, await self._fetch(call))
            else:
                message = KvReply(call.id, await operate_on(self._worker.kv, call.operation))
        except BackendFailed as error:
            message = KvCallFailed(call.id, str(error))
        except Exception as error:  # noqa: BLE001 - the other node must get every error
            log(logging.ERROR, "an operation of a peer on KV blocks failed", error=error)
            message = KvCallFailed(call.id, f"internal error ({type(error).__name__})")
        await self._channel.send_blocks(message)

    async def _fetch(self, call: FetchBlocks) -> TransferOutcome | None:
        """Pull blocks from the worker of a third node, or return None if it cannot be reached."""
        if not self._may_reach(call.source):
            return None
        async with aiohttp.ClientSession() as http:
            source = PeerBlocks(http, call.source, self._secret, self._form)
            try:
                async with asyncio.timeout(REACH_S):
                    await source.open()
                sink, urgent = self._worker.kv, call.urgent
                transfer = Transfer(source, sink, call.hashes, call.first, urgent=urgent)
                end = await transfer.run(call.most_s)
            except (BackendFailed, TimeoutError):
                return None
            finally:
                source.close()
            return TransferOutcome(end, transfer.blocks, transfer.chunks)

    def _may_reach(self, source: str) -> bool:
        """Return whether a URL is a worker's, and does not mean a host of its own to each node."""
        url = URL(source)
        if not _WORKER.fullmatch(url.path):
            return False
        return not is_loopback(url.host or "") or is_loopback(self._request.remote or "")
