"""The actor of a worker: it starts the worker's process, says how that is, and ends with it.

What Ray restarts is the actor. So it dies when its child has died, the child ends when the actor
has, and every life of a worker is a new process with a new epoch.
"""

from __future__ import annotations

import os
import subprocess
import sys
import threading
import time
import warnings
from contextlib import suppress
from typing import Any, Final

import msgspec
import ray
from msgspec.structs import replace

from draftgate.gateway.launch.words import Notice, Order, WorkerStatus

PAUSE_S: Final = 5.0
"""Before a worker is given back to Ray that did not even load: Ray restarts at once, for ever.
(Chosen: some seconds are nothing beside loading, and keep a machine cool.)"""

DIED: Final = 1


class WorkerActor:
    """Has one worker's process as its child. Ray calls its methods in threads."""

    def __init__(self, order: bytes) -> None:
        """Start the child at this Ray node's address; it loads while this returns."""
        given = Order.decoded(order)
        context = ray.get_runtime_context()
        self._host = str(ray.util.get_node_ip_address())
        self._gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        self._again = _was_restarted(context)
        self._notice = Notice()
        self._was_ready = self._stopping = False
        here = replace(given, config=replace(given.config, host=self._host))
        self._child = _start(here, self._gpus)
        self._watch = threading.Thread(target=self._until_end, name="watch", daemon=True)
        self._watch.start()

    def status(self) -> WorkerStatus:
        """Say how the worker is."""
        return WorkerStatus(self._host, self._gpus, self._child.pid, self._again, self._notice)

    def stop(self) -> int:
        """Drain the worker and end its process; return its exit status.

        Called again while the first call waits, it stops at once.
        """
        self._stopping = True
        self._child.terminate()
        self._watch.join()
        return self._child.wait()

    def _until_end(self) -> None:
        """Listen to the child; die with it, unless that was asked for, or it never could start."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._notice = msgspec.json.decode(line, type=Notice)
            self._was_ready = self._was_ready or bool(self._notice.url)
        status = self._child.wait()
        if self._stopping:
            return
        if not self._was_ready and not self._again:
            # Something is wrong with the order: the launcher hears of it, and Ray does not retry.
            reason = self._notice.failure or f"exit status {status}"
            self._notice = Notice(failure=reason)
            return
        sys.stderr.write(f"draftgate: a worker has ended with status {status}: Ray restarts it\n")
        sys.stderr.flush()
        if not self._was_ready:
            time.sleep(PAUSE_S)
        os._exit(DIED)


def _was_restarted(context: Any) -> bool:
    with warnings.catch_warnings():  # Ray's property asks another one, which is deprecated
        warnings.simplefilter("ignore")
        return bool(context.was_current_actor_reconstructed)


def _start(order: Order, gpus: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start a child; it has its order when this returns."""
    environment = dict(os.environ)
    if not gpus:  # Ray leaves the variable alone then, and the child would see all of them
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # A session of its own: signals to the group of Ray's processes are not meant for it.
    child = subprocess.Popen(
        [sys.executable, "-m", "draftgate.gateway.launch.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # it has ended already, as whoever watches it will see
        child.stdin.write(order.encoded() + b"\n")
        child.stdin.flush()
    return child
