"""The actor of a worker, which starts the worker's process and reports its status.

Ray restarts actors, not processes. The actor therefore exits when its child has exited, and the
child exits when the actor is gone. Each restart of a worker is a new process with a new epoch.
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

from draftgate.gateway.launch.messages import WorkerStatus
from draftgate.gateway.processes.messages import Notice, Order

_PAUSE_S: Final = 5.0
"""Pause before the restart of a worker that failed to load, in seconds. Ray would restart it
immediately and without limit. (Chosen: short compared with loading.)"""

DIED: Final = 1


class WorkerActor:
    """An actor that runs one worker's process as its child.

    Ray calls its methods in threads.
    """

    def __init__(self, order: bytes) -> None:
        given = Order.decoded(order)
        context = ray.get_runtime_context()
        self._host = str(ray.util.get_node_ip_address())
        self._gpus = tuple(map(str, context.get_accelerator_ids().get("GPU", ())))
        self._restarted = _was_restarted(context)
        self._notice = Notice()
        self._was_ready = self._stopping = False
        local = replace(given, config=replace(given.config, host=self._host))
        self._child = _start(local, self._gpus)
        self._watch = threading.Thread(target=self._until_end, name="watch", daemon=True)
        self._watch.start()

    def status(self) -> WorkerStatus:
        """Return the status of the worker."""
        return WorkerStatus(self._host, self._gpus, self._child.pid, self._restarted, self._notice)

    def stop(self) -> int:
        """Drain the worker, end its process, and return its exit status.

        A second call during the first call stops the worker without draining.
        """
        self._stopping = True
        self._child.terminate()
        self._watch.join()
        return self._child.wait()

    def _until_end(self) -> None:
        """Read the child's notices until it ends, and then let Ray restart the worker."""
        assert self._child.stdout is not None
        for line in self._child.stdout:
            self._notice = msgspec.json.decode(line, type=Notice)
            self._was_ready = self._was_ready or bool(self._notice.url)
        status = self._child.wait()
        if self._stopping:
            return
        if not self._was_ready and not self._restarted:
            # The order itself is wrong, so report the failure instead of letting Ray retry.
            reason = self._notice.failure or f"exit status {status}"
            self._notice = Notice(failure=reason)
            return
        sys.stderr.write(f"draftgate: a worker exited with status {status}; Ray restarts it\n")
        sys.stderr.flush()
        if not self._was_ready:
            time.sleep(_PAUSE_S)
        os._exit(DIED)


def _was_restarted(context: Any) -> bool:
    with warnings.catch_warnings():  # Ray's property uses a deprecated property
        warnings.simplefilter("ignore")
        return bool(context.was_current_actor_reconstructed)


def _start(order: Order, gpus: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start a child and send it its order."""
    environment = dict(os.environ)
    if not gpus:  # without GPUs Ray leaves the variable unset, so the child would see all GPUs
        environment["CUDA_VISIBLE_DEVICES"] = ""
    # A session of its own protects the child from signals to Ray's process group.
    child = subprocess.Popen(
        [sys.executable, "-m", "draftgate.gateway.processes.child"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        env=environment,
        start_new_session=True,
    )
    assert child.stdin is not None
    with suppress(BrokenPipeError):  # the child has exited, as the watching thread notices
        child.stdin.write(order.encoded() + b"\n")
        child.stdin.flush()
    return child
