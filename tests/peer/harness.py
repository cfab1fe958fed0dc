"""Workers of other nodes over local sockets, and servers that impersonate peers."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from aiohttp import web

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.framing import FrameChannel
from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.channel import MOST_COMMAND_BYTES, WORKER_PATH
from draftgate.backends.peer.proof import SharedSecret
from draftgate.backends.peer.tokenizer import files_digest
from draftgate.backends.peer.upgrade import UPGRADE
from draftgate.backends.remote_worker import (
    Alive,
    Command,
    FetchTokenizer,
    Ready,
    TokenizerFiles,
    Update,
)
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Capabilities, Delta, ModelCard
from draftgate.gateway.app import Listening
from draftgate.policies.types import WorkerLoad
from tests.gateway.harness import running
from tests.gateway.tcp_proxy import TcpProxy, proxied

FILES = Tokenizer(SHIPPED_MODEL).files()
SECRET = SharedSecret("a secret of the cluster")
SLOW = "h100-8b"
"""A simulated device with steps of 6 ms, on which 8,000 tokens outlast any test."""
SILENCE_S = 0.6
"""The time until silence is a failure, short for quick tests but as long as six reports."""


@asynccontextmanager
async def linked_to(url: str, **settings: Any) -> AsyncIterator[PeerBackend]:
    """Yield a backend that is linked to the node at an address."""
    backend = PeerBackend(url, settings.pop("secret", None), **settings)
    await backend.start()
    try:
        yield backend
    finally:
        await backend.stop()


@asynccontextmanager
async def behind_proxy(**settings: Any) -> AsyncIterator[tuple[PeerBackend, TcpProxy, Listening]]:
    """Yield a node, its proxy, and a backend that is linked through the proxy."""
    async with (
        running(**settings) as where,
        proxied(where.url) as proxy,
        linked_to(proxy.url, silence_s=SILENCE_S) as backend,
    ):
        yield backend, proxy, where


class Impostor:
    """A server that impersonates a peer and sends the messages of a test.

    Attributes:
        ready: its first message, or None to stay silent.
        commands: received commands of all connections, without `Alive` and requests for the
            tokenizer.
        channel: the latest connection.
    """

    channel: FrameChannel[Command]

    def __init__(self, ready: Ready | None) -> None:
        self.url = ""
        self.ready = ready
        self.commands: list[Command] = []

    def say(self, *messages: Any) -> None:
        """Send reports on the latest connection."""
        self.channel.send(*messages)

    async def serve(self, request: web.Request) -> web.StreamResponse:
        """Serve a connection."""
        headers = {"Connection": "Upgrade", "Upgrade": UPGRADE}
        response = web.StreamResponse(status=101, headers=headers)
        await response.prepare(request)
        ended = asyncio.Event()
        self.channel = FrameChannel[Command](Command, MOST_COMMAND_BYTES, self._receive, ended.set)
        assert request.transport is not None
        self.channel.take_over(request.transport)
        await ended.wait()
        return response

    def _receive(self, command: Command) -> None:
        if isinstance(command, Alive):
            if self.ready is not None:
                self.say(self.ready, an_update())
        elif isinstance(command, FetchTokenizer):
            self.say(TokenizerFiles(FILES), an_update())
        else:
            self.commands.append(command)


@asynccontextmanager
async def impostor(ready: Ready | None) -> AsyncIterator[Impostor]:
    """Serve an impostor on a free port."""
    served = Impostor(ready)
    app = web.Application()
    app.router.add_get(WORKER_PATH + "0", served.serve)
    runner = web.AppRunner(app, handler_cancellation=True, shutdown_timeout=0.1, access_log=None)
    await runner.setup()
    await web.TCPSite(runner, "127.0.0.1", 0).start()
    served.url = f"http://127.0.0.1:{runner.addresses[0][1]}"
    try:
        yield served
    finally:
        await runner.cleanup()


def a_card(**changes: Any) -> ModelCard:
    """Return the card of a worker with the shipped tokenizer."""
    facts = {"model_id": "m", "root": "r", "max_model_len": 512, "numerics_class": "c"}
    return ModelCard(**{**facts, "created_s": 1, "capabilities": Capabilities(), **changes})


def ready_message(**changes: Any) -> Ready:
    """Return the first message of an impostor without a secret."""
    facts = {"epoch": "e", "card": a_card(), "tokenizer": files_digest(FILES)}
    return Ready(**{**facts, **changes})


def an_update(*deltas: tuple[str, Delta]) -> Update:
    """Return an update with these deltas."""
    return Update(list(deltas), WorkerLoad(0, 0, 8, 8, 0.0, 0.5, ()), sent_s=1.0)
