"""The engine process: `python -m backends.engine.child FD [SHARED_FD]`, started by `process.py`.

The process runs the same engine thread as the gateway's process, but sends the thread's events over
the socket.
"""

from __future__ import annotations

import logging
import os
import signal
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Final

from msgspec.structs import replace

from draftgate.backends.engine.channel import SocketChannel
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loop import EngineLoop
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.engine.shared_memory import SharedMemory
from draftgate.backends.framing import NO_BYTES
from draftgate.backends.kv_transfer.exchange import AdoptBlocks, KvOperation, KvResult
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.remote_worker import (
    Cancel,
    Command,
    Failed,
    KvCall,
    KvReply,
    Loading,
    Ready,
    Report,
    SetPace,
    SharedBytes,
    Start,
    Submit,
    Update,
)
from draftgate.backends.types import Delta
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad

_STOP_S: Final = 5.0
"""Maximum wait in seconds for the step in progress after the gateway has closed its end."""


class Reports:
    """Implements `loop.LoopEvents`: sends the reports of the engine's thread over a channel.

    The bytes of chunks are sent in shared memory.
    """

    def __init__(self, channel: SocketChannel[Command], shared: SharedMemory | None) -> None:
        self._channel = channel
        self._shared = shared
        self._results: SimpleQueue[tuple[KvCall, KvResult]] = SimpleQueue()
        threading.Thread(target=self._send_results, daemon=True).start()

    def loading(self, share: float) -> None:
        """Report the progress of loading, 0 to 1."""
        self._send(Loading(share))

    def ready(self, served: ServedModel) -> None:
        """Report the model card."""
        self._send(Ready(served.card))

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        """Send the deltas of a step and the load after the step."""
        self._send(Update(batch, load))

    def exchanged(self, call: KvCall, result: KvResult) -> None:
        """Send the result of an operation on the KV blocks, while the engine's thread continues."""
        self._results.put((call, result))

    def adapter_failed(self, request_id: str, reason: str) -> None:
        """Report a request whose adapter cannot be loaded."""
        self._send(Update([], failed=[(request_id, reason)], without_adapter=(request_id,)))

    def failed(self, error: BaseException) -> None:
        """Report the error that ended the engine."""
        self._send(Failed(type(error).__name__, str(error)))

    def _send_results(self) -> None:
        while True:
            self._send(self._reply(*self._results.get()))

    def _reply(self, call: KvCall, result: KvResult) -> KvReply:
        """Return the message with a result, whose bytes are in shared memory if they fit."""
        place, reply = call.shared, KvReply(call.id, result)
        if place is None or self._shared is None or not isinstance(result, KvChunk):
            return reply
        size = len(result.data)
        if size > place.num_bytes:
            return reply
        self._shared.view(place)[:size] = result.data
        chunk = replace(result, data=NO_BYTES)
        return KvReply(call.id, chunk, SharedBytes(place.slot, size))

    def _send(self, message: Report) -> None:
        with suppress(OSError):  # the main thread also notices that the gateway has ended
            self._channel.send(message)


def main() -> None:
    """Load the model and run steps until the gateway closes its end."""
    # They are for the gateway, but `pkill -HUP` may send them to every process of a node.
    for number in (signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2):
        signal.signal(number, signal.SIG_IGN)
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    channel = SocketChannel[Command](socket.socket(fileno=int(sys.argv[1])), Command)
    commands = iter(channel)
    start = next(commands, None)
    if not isinstance(start, Start):
        return
    shared = SharedMemory(int(sys.argv[2])) if len(sys.argv) > 2 else None
    reports = Reports(channel, shared)
    loop = _start(start.config, reports)
    for command in commands:
        if isinstance(command, Submit):
            loop.submit(command.request)
        elif isinstance(command, Cancel):
            loop.cancel(command.id)
        elif isinstance(command, SetPace):
            loop.set_pace(command.id, command.pace, command.tpot_s)
        elif isinstance(command, KvCall):
            operation = _with_shared_bytes(command, shared)
            loop.exchange(operation, partial(reports.exchanged, command))
    loop.stop()
    loop.join(_STOP_S)
    os._exit(0)  # nothing else can interrupt a load


def _with_shared_bytes(call: KvCall, shared: SharedMemory | None) -> KvOperation:
    """Return the operation of a call, with the bytes that it stores."""
    operation = call.operation
    if not isinstance(operation, AdoptBlocks) or call.shared is None or shared is None:
        return operation
    chunk = replace(operation.chunk, data=shared.view(call.shared))
    return replace(operation, chunk=chunk)


def _start(config: WorkerConfig, reports: Reports) -> EngineLoop:
    loop = EngineLoop(lambda progress: load_engine(config, progress), reports)
    loop.start()
    return loop


if __name__ == "__main__":
    main()
