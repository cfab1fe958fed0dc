"""The KV cache events of a server, in order and without gaps.

A server numbers its batches of events from 0. `EventLog` applies them to an index, and finds out
whether batches are missing. `KvEventSubscriber` receives them over ZeroMQ. The protocol is that of
vLLM and SGLang: a PUB socket sends the topic, the number and the MessagePack of each batch, and a
ROUTER socket sends the batches from a number on again, as far as the server has kept them.
"""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator, Sequence
from contextlib import aclosing, suppress
from typing import Any, Final, TypeAlias

import msgspec

from draftgate.backends.openai.block_index import (
    AllBlocksCleared,
    BlockIndex,
    BlockRemoved,
    BlockStored,
)

Batch: TypeAlias = tuple[int, bytes]
"""The number of a batch, and its MessagePack."""

REPLAY_S: Final = 2.0
"""Timeout of each batch of a replay in seconds. vLLM looks for requests every 0.1 s."""

HEARTBEAT_MS: Final = 5_000
"""Interval of heartbeats. A server that is silent for twice as long is disconnected."""

_MOST_BATCH_BYTES: Final = 64 << 20
"""Maximum size of a message. A prompt of a million tokens has 5 MB."""

_PART: Final = 16
"""Number of batches after which a replay lets other tasks run. vLLM keeps 10,000 batches."""

_END: Final = (-1).to_bytes(8, "big", signed=True)
"""The number after the last batch of a replay."""

_log: Final = logging.getLogger(__name__)


class _StoredArray(BlockStored, array_like=True, tag="BlockStored"):
    """`BlockStored` of SGLang and of older versions of vLLM."""


class _RemovedArray(BlockRemoved, array_like=True, tag="BlockRemoved"):
    """`BlockRemoved` of the same servers."""


class _ClearedArray(AllBlocksCleared, array_like=True, tag="AllBlocksCleared"):
    """`AllBlocksCleared` of the same servers."""


class _Batch(msgspec.Struct, array_like=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]


class _BatchOfArrays(msgspec.Struct, array_like=True):
    ts: float
    events: list[_StoredArray | _RemovedArray | _ClearedArray]


_maps: Final = msgspec.msgpack.Decoder(_Batch)
_arrays: Final = msgspec.msgpack.Decoder(_BatchOfArrays)


class EventLog:
    """Applies the batches of one server to an index, without I/O.

    The caller passes each batch to `receive`. If that returns False, or if the connection has ended
    (`lose`) and begins again, the caller requests the batches from `check_from` on, and passes them
    to `recover`. They begin with the last known batch if the server is still the same.

    Attributes:
        index: the blocks that the server has.
        is_current: whether the index includes all that the server has sent, as far as is known.
    """

    def __init__(self, index: BlockIndex) -> None:
        """Start with an index that has no blocks."""
        self.index = index
        self.is_current = False
        self._next = 0  # the number of the next batch
        self._last = b""  # the batch before

    @property
    def check_from(self) -> int:
        """Number of the first batch that `recover` needs."""
        return max(self._next - 1, 0)

    def receive(self, number: int, payload: bytes) -> bool:
        """Apply a batch if it follows the last one, and return whether none is missing."""
        if number == self._next - 1 and payload == self._last:
            return True  # a replay has already contained it
        if number == 0 or (number == self._next and self.is_current):
            self._apply(number, payload)
            return True
        self.is_current = False
        return False

    def recover(self, replayed: Sequence[Batch], *, is_all: bool = True) -> bool:
        """Apply missing batches, or forget all blocks if another server has sent them.

        Args:
            replayed: batches that the server still has from `check_from` on, in order.
            is_all: whether no more of them follow.

        Returns:
            False if the server is not the same, or no longer has the missing batches. The caller
            then requests its batches from 0 on, and calls the method again.
        """
        if self._next and list(replayed[:1]) != [(self._next - 1, self._last)]:
            self.lose()
            self.index.clear(is_complete=False)
            self._next, self._last = 0, b""
            return False
        for number, payload in replayed:
            self.accept(number, payload)
        self.is_current = is_all
        return True

    def accept(self, number: int, payload: bytes) -> None:
        """Apply a batch although batches before it may be missing, or ignore a known one."""
        if number < self._next:
            return
        if number > self._next:
            # The missing batches may have removed blocks. A later batch stores or removes blocks of
            # the present cache, so it can follow an empty index.
            self.index.clear(is_complete=False)
        self._apply(number, payload)

    def lose(self) -> None:
        """Note that the connection has ended, so that batches may be missing."""
        self.is_current = False

    def _apply(self, number: int, payload: bytes) -> None:
        if not number:  # the first batch of a server, whose cache was empty
            self.index.clear(is_complete=True)
        try:
            events = _read(payload)
        except msgspec.DecodeError as error:
            _log.warning("unreadable KV cache events: %s", error)
            self.index.clear(is_complete=False)
        else:
            self.index.apply(events)
        self._next, self._last = number + 1, payload
        self.is_current = True


