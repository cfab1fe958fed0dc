"""The gateway's side of an engine in its own process. This module does not import torch.

Python runs one thread at a time, so an engine in the gateway's process waits for hundreds of
streams several times within a step. An engine in its own process never waits for streams, and sends
the deltas of a step as a single message. The gateway's process has the tokenizer and the limits, so
it checks the requests.
"""

from __future__ import annotations

import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from contextlib import suppress
from itertools import count
from queue import SimpleQueue
from typing import Final, NamedTuple

from msgspec.structs import replace

from draftgate.backends.checkpoints import find_checkpoint
from draftgate.backends.engine.channel import SocketChannel
from draftgate.backends.engine.loop import LoopEvents
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.engine.shared_memory import SharedMemory, place_of, shared_memory
from draftgate.backends.errors import BackendFailed, CheckpointError
from draftgate.backends.framing import NO_BYTES
from draftgate.backends.kv_transfer.exchange import (
    AdoptBlocks,
    ExportBlocks,
    KvOperation,
    KvResult,
)
from draftgate.backends.kv_transfer.format import KvChunk
from draftgate.backends.kv_transfer.transfer import CHUNK_BYTES, WINDOW_CHUNKS
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
    remote_admission,
)
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, Pace
from draftgate.backends.worker_config import WorkerConfig

_STOP_S: Final = 10.0
"""Maximum wait in seconds for the process to end before the gateway kills it."""

SEND_BUFFER_BYTES: Final = WINDOW_CHUNKS * CHUNK_BYTES
"""Bytes that either process can send before the other one reads: the KV blocks that a transfer has
under way. With the usual 208 KiB, the engine's thread waited for the gateway within each chunk, and
the gateway needed 210 us instead of 104 us of CPU time to read it. (AVX2 machine, 2026-11-23.)"""

_ERRORS: Final = {error.__name__: error for error in (CheckpointError, ValueError, ImportError)}
"""Errors that reject a model or a setting. Any other error means that the engine failed."""


