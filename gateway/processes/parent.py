"""The parent of a node's processes, which starts, restarts and stops them."""

from __future__ import annotations

import asyncio
import logging
import secrets
import socket
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from signal import SIGHUP, SIGTERM
from signal import Signals as SignalNumber
from typing import Final, NamedTuple

import msgspec
from msgspec.structs import replace

from draftgate.gateway.app import Signals, StartError
from draftgate.gateway.cluster.snapshots import SharedSnapshots
from draftgate.gateway.config import ConfigError, ServeConfig
from draftgate.gateway.http.last_requests import accept_new_clients
from draftgate.gateway.logs import log
from draftgate.gateway.process import SECRET_ENV
from draftgate.gateway.processes.messages import Notice, Order
from draftgate.gateway.state.local.server import SharedStores, serving_stores
from draftgate.gateway.state.local.store import SCHEME
from draftgate.gateway.state.memory.responses import MemoryResponses
from draftgate.gateway.state.memory.store import MemoryStore

_PAUSE_S: Final = 1.0
"""Pause before a process that died starts again, in seconds. A process that dies at once would
otherwise keep a core busy. (Chosen, not tuned, 2026-11-23.)"""

_LONGEST_NOTICE_BYTES: Final = 1 << 20


class ChildProcess:
    """A process of the node, which starts again when it dies.

    Attributes:
        notice: the last notice of the process.
    """

    def __init__(self, order: Order, changed: Callable[[], None]) -> None:
        """Prepare a process.

        Args:
            changed: a callback for each notice.
        """
        self.notice = Notice()
        self._order = order
        self._changed = changed
        self._process: asyncio.subprocess.Process | None = None
        self._was_ready = False
        self._stopping = asyncio.Event()

    async def run(self) -> None:
        """Keep the process running until `stop`.

        Raises:
            StartError: the process has never been ready, so its settings are wrong.
        """
        while not self._stopping.is_set():
            status = await self._run_once()
            if self._stopping.is_set():
                return
            if not self._was_ready:
                raise StartError(self.notice.failure or f"a process exited with status {status}")
            log(logging.ERROR, "a process exited", process=self._order.process, status=status)
            if self._order.listener is not None:
                accept_new_clients(self._order.listener)
            self._order = replace(self._order, restarted=True)
            with suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), _PAUSE_S)

    def stop(self) -> None:
        """Drain the process. A second call stops it immediately."""
        self._stopping.set()
        self._send(SIGTERM)

    def reload(self) -> None:
        """Let the process read its API keys and certificates again.

        A process that is not ready has just read them, and could not handle the signal yet.
        """
        if self.notice.url:
            self._send(SIGHUP)

    def _send(self, number: SignalNumber) -> None:
        if self._process is not None:
            with suppress(ProcessLookupError):
                self._process.send_signal(number)

    async def _run_once(self) -> int:
        """Run the process until it ends, and return its exit status.

        The process is killed if this call is cancelled.
        """
        self.notice = Notice()
        process = self._process = await self._start()
        try:
            await self._read_notices(process)
            return await process.wait()
        finally:
            if process.returncode is None:
                process.kill()

    async def _start(self) -> asyncio.subprocess.Process:
        listener, others = self._order.listener, self._order.others
        # A session of its own protects the child from the Ctrl-C of a terminal.
        return await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            "draftgate.gateway.processes.child",
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            limit=_LONGEST_NOTICE_BYTES,
            pass_fds=() if listener is None else (listener, *others),
            start_new_session=True,
        )

    async def _read_notices(self, process: asyncio.subprocess.Process) -> None:
        """Send the order to a process, and read its notices until it ends."""
        assert process.stdin is not None
        assert process.stdout is not None
        with suppress(BrokenPipeError, ConnectionResetError):  # the process has ended
            process.stdin.write(self._order.encoded() + b"\n")
            await process.stdin.drain()
        async for line in process.stdout:
            self.notice = msgspec.json.decode(line, type=Notice)
            self._was_ready = self._was_ready or bool(self.notice.url)
            self._changed()


class _NodeProcesses:
    """All processes of a node."""

    def __init__(
        self,
        plan: ProcessPlan,
        listeners: Sequence[socket.socket],
        path: Path,
        on_ready: Callable[[Notice], None],
    ) -> None:
        secret = secrets.token_hex(32)
        orders = [
            Order(
                config=front,
                secret=_secret_for(front, secret),
                listener=listener.fileno(),
                others=tuple(other.fileno() for other in set(listeners) - {listener}),
                parent=str(path),
                process=f"front {number}",
            )
            for number, (front, listener) in enumerate(zip(plan.fronts, listeners, strict=True))
        ]
        self.fronts = [ChildProcess(order, self._changed) for order in orders]
        self.workers: list[ChildProcess] = []
        if plan.worker is not None:
            order = Order(
                config=plan.worker,
                secret=_secret_for(plan.worker, secret),
                parent=str(path),
                process="worker",
            )
            self.workers = [ChildProcess(order, self._changed)]
        self._on_ready: Callable[[Notice], None] | None = on_ready

    async def run(self, signals: Signals, close_listeners: Callable[[], None]) -> None:
        """Run the processes until a signal arrives, and drain the fronts before the workers.

        Args:
            close_listeners: closes the parent's listeners, so that clients are refused at the end.

        Raises:
            StartError: a process cannot start.
        """
        async with asyncio.TaskGroup() as running:
            workers = [running.create_task(process.run()) for process in self.workers]
            fronts = [running.create_task(process.run()) for process in self.fronts]
            hurrying = running.create_task(self._hurry(signals))
            signals.on_reload = self._reload
            await signals.first.wait()
            close_listeners()
            await _stop(self.fronts, fronts)
            await _stop(self.workers, workers)
            hurrying.cancel()

    async def _hurry(self, signals: Signals) -> None:
        """Stop all processes immediately after the second signal."""
        await signals.second.wait()
        for process in (*self.fronts, *self.workers):
            process.stop()

    def _reload(self) -> None:
        """Let all processes read their API keys and certificates again."""
        for process in (*self.fronts, *self.workers):
            process.reload()

    def _changed(self) -> None:
        """Report once that all processes are ready."""
        notices = [process.notice for process in (*self.fronts, *self.workers)]
        if self._on_ready is not None and all(notice.url for notice in notices):
            on_ready, self._on_ready = self._on_ready, None
            on_ready(self.fronts[0].notice)


