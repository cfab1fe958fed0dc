"""A connection from another node to one of this node's workers.

The other node sends commands, and this node sends updates.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from functools import partial
from typing import Final

import aiohttp
from aiohttp import web

from draftgate.backends.errors import BackendFailed, CheckpointError, RequestRejected
from draftgate.backends.peer.channel import MOST_COMMAND_BYTES, REPORT_S, PeerChannel
from draftgate.backends.peer.tokenizer import files_digest
from draftgate.backends.remote_worker import (
    Cancel,
    Command,
    FetchTokenizer,
    Ready,
    SetPace,
    Submit,
    TokenizerFiles,
    Update,
)
from draftgate.backends.types import Delta
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.peers.stream import PeerStream
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.logs import log

MOST_DELTAS: Final = 1024
"""Maximum deltas in an outbox. Further deltas wait in the worker's streams, merged by request. A
batch of 256 sequences fills the outbox in four steps."""

LOAD_S: Final = 0.01
"""Minimum seconds between two loads, except when the end of a request frees capacity.

A load is computed anew after each step, for a quarter of the CPU time of an update. With steps of 6
ms, every second update has a load. (Chosen by a profile of a simulated device without step times,
AMD EPYC, 2026-11-23.)"""

LOADS_AFTER_CANCEL: Final = 4
"""Number of updates with a load after a request was cancelled. The running step may still contain
it, its deltas may be in transit, and the next step frees its capacity."""

_EXPLAINED: Final = (GatewayError, BackendFailed, RequestRejected)
"""Errors whose messages are sent to the other node."""


class DeltaOutbox:
    """The deltas of all requests on a connection that wait for the next update.

    Attributes:
        news: an event that is set while something waits. The session also sets it to send an
            update.
    """

    def __init__(self) -> None:
        """Start empty."""
        self._deltas: list[tuple[str, Delta]] = []
        self._failed: list[tuple[str, str]] = []
        self.news = asyncio.Event()
        self._space = asyncio.Event()
        self._space.set()

    async def put(self, link_id: str, delta: Delta) -> None:
        """Add a delta, after waiting while the outbox is full."""
        while not self.put_now(link_id, delta):
            self._space.clear()
            await self._space.wait()

    def put_now(self, link_id: str, delta: Delta) -> bool:
        """Add a delta, and return whether the outbox had space."""
        if len(self._deltas) >= MOST_DELTAS:
            return False
        self._deltas.append((link_id, delta))
        self.news.set()
        return True

    def put_failure(self, link_id: str, reason: str) -> None:
        """Record the error of a request, to be sent after its deltas."""
        self._failed.append((link_id, reason))
        self.news.set()

    def take(self) -> tuple[list[tuple[str, Delta]], list[tuple[str, str]]]:
        """Remove and return the deltas, and the requests that failed after them."""
        taken = self._deltas, self._failed
        self._deltas, self._failed = [], []
        self.news.clear()
        self._space.set()
        return taken


class PeerSession:
    """One connection.

    The end of the connection cancels every request that arrived over it.
    """

    def __init__(self, node: Node, worker: FleetWorker, socket: web.WebSocketResponse) -> None:
        """Serve an open connection from an authenticated node."""
        self._node = node
        self._worker = worker
        self._socket = socket
        self._channel = PeerChannel[Command](socket, Command, MOST_COMMAND_BYTES)
        self._outbox = DeltaOutbox()
        self._name = secrets.token_hex(4)
        self._leaving = False
        self._load_s = -math.inf
        self._loads_due = 0
        self._streams: dict[str, tuple[PeerStream, asyncio.Task[None]]] = {}

    async def run(self, answer: str) -> None:
        """Serve until the connection ends.

        Args:
            answer: the response to the proof of the other node.
        """
        try:
            await self._channel.send(await self._ready(answer))
            reporting = asyncio.create_task(self._report())
            try:
                await self._receive()
            finally:
                reporting.cancel()
                await asyncio.wait({reporting})
        except ConnectionError:
            pass  # the other node is gone
        except CheckpointError as error:
            log(logging.ERROR, "cannot read the tokenizer that a peer requested", error=error)
            await self._socket.close(code=aiohttp.WSCloseCode.INTERNAL_ERROR)
        finally:
            await self._cancel_all()

    async def _ready(self, answer: str) -> Ready:
        backend = self._worker.generating
        digest = await asyncio.to_thread(lambda: files_digest(backend.tokenizer.files()))
        streams_blocks = self._worker.kv_format is not None
        return Ready(backend.card, self._worker.epoch, digest, answer, streams_blocks)

    async def _receive(self) -> None:
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.ERROR:
                return  # aiohttp has closed the connection
            try:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise ValueError("expected a binary message, not text")
                command = self._channel.read(message.data)
            except ValueError as error:
                log(logging.ERROR, "a peer sent an invalid message", error=error)
                await self._socket.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR)
                return
            if command is not None:
                await self._execute(command)

    async def _execute(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, FetchTokenizer):
            files = await asyncio.to_thread(self._worker.generating.tokenizer.files)
            await self._channel.send(TokenizerFiles(files))
        elif isinstance(command, Cancel | SetPace) and command.id in self._streams:
            stream, task = self._streams[command.id]
            if isinstance(command, SetPace):
                stream.set_pace(command.pace)
            else:
                self._loads_due = LOADS_AFTER_CANCEL
                task.cancel()

    def _submit(self, command: Submit) -> None:
        link_id = command.id
        if link_id in self._streams:
            self._outbox.put_failure(link_id, f"the id {link_id} belongs to another request")
            return
        worker_id = f"{self._name}-{link_id}-{command.request.request_id}"
        stream = PeerStream(self._node, self._worker, command, worker_id)
        task = asyncio.create_task(self._run(link_id, stream))
        # A callback also runs if the task is cancelled before `_run` begins.
        task.add_done_callback(lambda _: self._streams.pop(link_id))
        self._streams[link_id] = stream, task

    async def _run(self, link_id: str, stream: PeerStream) -> None:
        """Run a request to its end, and report its error."""
        try:
            outbox = self._outbox
            await stream.run(partial(outbox.put, link_id), partial(outbox.put_now, link_id))
        except _EXPLAINED as error:
            self._outbox.put_failure(link_id, str(error))
        except Exception as error:  # noqa: BLE001 - the other node must get every error
            log(logging.ERROR, "a request of a peer failed", error=error)
            self._outbox.put_failure(link_id, f"internal error ({type(error).__name__})")

    async def _report(self) -> None:
        """Send an update for each step, and at least one every `REPORT_S`."""
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                await self._outbox.news.wait()
                await self._channel.send(self._update())
        except ConnectionError:
            pass  # `_receive` also notices the loss
        except Exception as error:  # noqa: BLE001 - silence would look as if this node hung
            log(logging.ERROR, "reports to a peer failed", error=error)
            await self._socket.close(code=aiohttp.WSCloseCode.INTERNAL_ERROR)
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            self._outbox.news.set()
            await asyncio.sleep(REPORT_S)

    def _update(self) -> Update:
        deltas, failed = self._outbox.take()
        lifecycle, worker = self._node.lifecycle, self._worker
        if lifecycle.state is NodeState.DRAINING and lifecycle.failure is None:
            self._leaving = True  # a node whose workers have stopped also reports a failure
        refusing = worker.backend.failure
        if refusing is None and lifecycle.state is not NodeState.READY:
            refusing = f"the node is {lifecycle.state.value}"
        now_s = time.monotonic()
        load, watermark = None, 0
        freed = self._loads_due or failed or any(map(_ends_choice, deltas))
        if freed or now_s - self._load_s >= LOAD_S:
            self._load_s, self._loads_due = now_s, max(0, self._loads_due - 1)
            load, watermark = worker.backend.load(), worker.watermark
        return Update(deltas, load, failed, now_s, refusing or "", watermark, self._leaving)

    async def _cancel_all(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _ends_choice(item: tuple[str, Delta]) -> bool:
    return item[1].finish_reason is not None
