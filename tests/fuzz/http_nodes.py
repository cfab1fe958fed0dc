"""Nodes whose clients are in the same process, so that a test sends bytes without a network."""

from __future__ import annotations

import asyncio
import logging
import time
import zlib
from collections.abc import Coroutine
from contextlib import AsyncExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

from aiohttp import web

from draftgate.gateway.app import build_node, listening, start_workers
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.logs import LOGGER
from tests.fuzz.http_streams import Ending, Sent
from tests.memory_network import BEGIN_S, MemoryLoop
from tests.upstream_settings import at

INSTANT = Path(__file__).parents[2] / "bench" / "harness" / "instant.json"
SETTINGS: dict[str, Any] = {
    "port": 0, "log_level": "warning", "speculation": "off", "no_acceptance_cache": True,
    "keepalive_timeout_s": 5.0, "body_timeout_s": 3.0, "max_body_bytes": 1 << 20,
}  # fmt: skip
TURNS = 4
"""Turns of the event loop between two pieces."""

ANSWER_S = 1.5
LONG_S = 15.0
AFTER_S = 0.05
"""Virtual times after which a node has answered, has closed a connection without a request, and has
noticed that a client has closed. An answer may take the second in which a direct request waits for
its rest."""


@dataclass
class Seen:
    """What a client has received.

    Attributes:
        early: bytes before the wait for timeouts.
        closed: whether the node had closed the connection before that wait.
        closed_late: whether it has closed the connection after it.
        errors: errors in the log, and the reasons why the node is not idle.
    """

    early: bytes = b""
    late: bytes = b""
    closed: bool = False
    closed_late: bool = False
    errors: list[str] = field(default_factory=list)


class _Client(asyncio.Protocol):
    def __init__(self) -> None:
        self.received = b""
        self.closed = False

    def data_received(self, data: bytes) -> None:
        self.received += data

    def eof_received(self) -> bool:
        self.closed = True
        return True  # the client closes when it has seen this

    def connection_lost(self, error: Exception | None) -> None:
        self.closed = True


class _Errors(logging.Handler):
    def __init__(self) -> None:
        super().__init__(logging.ERROR)
        self.found: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.found.append(logging.Formatter().format(record))


async def _echo(request: web.Request) -> web.Response:
    """Respond with the checksum of the body, so that each byte of it matters."""
    if request.path == "/v1/models":
        return web.json_response({"object": "list", "data": [{"id": "m", "max_model_len": 99}]})
    text = f"{request.rel_url.raw_path_qs} {zlib.crc32(await request.read())}"
    choice = {"index": 0, "text": text, "finish_reason": "stop"}
    return web.json_response({"id": "c", "choices": [choice]})


class Nodes:
    """A node with a simulated worker, and one that forwards requests to an upstream."""

    def __init__(self) -> None:
        self._loop = MemoryLoop()
        self._errors = _Errors()
        self._stack = AsyncExitStack()
        self._nodes: dict[bool, Any] = {}
        self._loop.set_exception_handler(self._failed)
        self._run(self._start())

    def close(self) -> None:
        """Stop the nodes."""
        self._run(self._stack.aclose())
        self._run(self._loop.shutdown_asyncgens())
        self._loop.close()

    def send(self, sent: Sent) -> Seen:
        """Send bytes on a new connection, and return what arrives."""
        return self._run(self._send(sent))

    def _run(self, work: Coroutine[Any, Any, Any]) -> Any:
        # Texts must not depend on a random seed, and waits not on the real time.
        clock = dict.fromkeys(("monotonic", "perf_counter"), self._loop.time)
        seed = mock.patch("secrets.randbits", return_value=7)
        with seed, mock.patch.multiple(time, time=self._unix_time, **clock):
            return self._loop.run_until_complete(work)

    def _unix_time(self) -> float:
        return BEGIN_S + self._loop.time()

    def _failed(self, loop: asyncio.AbstractEventLoop, context: dict[str, Any]) -> None:
        self._errors.found.append(f"{context.get('message')}: {context.get('exception')!r}")

    async def _start(self) -> None:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", _echo)
        runner = web.AppRunner(app, shutdown_timeout=0.1, access_log=None, max_line_size=1 << 17)
        await runner.setup()
        self._stack.push_async_callback(runner.cleanup)
        server = await self._loop.create_server(runner.server)
        upstream = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        for proxy, own in (
            (False, {"backend": "sim", "profile": str(INSTANT)}),
            (True, {"backend": "openai", "upstream": at(upstream)}),
        ):
            node = build_node(ServeConfig(**SETTINGS, **own))
            await self._stack.enter_async_context(listening(node))
            self._stack.push_async_callback(node.stop)
            await start_workers(node)
            self._nodes[proxy] = node

    async def _send(self, sent: Sent) -> Seen:
        self._errors.found.clear()
        seen, node = Seen(), self._nodes[sent.proxy]
        loggers = [logging.getLogger(name) for name in (LOGGER, "aiohttp", "asyncio")]
        for logger in loggers:
            logger.addHandler(self._errors)
        try:
            await self._exchange(sent, seen, node.port)
        finally:
            for logger in loggers:
                logger.removeHandler(self._errors)
        seen.errors = list(self._errors.found)
        if node.in_flight:
            seen.errors.append(f"{node.in_flight} requests in flight after their connection")
        return seen

    async def _exchange(self, sent: Sent, seen: Seen, port: int) -> None:
        transport, client = await self._loop.create_connection(_Client, port=port)
        for piece in sent.pieces:
            if client.closed:
                break
            transport.write(piece)
            for _ in range(TURNS):
                await asyncio.sleep(0)
            if sent.pause_s:
                await asyncio.sleep(sent.pause_s)
        if sent.ending is Ending.END and not client.closed:
            transport.write_eof()
        if sent.ending in {Ending.CLOSE, Ending.ABORT}:
            transport.close() if sent.ending is Ending.CLOSE else transport.abort()
        await asyncio.sleep(ANSWER_S)
        seen.early, seen.closed = client.received, client.closed
        if sent.ending in {Ending.WAIT, Ending.END} and not client.closed and sent.waits:
            await asyncio.sleep(LONG_S)
        seen.late, seen.closed_late = client.received[len(seen.early) :], client.closed
        transport.close()
        await asyncio.sleep(AFTER_S)
