"""An engine in a process of its own, as seen from the gateway. No torch here.

Python runs one thread at a time, so an engine that shares a process with hundreds of streams waits
for them again and again within a step. With a process of its own it waits for nobody; a step's
deltas cost one message. What can run is checked here, as the gateway has tokenizer and bounds.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from contextlib import suppress
from queue import SimpleQueue
from typing import Final

from draftgate.backends.checkpoints import find_checkpoint
from draftgate.backends.engine.channel import SocketChannel
from draftgate.backends.engine.loop import LoopEvents
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.errors import BackendFailed, CheckpointError
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
    remote_admission,
)
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, Pace
from draftgate.backends.worker_config import WorkerConfig

STOP_S: Final = 10.0
"""How long a process may take to end once it was told to; then it is killed."""

_ERRORS: Final = {error.__name__: error for error in (CheckpointError, ValueError, ImportError)}
"""What a model or a setting may be refused with; anything else means that the engine broke."""


class EngineProcess(threading.Thread):
    """Starts the process, and reports what it says until it ends."""

    def __init__(self, config: WorkerConfig, events: LoopEvents) -> None:
        """Prepare; `start` starts."""
        super().__init__(name="draftgate-engine-process", daemon=True)
        self._config = config
        self._events = events
        self._stopping = False
        self._channel: SocketChannel[Report] | None = None
        self._commands: SimpleQueue[Command | None] = SimpleQueue()

    def start(self) -> None:
        """Start the process and listen to it."""
        own, self._its = socket.socketpair()
        self._channel = SocketChannel[Report](own, Report)
        super().start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request. Any thread."""
        self._commands.put(Submit(request.request_id, request))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step; no-op if it has ended. Any thread."""
        self._commands.put(Cancel(request_id))

    def set_pace(self, request_id: str, pace: Pace) -> None:
        """Change a request's pace before the next step; no-op if it has ended. Any thread."""
        self._commands.put(SetPace(request_id, pace))

    def stop(self) -> None:
        """Let the process end, at once if it is still loading. Any thread; idempotent."""
        self._stopping = True
        if self._channel is not None:
            self._channel.hang_up()

    def run(self) -> None:
        """Start the process and report until it ends. Errors are reported, never raised."""
        channel = self._channel
        assert channel is not None
        with self._its:
            process = _spawn(self._its)
        sender = threading.Thread(target=self._deliver, args=(channel,), daemon=True)
        sender.start()
        try:
            self._listen(channel)
            if not self._stopping:
                raise BackendFailed(f"the engine's process ended with status {_ended(process)}")
        except Exception as error:  # noqa: BLE001 - whatever it is, streams must learn of it
            self._events.failed(error)
        finally:
            self._commands.put(None)
            channel.hang_up()  # whoever sends hears it
            sender.join()
            channel.close()
            _ended(process)

    def _listen(self, channel: SocketChannel[Report]) -> None:
        """Report what comes, until the process closes its end.

        Raises:
            BackendError, ValueError, ImportError: the engine failed.
        """
        for report in channel:
            if isinstance(report, Update):
                self._events.stepped(report.deltas, report.load)
            elif isinstance(report, Loading):
                self._events.loading(report.share)
            elif isinstance(report, Ready):
                self._events.ready(self._served(report))
            elif isinstance(report, Failed):
                raise _error(report)

    def _served(self, ready: Ready) -> ServedModel:
        directory = find_checkpoint(self._config.model, weights=False)
        return ServedModel(ready.card, remote_admission(ready.card, Tokenizer(directory)))

    def _deliver(self, channel: SocketChannel[Report]) -> None:
        """Send what is to be sent, in a thread: a long prompt is more than the socket takes."""
        with suppress(OSError):  # it has ended, and whoever waits for an answer hears that
            channel.send(Start(self._config))
            while (command := self._commands.get()) is not None:
                channel.send(command)


def _spawn(end: socket.socket) -> subprocess.Popen[bytes]:
    """Start the process with its end of the socket.

    In a session of its own: a terminal's Ctrl-C is for the gateway, which lets streams end first.
    """
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "draftgate.backends.engine.child", str(end.fileno())],
        pass_fds=(end.fileno(),),
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _ended(process: subprocess.Popen[bytes]) -> int:
    """Wait until the process has ended, and end it if it does not; return its status."""
    try:
        return process.wait(STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _error(failed: Failed) -> Exception:
    kind = _ERRORS.get(failed.kind)
    if kind is None:
        return BackendFailed(f"{failed.kind}: {failed.message}")
    return kind(failed.message)