class EngineProcess(threading.Thread):
    """Starts the engine process and reports its messages until the process ends.

    Any thread may call `submit`, `cancel`, `set_pace`, `exchange` and `stop`.
    """

    def __init__(self, config: WorkerConfig, events: LoopEvents) -> None:
        super().__init__(name="draftgate-engine-process", daemon=True)
        self._config = config
        self._events = events
        self._stopping = False
        self._channel: SocketChannel[Report] | None = None
        self._commands: SimpleQueue[Command | None] = SimpleQueue()
        self._call_ids = count()
        self._shared = shared_memory()
        self._calls: dict[int, _Call] = {}

    def start(self) -> None:
        """Start the process and the thread that receives its messages."""
        own, self._child_end = socket.socketpair()
        for end in (own, self._child_end):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, SEND_BUFFER_BYTES)
        self._channel = SocketChannel[Report](own, Report)
        super().start()

    def submit(self, request: GenerationRequest) -> None:
        """Queue a request."""
        self._commands.put(Submit(request.request_id, request))

    def cancel(self, request_id: str) -> None:
        """End a request before the next step, unless the request has already ended."""
        self._commands.put(Cancel(request_id))

    def set_pace(self, request_id: str, pace: Pace, tpot_s: float = 0.0) -> None:
        """Change a request's pace before the next step, unless the request has already ended."""
        self._commands.put(SetPace(request_id, pace, tpot_s))

    def exchange(self, operation: KvOperation, done: Callable[[KvResult], None]) -> None:
        """Queue an operation on the KV blocks.

        Args:
            operation: what to do.
            done: receives the result in this thread, and must return immediately.
        """
        call, place = KvCall(next(self._call_ids), operation), None
        data: memoryview | None = None
        if isinstance(operation, AdoptBlocks):
            data = operation.chunk.data
            place = place_of(data)
            if place is not None:
                operation = replace(operation, chunk=replace(operation.chunk, data=NO_BYTES))
        elif isinstance(operation, ExportBlocks) and self._shared is not None:
            data = self._shared.reserve()
            place = None if data is None else place_of(data)
        self._calls[call.id] = _Call(done, data)
        self._commands.put(replace(call, operation=operation, shared=place))

    def stop(self) -> None:
        """End the process after the step in progress, or immediately during loading.

        Further calls have no effect.
        """
        self._stopping = True
        if self._channel is not None:
            self._channel.hang_up()

    def run(self) -> None:
        """Start the process and report its messages until it ends.

        The thread reports any error through `LoopEvents.failed`.
        """
        channel = self._channel
        assert channel is not None
        with self._child_end:
            process = _spawn(self._child_end, self._shared)
        sender = threading.Thread(target=self._send_commands, args=(channel,), daemon=True)
        sender.start()
        try:
            self._listen(channel)
            if not self._stopping:
                raise BackendFailed(
                    f"the engine process ended with status {_wait_for_exit(process)}"
                )
        except Exception as error:  # noqa: BLE001 - streams must end with any error
            self._events.failed(error)
        finally:
            self._commands.put(None)
            channel.hang_up()  # unblocks the sender with an error
            sender.join()
            channel.close()
            _wait_for_exit(process)
            self._calls.clear()  # the process no longer reads or writes their bytes

    def _listen(self, channel: SocketChannel[Report]) -> None:
        """Report each message until the process closes its end.

        Raises:
            BackendError, ValueError, ImportError: the engine failed.
        """
        for report in channel:
            if isinstance(report, Update):
                if report.load is not None:
                    self._events.stepped(report.deltas, report.load)
                for request_id, reason in report.failed:
                    self._events.adapter_failed(request_id, reason)
            elif isinstance(report, KvReply):
                self._calls.pop(report.id).settle(report)
            elif isinstance(report, Loading):
                self._events.loading(report.share)
            elif isinstance(report, Ready):
                self._events.ready(self._served(report))
            elif isinstance(report, Failed):
                raise _error(report)

    def _served(self, ready: Ready) -> ServedModel:
        directory = find_checkpoint(self._config.model, weights=False)
        return ServedModel(ready.card, remote_admission(ready.card, Tokenizer(directory)))

    def _send_commands(self, channel: SocketChannel[Report]) -> None:
        """Send commands in their own thread, because a long prompt may fill the socket's buffer."""
        with suppress(OSError):  # `run` reports that the process has ended
            channel.send(Start(self._config))
            while (command := self._commands.get()) is not None:
                channel.send(command)


class _Call(NamedTuple):
    """An operation that the process runs.

    Attributes:
        done: receives the result.
        data: shared bytes that the process reads or writes, which stay reserved meanwhile.
    """

    done: Callable[[KvResult], None]
    data: memoryview | None

    def settle(self, reply: KvReply) -> None:
        """Report the result, with its bytes."""
        result = reply.result
        if reply.shared is not None and self.data is not None:
            assert isinstance(result, KvChunk)
            result = replace(result, data=self.data[: reply.shared.num_bytes])
        self.done(result)


def _spawn(end: socket.socket, shared: SharedMemory | None) -> subprocess.Popen[bytes]:
    """Start the process with its end of the socket, and with the shared memory.

    The process gets its own session, so that Ctrl-C in a terminal reaches only the gateway. The
    gateway then lets streams end before it stops the engine.
    """
    fds = [end.fileno(), *([] if shared is None else [shared.fd])]
    return subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "draftgate.backends.engine.child", *map(str, fds)],
        pass_fds=fds,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
    )


def _wait_for_exit(process: subprocess.Popen[bytes]) -> int:
    """Wait until the process has ended, kill it after `_STOP_S`, and return its status."""
    try:
        return process.wait(_STOP_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return process.wait()


def _error(failed: Failed) -> Exception:
    kind = _ERRORS.get(failed.kind)
    if kind is None:
        return BackendFailed(f"{failed.kind}: {failed.message}")
    return kind(failed.message)
