"""A worker's process: `draftgate serve`, with an actor of Ray at the other end of its pipes.

It is a process of its own, not a part of the actor's: its event loop is disturbed by no thread of
Ray's, signals reach it as everywhere, and what breaks it leaves somebody to say so. Its order comes
as one line on stdin; what it has to tell goes out as lines on stdout. When stdin ends the actor is
gone and Ray has given cores and GPU to somebody else: it leaves the pool and stops at once, and its
streams go on elsewhere.
"""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import threading
import time
from typing import Final, TextIO

import msgspec
import uvloop

from draftgate.gateway.app import Listening, NodeFailed, StartError, serve
from draftgate.gateway.cli.loading import loading_shown, stderr
from draftgate.gateway.cluster.access import peer_access
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.launch.words import Notice, Order
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.logs import configure

FAILED: Final = 1

LOOK_S: Final = 1.0
"""Between two looks at the pool: as often as workers report."""

HURRY_S: Final = 10.0
"""How long an orphan may take to stop before it is cut off: its GPU may be another's by now.
Without streams to wait for that is the time of a few connections. (Chosen, not tuned.)"""

AGAIN_S: Final = 0.2


def main() -> None:
    """Serve what stdin says until SIGTERM, or until stdin ends."""
    told = _Telling()
    try:
        with open(0, "rb", buffering=0, closefd=False) as stdin:
            order = Order.decoded(stdin.readline())
        threading.Thread(target=_end_with_actor, name="end with the actor", daemon=True).start()
        _run(order, told)
    except (StartError, NodeFailed, ValueError, msgspec.DecodeError) as error:
        told.say(Notice(failure=str(error)))
        sys.stderr.write(f"draftgate: {error}\n")
        sys.exit(FAILED)


def _run(order: Order, told: _Telling) -> None:
    config = order.config
    if config.peer_secret_env is not None and order.secret is not None:
        os.environ[config.peer_secret_env] = order.secret
    _check_reachable(config)
    configure(config.log_level, config.log_format)
    with asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner:
        watching = set[asyncio.Task[None]]()

        def on_ready(where: Listening) -> None:
            watching.add(asyncio.create_task(_tell(where, told)))

        runner.run(serve(config, lambda fleet: loading_shown(fleet, config, stderr()), on_ready))


def _check_reachable(config: ServeConfig) -> None:
    """Return if other nodes may use this one's worker: else it would sit there for nobody.

    Raises:
        StartError: they may not.
    """
    keys = bool(config.api_keys or config.api_keys_file)
    if peer_access(config, keys=keys) is None:
        raise StartError("no other node could use this worker: give --peer-secret-env NAME")


async def _tell(where: Listening, told: _Telling) -> None:
    """Tell where the node is, and whether its pool knows it, whenever that changes."""
    joined = False
    while True:
        joined = await _is_joined(where.node, joined)
        told.say(Notice(where.url, joined))
        await asyncio.sleep(LOOK_S)


async def _is_joined(node: Node, before: bool) -> bool:
    """Return whether the pool has this node's worker in its present life.

    Args:
        before: what was so, and stays so where the store does not answer.
    """
    snapshot = await node.store.snapshot()
    if snapshot.degraded:
        return before
    there = {view.worker_id: view.report.epoch for view in snapshot.workers}
    return all(there.get(worker.worker_id) == worker.epoch for worker in node.fleet.own)


class _Telling:
    """Lines to the actor. What else prints to stdout goes to stderr from now on."""

    def __init__(self) -> None:
        self._out: TextIO = os.fdopen(os.dup(1), "w", buffering=1)
        os.dup2(2, 1)
        self._last: Notice | None = None

    def say(self, notice: Notice) -> None:
        """Tell something, unless it was the last thing told."""
        if notice == self._last:
            return
        self._last = notice
        try:
            self._out.write(msgspec.json.encode(notice).decode() + "\n")
        except OSError:  # nobody listens: stdin says so, too
            return


def _end_with_actor() -> None:
    """Wait for the end of stdin; then stop this process, by force if it takes long."""
    # Not sys.stdin: a thread that waits there holds a lock which the interpreter needs at its end.
    while os.read(0, 64):
        pass
    # The second one waits for no streams. Two that come together would count as one.
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(AGAIN_S)
    os.kill(os.getpid(), signal.SIGTERM)
    time.sleep(HURRY_S)
    os._exit(FAILED)


if __name__ == "__main__":
    main()