def _secret_for(config: ServeConfig, secret: str) -> str | None:
    """Return the secret of the processes, unless the pool has one, which children inherit."""
    return secret if config.peer_secret_env in {None, SECRET_ENV} else None


async def _stop(processes: Sequence[ChildProcess], running: Sequence[asyncio.Task[None]]) -> None:
    """Drain processes, and wait until they have ended."""
    for process in processes:
        process.stop()
    await asyncio.gather(*running)


async def serve_processes(config: ServeConfig, on_ready: Callable[[Notice], None]) -> None:
    """Serve with several processes until SIGTERM or SIGINT.

    Args:
        on_ready: a callback with the notice of a process, once all processes are ready.

    Raises:
        ValueError: the settings do not allow several processes.
        StartError: a process cannot start.
    """
    signals = Signals()
    with tempfile.TemporaryDirectory(prefix="draftgate-") as folder:
        path = Path(folder) / "stores"
        responses = MemoryResponses(config.response_store_bytes, config.response_store_ttl_s)
        stores = SharedStores(MemoryStore(), responses, SharedSnapshots())
        plan = plan_processes(config, path)
        try:
            listeners, opened = open_listeners(config.host, config.port, config.processes)
        except OSError as error:
            where = f"{config.host}:{config.port}"
            raise StartError(f"cannot listen on {where}: {error.strerror}") from error
        with opened:
            async with serving_stores(stores, path):
                node = _NodeProcesses(plan, listeners, path, on_ready)
                try:
                    await node.run(signals, opened.close)
                except* StartError as errors:
                    raise errors.exceptions[0] from None


# --- The listeners of the processes that share a port ---------------------------------------------


BACKLOG: Final = 1024


def open_listeners(host: str, port: int, count: int) -> tuple[list[socket.socket], ExitStack]:
    """Return a listener for each process, and the stack that closes them.

    On Linux, each listener has a backlog of its own, and the kernel spreads connections over the
    listeners. A process that dies loses only connections that it has accepted, because the parent
    keeps its listener open. Elsewhere, all processes accept from one listener.

    Args:
        port: the port, or 0 for a free port.

    Raises:
        OSError: the address cannot be used.
    """
    flags = socket.AI_PASSIVE
    family, kind, _, _, address = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, flags)[0]
    several = sys.platform == "linux"
    listeners: list[socket.socket] = []
    with ExitStack() as opening:
        # Without SO_REUSEPORT, the bind fails if another server shares the port on purpose.
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = probe.getsockname()  # all listeners have the same port if it was 0
        for _ in range(count if several else 1):
            listener = opening.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if several:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            listeners.append(listener)
        return (listeners if several else listeners * count), opening.pop_all()


# --- The settings of each process of a node, derived from the node's settings ---------------------


_LOOPBACK: Final = "127.0.0.1"


class ProcessPlan(NamedTuple):
    """The settings of the processes.

    Attributes:
        worker: the settings of the process with the workers, or None if they are elsewhere.
        fronts: the settings of each process that clients reach.
    """

    worker: ServeConfig | None
    fronts: tuple[ServeConfig, ...]


def plan_processes(config: ServeConfig, stores: Path) -> ProcessPlan:
    """Return the settings of the processes of a node.

    Args:
        stores: path of the socket of the shared stores.

    Raises:
        ConfigError: the settings do not allow several processes.
    """
    forwards = config.only_forwards
    if config.join is not None and not (config.no_worker or forwards):
        raise ConfigError(
            "--processes with --join needs --no-worker: start the workers of the pool separately"
        )
    single = replace(config, processes=1)
    if config.join is not None:
        return ProcessPlan(
            None, tuple(_front(single, number) for number in range(config.processes))
        )
    shared = replace(single, join=f"{SCHEME}{stores}", peer_secret_env=SECRET_ENV)
    fronts = tuple(_front(shared, number) for number in range(config.processes))
    if forwards:
        return ProcessPlan(None, fronts)
    worker = replace(
        shared,
        upstream=(),
        upstream_speculates=(),
        host=_LOOPBACK,
        port=0,
        advertise=None,
        tls_certfile=None,
        tls_keyfile=None,
        tls_client_ca_file=None,
    )
    return ProcessPlan(worker, tuple(replace(front, no_worker=True) for front in fronts))


def _front(config: ServeConfig, number: int) -> ServeConfig:
    """Return the settings of a front, which advertises an address of its own.

    No node connects to this address. It only distinguishes the upstreams of the fronts.
    """
    return replace(config, advertise=f"http://{config.host}:{config.port}/{number}")
