"""The actors of a pool in a Ray cluster: start them, find them, ask them, end them."""

from __future__ import annotations

import logging
import socket
from collections.abc import Awaitable, Mapping
from typing import Any, Final

import ray
from ray.exceptions import ActorUnavailableError, RayActorError

from draftgate.gateway.launch.actor import WorkerActor
from draftgate.gateway.launch.plan import number_in
from draftgate.gateway.launch.words import Need, Order, Restarting, WorkerGone, WorkerStatus

NAMESPACE: Final = "draftgate"
"""Of Ray: names of actors mean something within it."""

CALLS: Final = 4
"""Calls of an actor side by side: a status while two are waiting for the worker to stop."""

ANSWER_S: Final = 5.0
"""How long the head of a cluster may take to accept a connection, as Ray's own first try."""


class NoCluster(Exception):
    """There is no Ray cluster to launch in; the message is one line."""


class NameTaken(Exception):
    """A worker of that name runs in this cluster already; the message is one line."""


def connect(address: str) -> None:
    """Become a driver of the Ray cluster at an address; `auto` finds this machine's.

    Raises:
        NoCluster: there is none.
    """
    try:
        _check_answers(address)
        ray.init(address=address, namespace=NAMESPACE, logging_level=logging.WARNING)
    except (OSError, RuntimeError, ValueError) as error:
        reason = " ".join(str(error).split())
        raise NoCluster(f"no Ray cluster at {address!r}: {reason}") from None


def _check_answers(address: str) -> None:
    """Return unless nobody listens there: Ray itself would go on trying for minutes.

    Raises:
        OSError: nobody does.
    """
    host, _, port = address.rpartition(":")
    if host and port.isdecimal():
        socket.create_connection((host.strip("[]"), int(port)), ANSWER_S).close()


class Actor:
    """One actor, which may not have been placed yet."""

    def __init__(self, name: str, handle: Any) -> None:
        """Take Ray's handle of it."""
        self.name = name
        self._handle = handle

    async def status(self) -> WorkerStatus:
        """Return what it says, once it has been placed.

        Raises:
            Restarting, WorkerGone: it has ended.
        """
        status: WorkerStatus = await _answer(self._handle.status.remote())
        return status

    async def stop(self) -> int:
        """Drain its worker, or hurry it the second time; return the exit status of its process.

        Raises:
            Restarting, WorkerGone: there is none.
        """
        code: int = await _answer(self._handle.stop.remote())
        return code

    def end(self) -> None:
        """End it for good, whatever it does. Idempotent."""
        ray.kill(self._handle, no_restart=True)


async def _answer(call: Awaitable[Any]) -> Any:
    try:
        return await call
    except ActorUnavailableError:
        raise Restarting from None
    except RayActorError as error:
        raise WorkerGone(_first_line(error)) from None


def start(orders: Mapping[str, Order], need: Need) -> list[Actor]:
    """Ask Ray for actors with a worker each; they are placed as soon as there is room.

    Args:
        orders: what each is to serve, by its name.

    Raises:
        NameTaken: there is one of that name; none has been started then.
    """
    actors: list[Actor] = []
    for name, order in orders.items():
        try:
            actors.append(_start(name, order, need))
        except ValueError:
            for actor in actors:
                actor.end()
            raise NameTaken(f"the worker {name} runs in this Ray cluster already") from None
    return actors


def _start(name: str, order: Order, need: Need) -> Actor:
    options = ray.remote(WorkerActor).options(
        name=name,
        num_cpus=need.cpus,
        num_gpus=need.gpus,
        max_restarts=need.restarts,
        max_concurrency=CALLS,
        lifetime="detached" if need.detached else None,
        # As many machines as there are: the end of one is the end of few workers.
        scheduling_strategy="SPREAD",
    )
    return Actor(name, options.remote(order.encoded()))


def found(pool: str) -> dict[int, Actor]:
    """Return the actors of a pool's workers by their numbers, which rise."""
    names = {number_in(pool, name): name for name in ray.util.list_named_actors()}
    numbers = sorted(number for number in names if number is not None)
    return {number: Actor(names[number], ray.get_actor(names[number])) for number in numbers}


def disconnect() -> None:
    """Leave the cluster. Actors that are not detached end with this."""
    ray.shutdown()


def _first_line(error: Exception) -> str:
    return next((line.strip() for line in str(error).splitlines() if line.strip()), "")
