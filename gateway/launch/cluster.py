"""Functions that start, find, query and end the actors of a pool in a Ray cluster."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Mapping
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from draftgate.gateway.launch.actor import WorkerActor
from draftgate.gateway.launch.messages import Resources, Restarting, WorkerGone, WorkerStatus
from draftgate.gateway.launch.plan import worker_number
from draftgate.gateway.processes.messages import Order

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
            actors.append(_start(name, order, need))
        except ValueError:
            for actor in actors:
                actor.end()
            raise NameTaken(f"the worker {name} already runs in this Ray cluster") from None
    return actors


def _start(name: str, order: Order, need: Resources) -> Actor:
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
