"""A connection from another node to one of this node's workers.

The other node sends commands, and this node sends updates.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
import time
from collections.abc import Callable
from functools import partial
from typing import Final

from aiohttp import web

from draftgate.backends.errors import (
    AdapterFailed,
    BackendFailed,
    CheckpointError,
    RequestRejected,
)
from draftgate.backends.framing import INVALID, TOO_LARGE, FrameChannel
from draftgate.backends.peer.channel import (
    ALIVE_S,
    MOST_COMMAND_BYTES,
    REPORT_S,
)
from draftgate.backends.peer.tokenizer import files_digest
from draftgate.backends.remote_worker import (
    Alive,
    Cancel,
    Command,
    FetchTokenizer,
    Ready,
    SetPace,
    SetRole,
    Submit,
    TokenizerFiles,
    Update,
    readable_deltas,
)
from draftgate.backends.types import Delta
from draftgate.gateway.dispatch.dispatcher import Dispatcher
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.peers.stream import PeerStream
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.logs import log
from draftgate.gateway.node import Node
from draftgate.policies.types import Role

SILENT_S: Final = 3 * ALIVE_S
"""Seconds of silence after which the requests of a lost node are cancelled."""

MOST_DELTAS: Final = 1024
"""Maximum deltas in an outbox. Further deltas wait in their `PeerStream`, merged by choice. A
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
    """The deltas of all requests on a connection that wait for the next update."""

    def __init__(self, on_news: Callable[[], None]) -> None:
        """Start empty.

        Args:
            on_news: callback for the first delta or failure that waits.
        """
        self._on_news = on_news
        self._deltas: list[tuple[str, Delta]] = []
        self._failed: list[tuple[str, str]] = []
        self._without_adapter: list[str] = []
        self._space = asyncio.Event()
        self._space.set()

    async def space(self) -> None:
        """Wait while the outbox is full."""
        while len(self._deltas) >= MOST_DELTAS:
            self._space.clear()
            await self._space.wait()

    def put(self, link_id: str, delta: Delta) -> bool:
        """Add a delta, and return whether the outbox had space."""
        if len(self._deltas) >= MOST_DELTAS:
            return False
        self._deltas.append((link_id, delta))
        if len(self._deltas) == 1:
            self._on_news()
        return True

    def put_failure(self, link_id: str, reason: str, *, of_adapter: bool = False) -> None:
        """Record the error of a request, to be sent after its deltas.

        Args:
            of_adapter: whether the worker could not load the LoRA adapter of the request.
        """
        self._failed.append((link_id, reason))
        if of_adapter:
            self._without_adapter.append(link_id)
        self._on_news()

    @property
    def is_empty(self) -> bool:
        """Whether nothing waits."""
        return not (self._deltas or self._failed)

    def take(self) -> tuple[list[tuple[str, Delta]], list[tuple[str, str]], tuple[str, ...]]:
        """Remove and return the deltas, the requests that failed after them, and why.

        The last part is `Update.without_adapter`.
        """
        taken = self._deltas, self._failed, tuple(self._without_adapter)
        self._deltas, self._failed, self._without_adapter = [], [], []
        self._space.set()
        return taken


