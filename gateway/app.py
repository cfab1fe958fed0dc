"""The composition root, which builds, starts, serves, drains and stops a node.

The node first listens, so that `/health` and `/ready` respond while the model loads and warms up.

SIGTERM and SIGINT stop the node. It leaves the pool, rejects new requests and lets open requests
end within the drain timeout. Then it closes the listener, responds to the last requests and stops
the workers. A second signal skips these steps. A node that has lost its last worker stops in the
same way, so that its supervisor restarts it.

SIGHUP makes the node read its API keys and certificates again. SIGUSR1 and SIGUSR2, which programs
that rotate logs send, have no effect, because no log file stays open.
"""

from __future__ import annotations

import asyncio
import logging
import os
import signal
import socket
import ssl
from collections.abc import AsyncIterator, Awaitable, Callable, Coroutine
from contextlib import (
    AbstractAsyncContextManager,
    AsyncExitStack,
    asynccontextmanager,
    suppress,
)
from dataclasses import dataclass
from functools import partial
from typing import Any, Final

from aiohttp import web

from draftgate.backends.errors import BackendError
from draftgate.backends.registry import backend_factory
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import ModelPlan, plan_models
from draftgate.gateway.fleet import Fleet
from draftgate.gateway.http.connections import Connection, connection_factory
from draftgate.gateway.http.last_requests import answer_last_requests
from draftgate.gateway.http.other_listeners import accepting_for_others
from draftgate.gateway.key_advice import use_accounts, warn_about_accounts
from draftgate.gateway.lifecycle import NodeState
from draftgate.gateway.logs import log
from draftgate.gateway.node import Node
from draftgate.gateway.process import settle_process
from draftgate.gateway.reloading import WatchedFiles, reloading
from draftgate.gateway.routes import build_served
from draftgate.gateway.state.guarded.store import open_store
from draftgate.gateway.telemetry.trace_export import open_tracing
from draftgate.gateway.tls import Listener, tls_listener

_CHECK_INTERVAL_S: Final = 0.5
"""Interval of the check for remaining workers. Requests notice a failure independently."""

_EXTRAS: Final = {
    "torch": "engine",
    "safetensors": "engine",
    "triton": "cuda",
    "huggingface_hub": "hub",
    "zmq": "kv-events",
}
"""The extra that installs a package, for packages that only some features need."""

CLOSE_S: Final = 2.0
"""Time for connections to send their buffers after the workers have stopped."""

_REACHABLE: Final = {"0.0.0.0": "127.0.0.1", "::": "::1"}  # noqa: S104 - not a bind
"""Addresses at which clients on this machine reach a listener on all addresses."""


class StartError(Exception):
    """The node cannot start.

    The message is one line for the operator.
    """


class NodeFailed(Exception):
    """The node has lost its last worker and stopped.

    The message is one line for the operator.
    """


@dataclass(frozen=True, slots=True)
class Inherited:
    """A listening socket that the parent of this process has opened.

    Attributes:
        accepts_early: whether the node responds before it is ready. Otherwise connections wait.
        others: the listeners of other processes that share the port.
    """

    listener: socket.socket
    accepts_early: bool
    others: tuple[socket.socket, ...] = ()


@dataclass(frozen=True, slots=True)
class Listening:
    """A node that accepts connections.

    Attributes:
        accept: accepts connections from now on, if they had to wait.
        accepting_for_others: a context manager that serves connections that wait at the listeners
            of other processes.
        reload: reads API keys and certificates again.
        url: the URL of the node, with the actual port.
        stop_accepting: closes the listener, and waits until the requests that clients have already
            sent have responses. Call it after a drain.
    """

    node: Node
    url: str
    accept: Callable[[], Awaitable[None]]
    accepting_for_others: Callable[[], AbstractAsyncContextManager[None]]
    reload: Callable[[], None]
    stop_accepting: Callable[[], Awaitable[None]]


def build_fleets(config: ServeConfig) -> list[tuple[ModelPlan, Fleet]]:
    """Return each configured model with the fleet of its workers, which are not built yet.

    Raises:
        ValueError: settings contradict each other.
    """
    if config.no_worker and config.join is None:
        raise ValueError("--no-worker needs --join")
    if config.no_worker and config.only_forwards:
        raise ValueError(f"--no-worker cannot be combined with --backend {config.backend}")
    if config.backend == "peer" and config.join is not None:
        raise ValueError("--backend peer cannot be combined with --join: use --no-worker --join")
    return [
        (plan, Fleet(partial(backend_factory, plan.config.backend), plan.worker_configs()))
        for plan in plan_models(config)
    ]


