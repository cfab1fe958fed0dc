"""A node in this process for the commands `chat` and `run`, which use it as any other client."""

from __future__ import annotations

import asyncio
import secrets
import threading
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager
from dataclasses import dataclass

import uvloop

from draftgate.gateway.app import Listening, Signals, StartError, serve
from draftgate.gateway.cli.options import INTERRUPTED, fail
from draftgate.gateway.cli.server import exit_while_loading
from draftgate.gateway.config import ServeConfig, settings
from draftgate.gateway.loading import loading_shown
from draftgate.gateway.logs import configure


@dataclass(frozen=True, slots=True)
class LocalNode:
    """The address of a node and the API key that it requires.

    The node has a key because other users of the machine also reach its port.
    """

    url: str
    api_key: str


@contextmanager
def local_node(config: ServeConfig) -> Iterator[LocalNode]:
    """Run a node with the model settings of a configuration until the block ends.

    The node runs in a thread, so that Ctrl-C interrupts only the caller. The process exits with
    status 1 and one line on stderr if the node cannot start, and with status 130 if Ctrl-C
    interrupts loading.
    """
    configure("warning", "line")
    api_key = secrets.token_urlsafe()
    model = {one.name: getattr(config, one.name) for one in settings() if not one.server}
    own = ServeConfig(**model, port=0, api_keys=(api_key,), log_level="warning")
    node = _Node(own)
    node.start()
    try:
        url = node.url.result()
    except StartError as error:
        fail(error)
    except KeyboardInterrupt:
        node.stop()
        exit_while_loading(INTERRUPTED)
        raise
    try:
        yield LocalNode(url, api_key)
    finally:
        node.stop()
        node.join()


class _Node(threading.Thread):
    """The thread of a node.

    Attributes:
        url: the address of the node once it is ready, or the error of its start.
    """

    def __init__(self, config: ServeConfig) -> None:
        super().__init__(name="local node", daemon=True)
        self.url: Future[str] = Future()
        self._config = config
        self._signals = Signals(handled=False)
        self._loop: asyncio.AbstractEventLoop | None = None

    def run(self) -> None:
        try:
            with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
                self._loop = runner.get_loop()
                runner.run(
                    serve(
                        self._config,
                        lambda node: loading_shown(node, self._config),
                        self._ready,
                        signals=self._signals,
                    )
                )
        except Exception as error:  # noqa: BLE001 - the caller raises it
            if not self.url.done():
                self.url.set_exception(error)

    def stop(self) -> None:
        """Stop the node without waiting for open streams."""
        if self._loop is not None and self.is_alive():
            for event in (self._signals.first, self._signals.second):
                self._loop.call_soon_threadsafe(event.set)

    def _ready(self, where: Listening) -> None:
        self.url.set_result(where.url)