class PeerSession:
    """One connection.

    The end of the connection cancels every request that arrived over it.
    """

    def __init__(self, node: Node, dispatcher: Dispatcher, worker: FleetWorker) -> None:
        """Serve an authenticated node.

        Args:
            dispatcher: the dispatcher of the worker's model.
        """
        self._node = node
        self._dispatcher = dispatcher
        self._worker = worker
        self._channel = FrameChannel[Command](
            Command, MOST_COMMAND_BYTES, self._execute, self._lost, self._report_news
        )
        self._outbox = DeltaOutbox(self._report_soon)
        self._name = secrets.token_hex(4)
        self._greeted = asyncio.Event()
        self._delta_fields = 0  # until the first `Alive`
        self._reporting = False
        self._leaving = False
        self._load_s = -math.inf
        self._loads_due = 0
        self._streams: dict[str, tuple[PeerStream, asyncio.Task[None]]] = {}
        self._sending_files: asyncio.Task[None] | None = None

    async def run(self, request: web.Request) -> None:
        """Serve a request whose connection has changed to the protocol of `channel`.

        The call returns when the connection ends, and cancels all requests.
        """
        if request.transport is None:
            return  # the other node is gone
        self._channel.take_over(request.transport)
        try:
            async with asyncio.timeout(SILENT_S):
                await self._greeted.wait()
            self._channel.send(await self._ready())
            self._reporting = True
            await self._beat()
        except TimeoutError:
            pass  # the other node hangs
        except CheckpointError as error:
            log(logging.ERROR, "cannot read the tokenizer for a peer", error=error)
        finally:
            self._channel.close()
            await self._cancel_all()

    def end(self) -> None:
        """Close the connection."""
        self._channel.close()

    async def _ready(self) -> Ready:
        backend = self._worker.generating
        digest = await asyncio.to_thread(lambda: files_digest(backend.tokenizer.files()))
        streams_blocks = self._worker.kv_format is not None
        return Ready(backend.card, self._worker.epoch, digest, streams_blocks, changes_role=True)

    def _lost(self) -> None:
        self._greeted.set()
        if self._channel.reason in {INVALID, TOO_LARGE}:
            log(logging.ERROR, "a peer sent an invalid message", reason=self._channel.reason)

    def _execute(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._submit(command)
        elif isinstance(command, Alive):
            self._delta_fields = command.delta_fields
            self._greeted.set()
        elif isinstance(command, FetchTokenizer):
            self._sending_files = asyncio.create_task(self._send_files())
        elif isinstance(command, SetRole):
            self._set_role(command.role)
        elif isinstance(command, Cancel | SetPace) and command.id in self._streams:
            stream, task = self._streams[command.id]
            if isinstance(command, SetPace):
                stream.set_pace(command.pace, command.tpot_s)
            else:
                self._loads_due = LOADS_AFTER_CANCEL
                task.cancel()

    def _set_role(self, role: Role) -> None:
        """Change the role of the worker for all nodes, and confirm it to the other node."""
        self._worker.role = role
        worker_id = self._worker.worker_id
        log(logging.INFO, "a peer set the role of a worker", worker=worker_id, role=role)
        self._report()
        self._dispatcher.queue.dispatch_waiting()

    async def _send_files(self) -> None:
        try:
            files = await asyncio.to_thread(self._worker.generating.tokenizer.files)
        except CheckpointError as error:
            log(logging.ERROR, "cannot read the tokenizer that a peer requested", error=error)
            self._channel.close()
        else:
            self._channel.send(TokenizerFiles(files))

    def _submit(self, command: Submit) -> None:
        link_id = command.id
        if link_id in self._streams:
            self._outbox.put_failure(link_id, f"the id {link_id} belongs to another request")
            return
        worker_id = f"{self._name}-{link_id}-{command.request.request_id}"
        stream = PeerStream(self._node.tracing, self._dispatcher, self._worker, command, worker_id)
        task = asyncio.create_task(self._run(link_id, stream))
        # A callback also runs if the task is cancelled before `_run` begins.
        task.add_done_callback(lambda _: self._streams.pop(link_id))
        self._streams[link_id] = stream, task

    async def _run(self, link_id: str, stream: PeerStream) -> None:
        """Run a request to its end, and report its error."""
        try:
            await stream.run(partial(self._outbox.put, link_id), self._outbox.space)
        except _EXPLAINED as error:
            of_adapter = isinstance(error, AdapterFailed)
            self._outbox.put_failure(link_id, str(error), of_adapter=of_adapter)
        except Exception as error:  # noqa: BLE001 - the other node must get every error
            log(logging.ERROR, "a request of a peer failed", error=error)
            self._outbox.put_failure(link_id, f"internal error ({type(error).__name__})")

    async def _beat(self) -> None:
        """Send an update every `REPORT_S`, until the connection ends or the other node is silent.

        Counted beats measure the silence, so that a stall of the event loop does not count.
        """
        silent_beats = 0
        while self._channel.reason is None and silent_beats * REPORT_S < SILENT_S:
            self._report()
            self._channel.heard = False
            await asyncio.sleep(REPORT_S)
            silent_beats = 0 if self._channel.heard else silent_beats + 1
        self._channel.fail("it sent nothing")

    def _report_soon(self) -> None:
        """Send an update when all deltas of the step have been added."""
        asyncio.get_running_loop().call_soon(self._report_news)

    def _report_news(self) -> None:
        """Send an update if something waits."""
        if not self._outbox.is_empty:
            self._report()

    def _report(self) -> None:
        """Send an update, unless the other node reads slowly."""
        if not (self._reporting and self._channel.writable):
            return
        try:
            self._channel.send(self._update())
        except Exception as error:  # noqa: BLE001 - silence would look as if this node hung
            log(logging.ERROR, "reports to a peer failed", error=error)
            self._channel.close()

    def _update(self) -> Update:
        deltas, failed, without_adapter = self._outbox.take()
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
        return Update(
            readable_deltas(deltas, self._delta_fields),
            load,
            failed,
            now_s,
            refusing or "",
            watermark,
            self._leaving,
            role=worker.role,
            without_adapter=without_adapter,
        )

    async def _cancel_all(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        if self._sending_files is not None:
            tasks.append(self._sending_files)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)


def _ends_choice(item: tuple[str, Delta]) -> bool:
    return item[1].finish_reason is not None
