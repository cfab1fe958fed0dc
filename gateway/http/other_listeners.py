"""Connections that wait at the listeners of other processes of the same node.

With `--processes`, each process has a listener of its own, and the kernel assigns each connection
to one of them. If a process has died or does not run, its connections would wait until it has
started again. The other processes therefore look several times a second whether connections wait.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import AsyncIterator, Callable, Sequence
from contextlib import asynccontextmanager, suppress
from typing import Final

from draftgate.gateway.http.connections import Connection

_CHECK_S: Final = 0.25
"""Interval of the checks, in seconds. A running process accepts its own connections within
milliseconds, so a check takes only a system call for each listener. (Chosen, not tuned.)"""


@asynccontextmanager
async def accepting_for_others(
    listeners: Sequence[socket.socket],
    connect: Callable[[], Connection],
    tls: ssl.SSLContext | None,
) -> AsyncIterator[None]:
    """Accept connections that wait at listeners of other processes until the block ends.

    The listeners of this process are closed at the end, so that another process can refuse clients
    by closing its own.

    Args:
        connect: creates the protocol of a connection.
        tls: the TLS of connections, or None.
    """
    task = asyncio.create_task(_accept_forever(listeners, connect, tls))
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})
        for listener in listeners:
            listener.close()


async def _accept_forever(
    listeners: Sequence[socket.socket],
    connect: Callable[[], Connection],
    tls: ssl.SSLContext | None,
) -> None:
    loop = asyncio.get_running_loop()
    serving = set[asyncio.Task[object]]()
    while listeners:
        await asyncio.sleep(_CHECK_S)
        for listener in listeners:
            for client in _waiting(listener):
                task = loop.create_task(_serve(client, connect, tls))
                serving.add(task)
                task.add_done_callback(serving.discard)


async def _serve(
    client: socket.socket, connect: Callable[[], Connection], tls: ssl.SSLContext | None
) -> None:
    """Begin to serve a connection. A client whose handshake fails is ignored, as by a listener."""
    with suppress(OSError, TimeoutError):
        await asyncio.get_running_loop().connect_accepted_socket(connect, client, ssl=tls)


def _waiting(listener: socket.socket) -> list[socket.socket]:
    """Return the connections that wait at a listener."""
    found: list[socket.socket] = []
    with suppress(OSError):  # no further connection waits
        while True:
            client, _ = listener.accept()
            client.setblocking(False)
            found.append(client)
    return found