def build_node(config: ServeConfig) -> Node:
    """Build a node without importing or loading anything for its workers.

    Raises:
        StartError: a setting is invalid.
    """
    try:
        tracing = open_tracing(config.otlp_endpoint, os.environ)
        store = open_store(config.join, config.pool)
        return Node(config, build_fleets(config), store, tracing)
    except ValueError as error:
        raise StartError(str(error)) from error


@asynccontextmanager
async def listening(node: Node, inherited: Inherited | None = None) -> AsyncIterator[Listening]:
    """Accept connections until the block ends, and then close the listener and all connections.

    Args:
        inherited: the listener, or None to listen on the address of the node.

    Raises:
        StartError: the address or the certificates cannot be used.
    """
    config = node.config
    tls = _tls(config)
    direct = build_served(node)
    runner = web.AppRunner(direct.app, handler_cancellation=True, shutdown_timeout=CLOSE_S)
    await runner.setup()
    try:
        assert runner.server is not None
        connect = connection_factory(runner.server, config.keepalive_timeout_s, node.audit, direct)
        context = None if tls is None else tls.context
        server = await _listen(connect, config, context, inherited)
        try:
            node.port = int(server.sockets[0].getsockname()[1])
            async with AsyncExitStack() as stack:
                await stack.enter_async_context(
                    reloading(node.key_files, partial(use_accounts, node))
                )
                await stack.enter_async_context(node.keys.syncing())
                if tls is not None:
                    await stack.enter_async_context(reloading(tls.files, tls.use))
                stop = partial(answer_last_requests, runner.server, server, connect, context)
                others = () if inherited is None else inherited.others
                yield Listening(
                    node,
                    _url(config, node.port),
                    server.start_serving,
                    partial(accepting_for_others, others, connect, context),
                    partial(_reload, node.key_files, None if tls is None else tls.files),
                    stop,
                )
        finally:
            server.close()
    finally:
        await runner.cleanup()


def _tls(config: ServeConfig) -> Listener | None:
    """Return the TLS of a node, or None without a certificate.

    Raises:
        StartError: a certificate cannot be used.
    """
    try:
        return tls_listener(config)
    except ValueError as error:
        raise StartError(str(error)) from error


def _reload(*watched: WatchedFiles[Any] | None) -> None:
    """Read files again, such as API keys and certificates."""
    log(logging.INFO, "reloading API keys and certificates")
    for files in watched:
        if files is not None:
            files.request()


async def _listen(
    connect: Callable[[], Connection],
    config: ServeConfig,
    tls: ssl.SSLContext | None,
    inherited: Inherited | None,
) -> asyncio.Server:
    """Accept connections on a listener, or on the address of a node.

    Raises:
        StartError: the address cannot be used.
    """
    loop = asyncio.get_running_loop()
    if inherited is not None:
        sock, early = inherited.listener, inherited.accepts_early
        return await loop.create_server(connect, sock=sock, ssl=tls, start_serving=early)
    try:
        return await loop.create_server(connect, config.host, config.port, backlog=1024, ssl=tls)
    except OSError as error:
        where = f"{config.host}:{config.port}"
        raise StartError(f"cannot listen on {where}: {error.strerror}") from error


async def start_workers(node: Node) -> None:
    """Load the model and warm up.

    The node is ready when this function returns.

    Raises:
        StartError: the model cannot be loaded, and the node has failed.
    """
    try:
        await node.start()
        warn_about_accounts(node)
    except ImportError as error:
        raise _failed(node, _missing_package(node.config.backend, error)) from error
    except (BackendError, ValueError, OSError) as error:
        raise _failed(node, str(error)) from error


def _missing_package(backend: str, error: ImportError) -> str:
    """Return a message with the name of the missing package and of the extra that installs it."""
    package = (error.name or str(error)).partition(".")[0]
    reason = f"the backend {backend!r} needs {package}, which is not installed"
    extra = _EXTRAS.get(package)
    if extra is None:
        return reason
    help_text = f"{reason}: pip install 'draftgate[{extra}]'"
    if backend == "engine":
        help_text += ", or forward to other servers: draftgate serve --upstream URL"
    return help_text


def _failed(node: Node, reason: str) -> StartError:
    node.lifecycle.note_failure(reason)
    return StartError(reason)


async def drain(node: Node, timeout_s: float) -> bool:
    """Reject new requests, wait for running requests, and return whether all of them ended.

    Args:
        timeout_s: the longest time to wait, in seconds.
    """
    node.lifecycle.move_to(NodeState.DRAINING)
    try:
        await asyncio.wait_for(node.lifecycle.in_flight.drained(), timeout_s)
    except TimeoutError:
        return False
    return True