def _read(payload: bytes) -> Sequence[BlockStored | BlockRemoved | AllBlocksCleared]:
    """Return the events of a batch.

    Raises:
        msgspec.DecodeError: they are malformed, or of an unknown kind.
    """
    try:
        return _maps.decode(payload).events
    except msgspec.ValidationError:
        return _arrays.decode(payload).events


class KvEventSubscriber:
    """Receives the events of one server over ZeroMQ."""

    def __init__(self, log: EventLog, endpoint: str, replay_endpoint: str | None = None) -> None:
        """Prepare a subscription, which `run` opens.

        Args:
            endpoint: address of the server's PUB socket, such as `tcp://host:5557`.
            replay_endpoint: address of its ROUTER socket for replays, or None without one.

        Raises:
            ModuleNotFoundError: the package pyzmq is not installed.
        """
        import zmq.asyncio
        import zmq.utils.monitor

        self._zmq: Any = zmq
        self._log = log
        self._endpoint = endpoint
        self._replay_endpoint = replay_endpoint
        self._applying = asyncio.Lock()

    async def run(self) -> None:
        """Receive events until the task is cancelled, or until ZeroMQ refuses an address."""
        try:
            await self._follow()
        except* self._zmq.ZMQError as errors:
            _log.error("no KV cache events from %s: %s", self._endpoint, errors.exceptions[0])

    async def _follow(self) -> None:
        zmq = self._zmq
        context = zmq.asyncio.Context()
        socket = context.socket(zmq.SUB)
        self._bound(socket)
        socket.setsockopt(zmq.SUBSCRIBE, b"")
        monitor = socket.get_monitor_socket(zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED)
        try:
            socket.connect(self._endpoint)
            async with asyncio.TaskGroup() as tasks:
                tasks.create_task(self._watch(context, monitor))
                tasks.create_task(self._receive(context, socket))
        finally:
            self._log.lose()
            socket.disable_monitor()
            context.destroy(linger=0)

    def _bound(self, socket: Any) -> None:
        """Bound the messages of a socket, and let it notice a machine that is gone."""
        zmq = self._zmq
        socket.setsockopt(zmq.MAXMSGSIZE, _MOST_BATCH_BYTES)
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, 2 * HEARTBEAT_MS)

    async def _watch(self, context: Any, monitor: Any) -> None:
        """Recover whenever a connection begins."""
        zmq = self._zmq
        while True:
            event = await zmq.utils.monitor.recv_monitor_message(monitor)
            async with self._applying:
                if event["event"] == zmq.EVENT_DISCONNECTED:
                    self._log.lose()
                else:
                    await self._recover(context)

    async def _receive(self, context: Any, socket: Any) -> None:
        """Apply each batch as it arrives."""
        while True:
            frames = await socket.recv_multipart()
            batch = _batch(frames)
            if batch is None:
                continue
            async with self._applying:
                if not self._log.receive(*batch):
                    await self._recover(context)
                    self._log.accept(*batch)
            await asyncio.sleep(0)  # many messages may wait

    async def _recover(self, context: Any) -> None:
        """Apply the batches that are missing, if the server has them."""
        log = self._log
        async with aclosing(self._replay(context, log.check_from)) as parts:
            async for part, is_all in parts:
                if not log.recover(part, is_all=is_all):
                    break
            else:
                return
        async with aclosing(self._replay(context, 0)) as parts:
            async for part, is_all in parts:
                log.recover(part, is_all=is_all)

    async def _replay(
        self, context: Any, first: int
    ) -> AsyncGenerator[tuple[list[Batch], bool], None]:
        """Yield the batches that the server has from a number on, in parts, the last with True.

        Each part begins with the last batch of the part before it.
        """
        part: list[Batch] = []
        if self._replay_endpoint is not None:
            # DEALER, because a REQ socket accepts only one reply.
            with context.socket(self._zmq.DEALER) as socket, suppress(TimeoutError):
                self._bound(socket)
                socket.setsockopt(self._zmq.LINGER, 0)
                socket.connect(self._replay_endpoint)
                await socket.send_multipart([b"", first.to_bytes(8, "big")])
                while True:
                    async with asyncio.timeout(REPLAY_S):
                        frames = await socket.recv_multipart()
                    batch = _batch(frames)
                    if batch is None or frames[-2] == _END:
                        break
                    part.append(batch)
                    if len(part) > _PART:
                        yield part, False
                        part = [batch]
                        await asyncio.sleep(0)  # the batches may have arrived already
        yield part, True


def _batch(frames: Sequence[bytes]) -> Batch | None:
    """Return the number and the content of a message, or None if it is malformed."""
    if len(frames) < 2 or len(frames[-2]) != 8:
        return None
    return int.from_bytes(frames[-2], "big"), frames[-1]
