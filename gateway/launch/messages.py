"""Messages between launcher, actor and child."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from draftgate.gateway.config import ServeConfig


class Restarting(Exception):
    """A worker has exited, and Ray is about to restart it."""


class WorkerGone(Exception):
    """A worker has exited for good; the message has the reason that Ray gives."""


@dataclass(frozen=True, slots=True)
class Need:
    """The resources that Ray reserves for each worker.

    Attributes:
        cpus: cores.
        gpus: 1, a fraction if several workers share one, or 0.
        restarts: how often Ray may restart a worker; -1 is unlimited.
        detached: whether workers outlive the launcher.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    restarts: int = -1
    detached: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The configuration of a child.

    It travels as an actor's argument and through a pipe, because command lines and environments of
    actors are visible in Ray's state.

    Attributes:
        secret: the value of `config.peer_secret_env`; None if the worker's machine has it.
    """

    config: ServeConfig
    secret: str | None = None

    def encoded(self) -> bytes:
        """Encode the order as one line."""
        return msgspec.json.encode(self)

    @staticmethod
    def decoded(line: bytes) -> Order:
        """Decode a line.

        Raises:
            msgspec.DecodeError: it is not an order, or has settings of another version.
        """
        return msgspec.json.decode(line, type=Order)


class Notice(msgspec.Struct, frozen=True):
    """The status that a child reports, one line each.

    Attributes:
        url: the URL that it listens on; "" while it loads.
        joined: whether the pool lists its worker.
        failure: why it exited; "" without a failure.
    """

    url: str = ""
    joined: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """The status that an actor returns.

    Attributes:
        host: address of its Ray node.
        gpus: the GPUs that Ray assigned.
        pid: process id of the child.
        again: whether Ray has restarted the actor.
    """

    host: str
    gpus: tuple[str, ...]
    pid: int
    again: bool
    notice: Notice