async def serve(
    config: ServeConfig,
    loading: Callable[[Node], AbstractAsyncContextManager[None]],
    on_ready: Callable[[Listening], None],
    inherited: Inherited | None = None,
    signals: Signals | None = None,
) -> None:
    """Serve until SIGTERM or SIGINT.

    Args:
        config: the settings of the node.
        loading: a context manager that is entered while the workers start, to show progress.
        on_ready: a callback for the time when the node is ready.
        inherited: the listener, or None to listen on the address of the node.
        signals: what stops the node, or None for the signals of the process.

    Raises:
        StartError: the node cannot start.
        NodeFailed: the node has lost its last worker.
    """
    signals = signals or Signals()
    failure: str | None = None
    node = build_node(config)
    async with listening(node, inherited) as where:
        signals.on_reload = where.reload
        try:
            async with node.beating():
                async with loading(node):
                    await until_signal(signals, start_workers(node))
                if not signals.first.is_set():
                    settle_process()
                    await where.accept()
                    on_ready(where)
                    async with where.accepting_for_others():
                        await until_signal(signals, _last_worker_lost(node))
                    failure = node.failure
                    await node.leave()
                if node.lifecycle.state is not NodeState.STARTING:  # a model may already serve
                    await _stop_until_second(where, signals)
        finally:
            await node.stop()
            await _wait_for_streams(node)
            await node.heartbeat.write_files()
    await node.responses.close()
    await node.store.close()
    await asyncio.to_thread(node.tracing.shutdown)
    if failure is not None:
        raise NodeFailed(f"the last worker failed: {failure}")


async def _last_worker_lost(node: Node) -> None:
    """Wait until the last worker is lost. Never return if workers can recover."""
    while node.failure is None:  # noqa: ASYNC110 - workers set no event
        await asyncio.sleep(_CHECK_INTERVAL_S)


class Signals:
    """The signals that operators and supervisors send to a process.

    The first SIGTERM or SIGINT stops the process, and the second one skips the drain. None of the
    other signals ends it.

    Attributes:
        on_reload: a callback for SIGHUP.
    """

    def __init__(
        self, on_reload: Callable[[], None] = lambda: None, *, handled: bool = True
    ) -> None:
        """Handle the signals on the running event loop.

        Args:
            on_reload: the callback.
            handled: whether to handle them. Otherwise they stay with the main thread, and the
                caller sets the events.
        """
        self.first = asyncio.Event()
        self.second = asyncio.Event()
        self.on_reload = on_reload
        if not handled:
            return
        loop = asyncio.get_running_loop()
        for number in (signal.SIGTERM, signal.SIGINT):
            loop.add_signal_handler(number, self._arrived)
        loop.add_signal_handler(signal.SIGHUP, self._reload)
        for number in (signal.SIGUSR1, signal.SIGUSR2):
            loop.add_signal_handler(number, lambda: None)

    def _reload(self) -> None:
        self.on_reload()

    def _arrived(self) -> None:
        (self.second if self.first.is_set() else self.first).set()


async def until_signal(signals: Signals, work: Coroutine[Any, Any, None]) -> None:
    """Run a coroutine until it ends, or cancel it at the first signal."""
    task = asyncio.create_task(work)
    stop = asyncio.create_task(signals.first.wait())
    await asyncio.wait({task, stop}, return_when=asyncio.FIRST_COMPLETED)
    stop.cancel()
    if not task.done():
        task.cancel()
    with suppress(asyncio.CancelledError):
        await task


async def _stop_until_second(where: Listening, signals: Signals) -> None:
    """Drain the node and close its listener, unless a second signal arrives."""
    stopping = asyncio.create_task(drain_and_close(where))
    hurry = asyncio.create_task(signals.second.wait())
    await asyncio.wait({stopping, hurry}, return_when=asyncio.FIRST_COMPLETED)
    for task in (stopping, hurry):
        task.cancel()
    await asyncio.gather(stopping, hurry, return_exceptions=True)


async def drain_and_close(where: Listening) -> None:
    """Drain a node, close its listener, and respond to the requests that clients have sent."""
    await drain(where.node, where.node.config.drain_timeout_s)
    where.node.live.close()  # these streams would not end otherwise
    await where.stop_accepting()


async def _wait_for_streams(node: Node) -> None:
    """Wait until the streams of stopped workers have sent their last event."""
    with suppress(TimeoutError):
        await asyncio.wait_for(node.lifecycle.in_flight.drained(), CLOSE_S)


def _url(config: ServeConfig, port: int) -> str:
    host = _REACHABLE.get(config.host, config.host)
    shown = f"[{host}]" if ":" in host else host
    return f"{config.scheme}://{shown}:{port}"
