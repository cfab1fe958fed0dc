"""The messages between launcher and actor."""

from __future__ import annotations

from dataclasses import dataclass

from draftgate.gateway.processes.messages import Notice


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
