"""What a gateway's process and an engine's own process say to each other, over a socket.

Messages (`backends.wire`) stand behind a length of four bytes. Whoever ends closes the socket.
"""

from __future__ import annotations

import socket
from collections.abc import Iterator
from contextlib import suppress
from threading import Lock
from typing import Final, Generic, TypeVar

import msgspec

from draftgate.backends.base import WorkerConfig
from draftgate.backends.types import Delta, GenerationRequest, ModelCard, Pace
from draftgate.backends.wire import Codec
from draftgate.policies.types import WorkerLoad

_LENGTH_BYTES: Final = 4


class Start(msgspec.Struct, tag=True, frozen=True):
    """To the engine, first of all: load this."""

    config: WorkerConfig


class Submit(msgspec.Struct, tag=True, frozen=True):
    """To the engine: run this, which was checked."""

    request: GenerationRequest


class Cancel(msgspec.Struct, tag=True, frozen=True):
    """To the engine: end this request, if it has not ended."""

    request_id: str


class SetPace(msgspec.Struct, tag=True, frozen=True):
    """To the engine: go on with this request so far, if it has not ended."""

    request_id: str
    pace: Pace


class Loading(msgspec.Struct, tag=True, frozen=True):
    """From the engine: the share of loading that is done."""

    share: float


class Ready(msgspec.Struct, tag=True, frozen=True):
    """From the engine: loaded, and what the gateway needs to check requests by itself."""

    card: ModelCard


class Stepped(msgspec.Struct, tag=True, frozen=True):
    """From the engine: the deltas of a step, none when it goes idle, and the load behind it."""

    deltas: list[tuple[str, Delta]]
    load: WorkerLoad


class Failed(msgspec.Struct, tag=True, frozen=True):
    """From the engine: loading or a step failed; nothing follows.

    Attributes:
        kind: name of the error's class.
    """

    kind: str
    message: str


Command = Start | Submit | Cancel | SetPace
Report = Loading | Ready | Stepped | Failed
Received = TypeVar("Received", Command, Report)


class Channel(Generic[Received]):
    """One end of the socket. One thread receives; any may send."""

    def __init__(self, end: socket.socket, received: object) -> None:
        """Take an end; `received` is what the other one sends."""
        self._end = end
        self._file = end.makefile("rb")
        self._codec: Codec[Received] = Codec(received)
        self._sending = Lock()

    def send(self, message: Command | Report) -> None:
        """Send a message; waits while the other end reads slowly.

        Raises:
            OSError: the other end is closed.
        """
        with self._sending:
            data = self._codec.encode(message)
            self._end.sendall(len(data).to_bytes(_LENGTH_BYTES, "little") + data)

    def __iter__(self) -> Iterator[Received]:
        """Yield what comes, until the other end is closed."""
        try:
            while len(head := self._file.read(_LENGTH_BYTES)) == _LENGTH_BYTES:
                yield self._codec.decode(self._file.read(int.from_bytes(head, "little")))
        except (ConnectionResetError, ValueError):
            return  # cut off in the middle

    def hang_up(self) -> None:
        """End both directions: the other end hears it, and whoever receives here. Idempotent."""
        with suppress(OSError):  # they have ended already
            self._end.shutdown(socket.SHUT_RDWR)

    def close(self) -> None:
        """Let go of the socket; for the thread that receives."""
        self.hang_up()
        self._file.close()
        self._end.close()
