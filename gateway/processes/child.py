"""A child process, which is `draftgate serve` connected to its parent by pipes.

The parent is the process that `--processes` starts, or a Ray actor. No thread of an actor disturbs
the event loop of its child, and the parent survives to report a crash.

The process reads its order as one line from stdin and writes notices as lines to stdout. The end of
stdin means that the parent is gone, and in Ray that the cores and the GPU belong to others. The
process then leaves the pool and stops immediately, and its streams continue on other workers.
"""

from __future__ import annotations

import asyncio
import os
import signal
import socket
import sys
import threading
import time
from contextlib import AbstractAsyncContextManager, nullcontext
from functools import partial
from pathlib import Path
from typing import Final, TextIO

import msgspec
import uvloop

from draftgate.gateway.app import Inherited, Listening, NodeFailed, StartError, serve
from draftgate.gateway.banner import banner
from draftgate.gateway.cluster.access import peer_access
from draftgate.gateway.cluster.siblings import Siblings
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.loading import loading_shown
from draftgate.gateway.logs import configure, flush
from draftgate.gateway.node import Node
from draftgate.gateway.process import SECRET_ENV
from draftgate.gateway.processes.messages import Notice, Order
from draftgate.gateway.state.commands import ListWorkers

_FAILED: Final = 1

_CHECK_S: Final = 1.0
"""Interval of checking the pool, which equals the interval of the workers' reports."""

FORCE_EXIT_S: Final = 10.0
"""Time to stop after the parent is gone, in seconds, before the process exits by force.

The GPU may already belong to another process, and no streams are left. (Chosen, not tuned.)"""

SECOND_SIGNAL_S: Final = 0.2


def main() -> None:
    """Serve the order from stdin until SIGTERM, or until stdin ends."""
    notices = _NoticeWriter()
    try:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            order = Order.decoded(stdin.readline())
        threading.Thread(target=_end_with_parent, name="end with the parent", daemon=True).start()
        _run(order, notices)
    except (StartError, NodeFailed, ValueError, msgspec.DecodeError) as error:
        notices.write(Notice(failure=str(error)))
        flush()
        sys.stderr.write(f"draftgate: {error}\n")
        sys.exit(_FAILED)


def _run(order: Order, notices: _NoticeWriter) -> None:
    config = order.config
    if order.secret is not None:
        os.environ[config.peer_secret_env or SECRET_ENV] = order.secret
    if not config.no_worker and not config.only_forwards:
        _check_reachable(config)
    configure(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        watching = set[asyncio.Task[None]]()

        def on_ready(where: Listening) -> None:
            watching.add(asyncio.create_task(_report(where, notices)))

        runner.run(serve(config, partial(_loading, order), on_ready, _inherited(order)))


def _inherited(order: Order) -> Inherited | None:
    """Return the listeners that the parent has opened, or None without one."""
    if order.listener is None:
        return None
    others = tuple(socket.socket(fileno=number) for number in order.others)
    own = socket.socket(fileno=order.listener)
    return Inherited(own, accepts_early=not order.restarted, others=others)


def _set_siblings(node: Node, order: Order) -> None:
    """Let a node share what it shows with the other processes, if its parent has several."""
    if order.parent is not None:
        shown = node.metric_rows, node.live, node.decisions, node.requests, node.streams
        node.siblings = Siblings(Path(order.parent), order.process, *shown)


def _loading(order: Order, node: Node) -> AbstractAsyncContextManager[None]:
    """Show the progress of loading in the process with the workers.

    A front already responds while it loads, so it shows the whole node from the beginning.
    """
    _set_siblings(node, order)
    config = order.config
    return nullcontext() if config.no_worker else loading_shown(node, config)


def _check_reachable(config: ServeConfig) -> None:
    """Check that other nodes may use this worker.

    Raises:
        StartError: other nodes have no access.
    """
    keys = bool(config.api_keys or config.api_keys_file)
    if peer_access(config, keys=keys) is None:
        raise StartError("no other node may use this worker: set --peer-secret-env NAME")


async def _report(where: Listening, notices: _NoticeWriter) -> None:
    """Report the node's URL and its membership of the pool, whenever they change."""
    joined = False
    while True:
        joined = await _is_joined(where.node, joined)
        notices.write(Notice(where.url, joined, banner=banner(where)))
        if where.node.siblings is not None:
            await where.node.siblings.share()
        await asyncio.sleep(_CHECK_S)


async def _is_joined(node: Node, before: bool) -> bool:
    """Return whether the pool lists this node's worker in its current epoch.

    Args:
        before: the previous result, which is returned if the store does not respond.
    """
    snapshot = await node.store.call(ListWorkers())
    if snapshot.degraded:
        return before
    listed = {view.worker_id: view.report.epoch for view in snapshot.workers}
    return all(listed.get(worker.worker_id) == worker.epoch for _, worker in node.own_workers())


class _NoticeWriter:
    """A writer of notices to the parent, which redirects other output from stdout to stderr."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._last: Notice | None = None

    def write(self, notice: Notice) -> None:
        """Write a notice, unless it equals the last notice."""
        if notice == self._last:
            return
        self._last = notice
        try:
            self._out.write(msgspec.json.encode(notice).decode() + "\n")
        except OSError:  # the parent is gone, so stdin also ends
            return


def _end_with_parent() -> None:
    """Wait for the end of stdin, and then stop this process, if necessary by force."""
    # A thread that reads sys.stdin would hold a lock that the interpreter needs to exit.
    while os.read(0, 64):
        pass
    # The second signal skips draining. Two simultaneous signals would count as one.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(SECOND_SIGNAL_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(FORCE_EXIT_S)
    os._exit(_FAILED)


if __name__ == "__main__":
    main()
