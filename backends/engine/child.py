"""The engine process: `python -m backends.engine.child FD`, started by `process.py`.

The process runs the same engine thread as the gateway's process, but sends the thread's events over
the socket.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
import threading
from contextlib import suppress
from functools import partial
from queue import SimpleQueue
from typing import Final

from draftgate.backends.engine.channel import SocketChannel
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loop import EngineLoop
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.kv_transfer.exchange import KvResult
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
    Start,
    Submit,
    Update,
)
from draftgate.backends.types import Delta
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.types import WorkerLoad

STOP_S: Final = 5.0
"""Maximum wait in seconds for the step in progress after the gateway has closed its end."""


class Reports:
    """Implements `loop.LoopEvents`: sends the reports of the engine's thread over a channel."""

    def __init__(self, channel: SocketChannel[Command]) -> None:
        """Send the reports over this channel."""
        self._channel = channel
        self._results: SimpleQueue[KvReply] = SimpleQueue()
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

    def exchanged(self, call_id: int, result: KvResult) -> None:
        """Send the result of an operation on the KV blocks, while the engine's thread continues."""
        self._results.put(KvReply(call_id, result))

    def failed(self, error: BaseException) -> None:
        """Report the error that ended the engine."""
        self._send(Failed(type(error).__name__, str(error)))

    def _send_results(self) -> None:
        while True:
            self._send(self._results.get())

    def _send(self, message: Report) -> None:
        with suppress(OSError):  # the main thread also notices that the gateway has ended
            self._channel.send(message)


def main() -> None:
    """Load the model and run steps until the gateway closes its end."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    channel = SocketChannel[Command](socket.socket(fileno=int(sys.argv[1])), Command)
    commands = iter(channel)
    start = next(commands, None)
    if not isinstance(start, Start):
        return
    reports = Reports(channel)
    loop = _start(start.config, reports)
    for command in commands:
        if isinstance(command, Submit):
            loop.submit(command.request)
        elif isinstance(command, Cancel):
            loop.cancel(command.id)
        elif isinstance(command, SetPace):
            loop.set_pace(command.id, command.pace)
        elif isinstance(command, KvCall):
            loop.exchange(command.operation, partial(reports.exchanged, command.id))
    loop.stop()
    loop.join(STOP_S)
    os._exit(0)  # nothing else can interrupt a load


def _start(config: WorkerConfig, reports: Reports) -> EngineLoop:
    loop = EngineLoop(lambda progress: load_engine(config, progress), reports)
    loop.start()
    return loop


if __name__ == "__main__":
    main()
