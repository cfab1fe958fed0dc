"""What launcher, actor and child say to each other. No Ray, no I/O."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec

from draftgate.gateway.config import ServeConfig


class Restarting(Exception):
    """A worker has ended, and Ray is about to start it again."""


class WorkerGone(Exception):
    """A worker has ended for good; the message says why, as far as Ray tells."""


@dataclass(frozen=True, slots=True)
class Need:
    """What Ray is asked for, for each worker.

    Attributes:
        cpus: cores.
        gpus: 1, a share of one that several workers have, or 0.
        restarts: how often Ray may start a worker anew; -1 is for ever.
        detached: whether workers outlive the launcher.
    """

    cpus: float = 1.0
    gpus: float = 0.0
    restarts: int = -1
    detached: bool = False


class Order(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """What a child is to serve.

    Travels encoded, as an actor's argument and through a pipe: neither shows in a list of
    processes or in Ray's state, where environments of actors and command lines do.

    Attributes:
        secret: the value of `config.peer_secret_env`; None where the machine itself has it.
    """

    config: ServeConfig
    secret: str | None = None

    def encoded(self) -> bytes:
        """Return it as one line."""
        return msgspec.json.encode(self)

    @staticmethod
    def decoded(line: bytes) -> Order:
        """Return what a line stands for.

        Raises:
            msgspec.DecodeError: it is none of ours, or of another version's settings.
        """
        return msgspec.json.decode(line, type=Order)


class Notice(msgspec.Struct, frozen=True):
    """What a child tells of itself, one line each; the last one holds.

    Attributes:
        url: where it listens; "" while it loads.
        joined: whether the pool knows its worker, so that gateways find it.
        failure: why it ended; "" if nothing is wrong.
    """

    url: str = ""
    joined: bool = False
    failure: str = ""


@dataclass(frozen=True, slots=True)
class WorkerStatus:
    """What an actor says when it is asked.

    Attributes:
        host: address of its Ray node.
        gpus: the GPUs that Ray gave it.
        pid: of the child.
        again: whether Ray has restarted it.
    """

    host: str
    gpus: tuple[str, ...]
    pid: int
    again: bool
    notice: Notice
