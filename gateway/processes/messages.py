"""The messages between a child process and its parent, as lines of JSON."""

from __future__ import annotations

import msgspec

from draftgate.gateway.config import ServeConfig


class Order(msgspec.Struct, frozen=True, kw_only=True, repr_omit_defaults=True):
    """The configuration of a child.

    The order passes through a pipe, because other users of the machine can see command lines, and
    Ray's state shows the environments of actors.

    Attributes:
        secret: the value of `config.peer_secret_env`, or what the processes of a node share without
            one, or None if the child has the variable.
        listener: file descriptor of the listening socket, or None to open one.
        others: file descriptors of the listeners of the other processes that share the port.
        restarted: whether an earlier process with this order has served. Its successor accepts
            connections only when it is ready.
        parent: path of the socket with the parent's stores, or None without such a parent.
        process: name of the process among those of its node.
    """

    config: ServeConfig
    secret: str | None = None
    listener: int | None = None
    others: tuple[int, ...] = ()
    restarted: bool = False
    parent: str | None = None
    process: str = ""

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
        banner: what a terminal shows once the child is ready.
    """

    url: str = ""
    joined: bool = False
    failure: str = ""
    banner: str = ""
