"""The engine process: `python -m backends.engine.child FD`, started by `process.py`.

The engine's thread runs as in the gateway's process, but its events are sent over the socket.
"""

from __future__ import annotations

import logging
import os
import socket
import sys
from contextlib import suppress
from typing import Final

from draftgate.backends.engine.channel import SocketChannel
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loop import EngineLoop
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.remote_worker import (
    Cancel,
    Command,
    Failed,
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
"""Time for the step in progress after the gateway has closed its end."""


class Reports:
    """Sends the reports of the engine's thread; implements `loop.LoopEvents`."""

    def __init__(self, channel: SocketChannel[Command]) -> None:
        """Send reports over this channel."""
        self._channel = channel

    def loading(self, share: float) -> None:
        """Report the progress of loading."""
        self._send(Loading(share))

    def ready(self, served: ServedModel) -> None:
        """Report the model card."""
        self._send(Ready(served.card))

    def stepped(self, batch: list[tuple[str, Delta]], load: WorkerLoad) -> None:
        """Send a step's deltas."""
        self._send(Update(batch, load))

    def failed(self, error: BaseException) -> None:
        """Report the error that ended the engine."""
        self._send(Failed(type(error).__name__, str(error)))

    def _send(self, message: Report) -> None:
        with suppress(OSError):  # the gateway is gone; the main thread notices it as well
            self._channel.send(message)


def main() -> None:
    """Load and run until the gateway closes its end."""
    logging.basicConfig(format="%(levelname)s %(name)s: %(message)s", level=logging.INFO)
    channel = SocketChannel[Command](socket.socket(fileno=int(sys.argv[1])), Command)
    commands = iter(channel)
    start = next(commands, None)
    if not isinstance(start, Start):
        return
    loop = _start(start.config, Reports(channel))
    for command in commands:
        if isinstance(command, Submit):
            loop.submit(command.request)
        elif isinstance(command, Cancel):
            loop.cancel(command.id)
        elif isinstance(command, SetPace):
            loop.set_pace(command.id, command.pace)
    loop.stop()
    loop.join(STOP_S)
    os._exit(0)  # even during loading, which cannot be interrupted otherwise


def _start(config: WorkerConfig, reports: Reports) -> EngineLoop:
    loop = EngineLoop(lambda progress: load_engine(config, progress), reports)
    loop.start()
    return loop


if __name__ == "__main__":
    main()
