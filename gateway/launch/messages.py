"""The messages between launcher, actor and child."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from draftgate.gateway.config import ServeConfig


class Restarting(Exception):
    """A worker has exited, and Ray is about to restart it."""


class WorkerGone(Exception):
    """A worker has exited permanently.

    The message has the reason that Ray reports.
    """


@dataclass(frozen=True, slots=True)
class Resources:
    """The resources that Ray reserves for each worker.

    Attributes:
        cpus: number of cores.
        gpus: 1, a fraction if several workers share a GPU, or 0.
        restarts: maximum number of restarts of a worker by Ray, or -1 without limit.
        detached: whether workers outlive the launcher.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    restarts: int = -1
    detached: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The configuration of a child.

    The order is an actor's argument and passes through a pipe, because Ray's state shows the
    command lines and environments of actors.

    Attributes:
        secret: the value of `config.peer_secret_env`, or None if the worker's machine has it.
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
            msgspec.DecodeError: the line is not an order, or has settings of another version.
        """
        return msgspec.json.decode(line, type=Order)


class Notice(msgspec.Struct, frozen=True):
    """The status that a child reports as one line.

    Attributes:
        url: the URL of the child, or an empty string while it loads.
        joined: whether the pool lists its worker.
        failure: the reason why the child exited, or an empty string.
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
        restarted: whether Ray has restarted the actor.
        notice: the last notice of the child.
    """

    host: str
    gpus: tuple[str, ...]
    pid: int
    restarted: bool
    notice: Notice
