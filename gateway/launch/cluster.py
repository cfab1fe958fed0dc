"""Functions that start, find, query and end the actors of a pool in a Ray cluster."""

from __future__ import annotations

import logging
import os
import socket
import subprocess
import sys
import threading
import time
import warnings
from collections.abc import Awaitable, Mapping
from contextlib import suppress
from typing import Any, Final

import msgspec
import ray
from msgspec.structs import replace
from ray.exceptions import ActorUnavailableError, RayActorError

from draftgate.gateway.launch.messages import Resources, Restarting, WorkerGone, WorkerStatus
from draftgate.gateway.launch.plan import worker_number
from draftgate.gateway.processes.messages import Notice, Order

NAMESPACE: Final = "draftgate"
"""The Ray namespace of the actors' names."""

CALLS: Final = 4
"""Concurrent calls of an actor, for a status and for two calls that wait for the worker to stop."""

CONNECT_TIMEOUT_S: Final = 5.0
"""Timeout of a connection to the head of a Ray cluster, as in Ray's own first attempt."""


class NoCluster(Exception):
    """No Ray cluster was found.

    The message is one line.
    """


class NameTaken(Exception):
    """A worker with the same name already runs in the cluster.

    The message is one line.
    """


def connect(address: str) -> None:
    """Connect to the Ray cluster at an address, or on this machine with `auto`.

    Raises:
        NoCluster: no cluster was found.
    """
    try:
        _check_answers(address)
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise NoCluster(f"no Ray cluster at {address!r}: {reason}") from None


def _check_answers(address: str) -> None:
    """Check that a server listens at the address, because Ray itself would retry for minutes.

    Raises:
        OSError: the connection failed.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), CONNECT_TIMEOUT_S).close()


class Actor:
    """An actor, which Ray may not have placed yet."""

    def __init__(self, name: str, handle: Any) -> None:
        self.name = name
        self._handle = handle

    async def status(self) -> WorkerStatus:
        """Return the status of the actor, once Ray has placed it.

        Raises:
            Restarting, WorkerGone: the actor has exited.
        """
        status: WorkerStatus = await _await_call(self._handle.status.remote())
        return status

    async def stop(self) -> int:
        """Drain the worker and return its exit status.

        A second call stops the worker immediately.

        Raises:
            Restarting, WorkerGone: the actor has exited.
        """
        code: int = await _await_call(self._handle.stop.remote())
        return code

    def end(self) -> None:
        """End the actor without a restart.

        The method is idempotent.
        """
        ray.kill(self._handle, no_restart=True)


async def _await_call(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except ActorUnavailableError:
        raise Restarting from None
    except RayActorError as error:
        raise WorkerGone(_first_line(error)) from None


def start(orders: Mapping[str, Order], need: Resources) -> list[Actor]:
    """Create an actor for each worker, which Ray places as resources become available.

    Args:
        orders: the order of each worker, by its name.

    Raises:
        NameTaken: a worker of that name exists. No worker has been started.
    """
    actors: list[Actor] = []
    for name, order in orders.items():
        try:
            actors.append(_start_actor(name, order, need))
        except ValueError:
            for actor in actors:
                actor.end()
            raise NameTaken(f"the worker {name} already runs in this Ray cluster") from None
    return actors


def _start_actor(name: str, order: Order, need: Resources) -> Actor:
    options = ray.remote(WorkerActor).options(
        name=name,
        num_cpus=need.cpus,
        num_gpus=need.gpus,
        max_restarts=need.restarts,
        max_concurrency=CALLS,
        lifetime="detached" if need.detached else None,
        # Spread over many machines, so that the loss of a machine ends few workers.
        scheduling_strategy="SPREAD",
    )
    return Actor(name, options.remote(order.encoded()))


def find_actors(pool: str) -> dict[int, Actor]:
    """Return the actors of a pool by worker number, in increasing order."""
    names = {worker_number(pool, name): name for name in ray.util.list_named_actors()}
    numbers = sorted(number for number in names if number is not None)
    return {number: Actor(names[number], ray.get_actor(names[number])) for number in numbers}


def disconnect() -> None:
    """Disconnect from the cluster.

    Actors that are not detached exit.
    """
    ray.shutdown()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")


# --- The actor of a worker, which starts the worker's process and reports its status --------------
#
# Ray restarts actors, not processes. The actor therefore exits when its child has exited, and the
# child exits when the actor is gone. Each restart of a worker is a new process with a new epoch.


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
