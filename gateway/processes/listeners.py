"""The listeners of the processes that share a port."""

from __future__ import annotations

import socket
import sys
from contextlib import ExitStack
from typing import Final

BACKLOG: Final = 1024


def open_listeners(host: str, port: int, count: int) -> tuple[list[socket.socket], ExitStack]:
    """Return a listener for each process, and the stack that closes them.

    On Linux, each listener has a backlog of its own, and the kernel spreads connections over the
    listeners. A process that dies loses only connections that it has accepted, because the parent
    keeps its listener open. Elsewhere, all processes accept from one listener.

    Args:
        port: the port, or 0 for a free port.

    Raises:
        OSError: the address cannot be used.
    """
    flags = socket.AI_PASSIVE
    family, kind, _, _, address = socket.getaddrinfo(host, port, 0, socket.SOCK_STREAM, 0, flags)[0]
    several = sys.platform == "linux"
    listeners: list[socket.socket] = []
    with ExitStack() as opening:
        # Without SO_REUSEPORT, the bind fails if another server shares the port on purpose.
        with socket.socket(family, kind) as probe:
            probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            probe.bind(address)
            address = probe.getsockname()  # all listeners have the same port if it was 0
        for _ in range(count if several else 1):
            listener = opening.enter_context(socket.socket(family, kind))
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            if several:
                listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEPORT, 1)
            listener.bind(address)
            listener.listen(BACKLOG)
            listener.setblocking(False)
            listeners.append(listener)
        return (listeners if several else listeners * count), opening.pop_all()
