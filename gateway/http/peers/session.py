"""A connection of another node to one of this node's workers: commands in, reports out."""

from __future__ import annotations

import asyncio
import logging
import secrets
import time
from typing import Final

import aiohttp
from aiohttp import web

from draftgate.backends.errors import BackendFailed, CheckpointError, RequestRejected
from draftgate.backends.peer.channel import Channel
from draftgate.backends.peer.messages import (
    MOST_COMMAND_BYTES,
    REPORT_S,
    AskTokenizer,
    Command,
    SetPace,
    Submit,
    TokenizerFiles,
    Update,
    Welcome,
)
from draftgate.backends.peer.tokenizer import files_digest
from draftgate.backends.types import Delta
from draftgate.gateway.errors import GatewayError
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.peers.outbox import Outbox
from draftgate.gateway.http.peers.stream import PeerStream
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.logs import log

_EXPLAINED: Final = (GatewayError, BackendFailed, RequestRejected)
"""Errors whose words are meant for the other node."""


class PeerSession:
    """One connection, up to its end, with which all that came over it ends."""

    def __init__(self, node: Node, worker: FleetWorker, socket: web.WebSocketResponse) -> None:
        """Take a connection that is prepared, of a node that proved itself."""
        self._node = node
        self._worker = worker
        self._socket = socket
        self._channel = Channel[Command](socket, Command, MOST_COMMAND_BYTES)
        self._outbox = Outbox()
        self._name = secrets.token_hex(4)
        self._leaving = False
        self._streams: dict[int, tuple[PeerStream, asyncio.Task[None]]] = {}

    async def run(self, answer: str) -> None:
        """Serve until the connection ends.

        Args:
            answer: to the other node's proof.
        """
        try:
            await self._channel.send(await self._welcome(answer))
            reporting = asyncio.create_task(self._report())
            try:
                await self._obey_all()
            finally:
                reporting.cancel()
                await asyncio.wait({reporting})
        except ConnectionError:
            pass  # it is gone
        except CheckpointError as error:
            log(logging.ERROR, "a peer asked for a tokenizer that is gone", error=error)
            await self._socket.close(code=aiohttp.WSCloseCode.INTERNAL_ERROR)
        finally:
            await self._cancel_all()

    async def _welcome(self, answer: str) -> Welcome:
        backend = self._worker.generating
        digest = await asyncio.to_thread(lambda: files_digest(backend.tokenizer.files()))
        return Welcome(answer, self._worker.epoch, backend.card, digest)

    async def _obey_all(self) -> None:
        async for message in self._socket:
            if message.type is aiohttp.WSMsgType.ERROR:
                return  # aiohttp has found it out, and closed the connection
            try:
                if message.type is not aiohttp.WSMsgType.BINARY:
                    raise ValueError("no message of this protocol: a text")
                command = self._channel.read(message.data)
            except ValueError as error:
                log(logging.ERROR, "a peer sends what cannot be read", error=error)
                await self._socket.close(code=aiohttp.WSCloseCode.PROTOCOL_ERROR)
                return
            if command is not None:
                await self._obey(command)

    async def _obey(self, command: Command) -> None:
        if isinstance(command, Submit):
            self._begin(command)
        elif isinstance(command, AskTokenizer):
            files = await asyncio.to_thread(self._worker.generating.tokenizer.files)
            await self._channel.send(TokenizerFiles(files))
        elif command.number in self._streams:
            stream, task = self._streams[command.number]
            if isinstance(command, SetPace):
                stream.set_pace(command.pace)
            else:
                task.cancel()

    def _begin(self, command: Submit) -> None:
        number = command.number
        if number in self._streams:
            self._outbox.put_broken(number, "the number stands for another request")
            return
        worker_id = f"{self._name}-{number}-{command.request.request_id}"
        stream = PeerStream(self._node, self._worker, command, worker_id)
        task = asyncio.create_task(self._run(number, stream))
        task.add_done_callback(lambda _: self._streams.pop(number))  # begun or not
        self._streams[number] = stream, task

    async def _run(self, number: int, stream: PeerStream) -> None:
        """Run a request to its end, and tell the other node if that is an error."""

        async def deliver(delta: Delta) -> None:
            await self._outbox.put(number, delta)

        try:
            await stream.run(deliver)
        except _EXPLAINED as error:
            self._outbox.put_broken(number, str(error))
        except Exception as error:  # noqa: BLE001 - the other node must learn of it
            log(logging.ERROR, "a request of a peer failed", error=error)
            self._outbox.put_broken(number, f"internal error ({type(error).__name__})")

    async def _report(self) -> None:
        """Send what is new, one message for each step, and now and then that there is nothing."""
        beat = asyncio.create_task(self._beat())
        try:
            while True:
                await self._outbox.news()
                await self._channel.send(self._update())
        except ConnectionError:
            pass  # whoever receives sees it, too
        except Exception as error:  # noqa: BLE001 - silence would look as if this node hung
            log(logging.ERROR, "reports to a peer failed", error=error)
            await self._socket.close(code=aiohttp.WSCloseCode.INTERNAL_ERROR)
        finally:
            beat.cancel()

    async def _beat(self) -> None:
        while True:
            self._outbox.wake()
            await asyncio.sleep(REPORT_S)

    def _update(self) -> Update:
        deltas, broken = self._outbox.take()
        worker = self._worker
        load, refusing = worker.backend.load(), self._refusing()
        lifecycle = self._node.lifecycle
        if lifecycle.state is NodeState.DRAINING and lifecycle.failure is None:
            self._leaving = True  # to the end, when its workers are stopped
        return Update(
            *(deltas, broken, load, time.monotonic(), refusing, worker.watermark, self._leaving)
        )

    def _refusing(self) -> str:
        """Return why this worker takes no further requests; empty while it takes some."""
        failure, state = self._worker.backend.failure, self._node.lifecycle.state
        if failure is not None:
            return failure
        return "" if state is NodeState.READY else f"the node is {state.value}"

    async def _cancel_all(self) -> None:
        tasks = [task for _, task in self._streams.values()]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
