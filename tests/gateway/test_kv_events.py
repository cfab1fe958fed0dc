"""Tests of the subscription to the KV cache events of an upstream, over ZeroMQ."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from draftgate.backends.openai.block_index import BlockIndex
from draftgate.backends.openai.kv_events import EventLog, KvEventSubscriber
from draftgate.backends.prompt_blocks import PromptBlocks
from tests.gateway.event_publisher import CachingServer, Tokens
from tests.gateway.harness import PATIENCE_S, until

zmq: Any = pytest.importorskip("zmq")
asyncio_zmq: Any = pytest.importorskip("zmq.asyncio")

END = (-1).to_bytes(8, "big", signed=True)


class Publisher:
    """The sockets of a caching server, as vLLM opens them."""

    def __init__(self, folder: Path, server: CachingServer) -> None:
        self.server = server
        self.endpoint, self.replay_endpoint = (f"ipc://{folder}/{name}" for name in ("pub", "log"))
        self._context = asyncio_zmq.Context()
        self._pub, self._router = (self._context.socket(kind) for kind in (zmq.PUB, zmq.ROUTER))
        self._pub.bind(self.endpoint)
        self._router.bind(self.replay_endpoint)
        self._serving = asyncio.create_task(self._repeat())

    async def compute(self, prompt: Tokens) -> None:
        """Store a prompt, and publish the events."""
        self.server.compute(prompt)
        await self.publish()

    async def publish(self) -> None:
        number, payload = self.server.publish()
        await self._pub.send_multipart([b"topic", number.to_bytes(8, "big"), payload])

    async def _repeat(self) -> None:
        while True:
            client, _, first = await self._router.recv_multipart()
            for number, payload in self.server.replay(int.from_bytes(first, "big")):
                frames = [client, b"", b"topic", number.to_bytes(8, "big"), payload]
                await self._router.send_multipart(frames)
            await self._router.send_multipart([client, b"", b"", END, b""])

    async def close(self) -> None:
        self._serving.cancel()
        with suppress(asyncio.CancelledError):
            await self._serving
        self._context.destroy(linger=0)


@pytest.fixture
async def publish(tmp_path: Path) -> AsyncIterator[Callable[..., Publisher]]:
    """A function that returns a publisher, which is closed at the end of the test."""
    opened: list[Publisher] = []

    def open_one(**form: Any) -> Publisher:
        opened.append(Publisher(tmp_path, CachingServer(**{"keeps": 1000, **form})))
        return opened[-1]

    yield open_one
    for publisher in opened:
        await publisher.close()


@asynccontextmanager
async def following(publisher: Publisher, *, replays: bool) -> AsyncIterator[EventLog]:
    """Run a subscriber of a publisher, which has connected once."""
    log = EventLog(BlockIndex())
    replay = publisher.replay_endpoint if replays else None
    task = asyncio.create_task(KvEventSubscriber(log, publisher.endpoint, replay).run())
    await until(lambda: log.is_current)
    try:
        yield log
    finally:
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task
        assert not log.is_current


def cached(log: EventLog, prompt: Tokens) -> int:
    return log.index.cached_tokens(PromptBlocks(prompt, None), "")


async def told(publisher: Publisher, log: EventLog, prompt: Tokens, tokens: int) -> None:
    """Publish batches until the subscriber knows this number of a prompt's tokens."""
    async with asyncio.timeout(PATIENCE_S):
        while cached(log, prompt) != tokens:
            await publisher.publish()
            await asyncio.sleep(0.001)


async def store(publisher: Publisher, log: EventLog, prompt: Tokens, tokens: int) -> None:
    """Store a prompt until the subscriber, whose filter may reach the server late, knows it."""
    async with asyncio.timeout(PATIENCE_S):
        while cached(log, prompt) != tokens:
            publisher.server.clear()
            await publisher.compute(prompt)
            await asyncio.sleep(0.001)


PROMPT = tuple(range(9))


@pytest.mark.parametrize("arrays", [False, True], ids=["maps", "arrays"])
async def test_events_arrive(publish: Callable[..., Publisher], arrays: bool) -> None:
    """The index follows the server, in the form of vLLM and in that of SGLang."""
    publisher = publish(arrays=arrays)
    async with following(publisher, replays=True) as log:
        await store(publisher, log, PROMPT, 8)
        assert log.index.is_complete
        publisher.server.evict()
        await told(publisher, log, PROMPT, 6)


async def test_earlier_events_are_replayed(publish: Callable[..., Publisher]) -> None:
    """A gateway that starts after its server knows what the server has cached before."""
    publisher = publish()
    for _ in range(50):  # more than one part of a replay
        await publisher.publish()
    await publisher.compute(PROMPT)
    async with following(publisher, replays=True) as log:
        # As soon as the log is current, the replay has ended.
        assert cached(log, PROMPT) == 8
        assert log.index.is_complete


@pytest.mark.parametrize("replays", [True, False])
async def test_gap_is_replayed_or_clears_the_index(
    publish: Callable[..., Publisher],
    replays: bool,
) -> None:
    """Lost batches are requested again. Without that, the index forgets what it knew."""
    publisher = publish()
    async with following(publisher, replays=replays) as log:
        await store(publisher, log, PROMPT, 8)
        publisher.server.compute((7, 7, 7))
        publisher.server.publish()  # lost
        if replays:
            await told(publisher, log, (7, 7, 7), 2)
            assert cached(log, PROMPT) == 8
        else:
            await told(publisher, log, PROMPT, 0)
            assert cached(log, (7, 7, 7)) == 0
        assert log.index.is_complete is replays


@pytest.mark.parametrize("replays", [True, False])
async def test_restart_of_the_server_clears_the_index(
    publish: Callable[..., Publisher],
    replays: bool,
) -> None:
    """A server that restarts has nothing cached, and its new events count."""
    publisher = publish()
    async with following(publisher, replays=replays) as log:
        await store(publisher, log, PROMPT, 8)
        await publisher.close()
        await until(lambda: not log.is_current)
        publisher = publish()
        await publisher.compute((5, 5, 5))
        await until(lambda: log.is_current)
        await told(publisher, log, PROMPT, 0)
        await store(publisher, log, (6, 6, 6), 2)
        assert cached(log, PROMPT) == 0


async def test_refused_address_is_logged(caplog: pytest.LogCaptureFixture) -> None:
    """An address that ZeroMQ refuses ends the subscription with an error in the log."""
    log = EventLog(BlockIndex())
    await KvEventSubscriber(log, "tcp://127.0.0.1:x").run()
    assert "no KV cache events from tcp://127.0.0.1:x" in caplog.text
    assert not log.is_current


async def test_malformed_messages_are_ignored(publish: Callable[..., Publisher]) -> None:
    """A message without a number, or with unknown events, does not end the subscription."""
    publisher = publish(keeps=0)
    async with following(publisher, replays=False) as log:
        await store(publisher, log, PROMPT, 8)
        for frames in ([b"topic"], [b"topic", b"short", b""], [b"topic", b"x" * 8, b"\xc1"]):
            await publisher._pub.send_multipart(frames)
        await told(publisher, log, PROMPT, 0)
        await store(publisher, log, (6, 6, 6), 2)
