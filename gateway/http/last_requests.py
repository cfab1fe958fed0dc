"""The end of a listener, after which every request that clients have sent gets a response.

The kernel resets connections that have not been accepted when their listener closes. It also resets
connections whose handshake is incomplete, and those that close with unread bytes. The last phase of
a node therefore has three steps:

1. The kernel ignores new clients, while the node still accepts all earlier ones.
2. The listener closes after a round trip. Clients that were ignored try again and are refused.
3. Idle connections close. All others close after the response to their request.
"""

from __future__ import annotations

import asyncio
import ctypes
import os
import socket
import ssl
import struct
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from typing import Final

from aiohttp import web

from draftgate.gateway.http.connections import Connection

ROUND_TRIP_S: Final = 0.5
"""Time for handshakes and requests that are on their way, in seconds. The time exceeds the round
trip between distant continents of 0.3 s. (Chosen, not tuned.)"""

LAST_RESPONSES_S: Final = 2.0
"""Maximum time for the last responses, in seconds. Requests for tokens are refused at once, so only
slow bodies and slow readers take longer. (Chosen, not tuned.)"""

_CHECK_S: Final = 0.01
"""Interval of the checks whether connections still need a response."""

_SO_ATTACH_FILTER: Final = 26
_SO_DETACH_FILTER: Final = 27
"""From Linux's `asm-generic/socket.h`. Python's `socket` does not define them."""

_FILTER: Final = b"".join(
    struct.pack("=HBBI", *instruction)
    for instruction in (
        (0x30, 0, 0, 13),  # load the flags of the TCP header
        (0x54, 0, 0, 0x12),  # keep SYN and ACK
        (0x15, 0, 1, 0x02),  # if SYN alone is set:
        (0x06, 0, 0, 0),  # drop the packet
        (0x06, 0, 0, 0xFFFFFFFF),  # otherwise, accept the packet
    )
)
"""A program for the kernel's packet filter, which drops the first packet of a new connection."""


async def answer_last_requests(
    handlers: web.Server,
    server: asyncio.Server,
    connect: Callable[[], Connection],
    tls: ssl.SSLContext | None,
) -> None:
    """Close the listener of a draining node, and answer the requests that clients have sent.

    Args:
        handlers: the connections.
        server: the listener, which has stopped accepting when this function begins to wait.
        connect: creates the protocol of a connection.
        tls: the TLS of connections, or None.
    """
    loop = asyncio.get_running_loop()
    accepted: list[asyncio.Task[object]] = []

    def serve(client: socket.socket) -> None:
        limit_s = None if tls is None else LAST_RESPONSES_S
        serving = loop.connect_accepted_socket(
            connect, client, ssl=tls, ssl_handshake_timeout=limit_s
        )
        accepted.append(loop.create_task(serving))

    with ExitStack() as accepting:
        for listener in server.sockets:
            accepting.enter_context(_accepting_earlier_clients(listener.fileno(), serve))
            loop.remove_reader(listener)
        # asyncio begins to serve a client in the iteration after it has accepted it, and forgets
        # clients, without closing their connections, if the server is closed in between.
        await asyncio.sleep(0)
        server.close()
        await asyncio.sleep(ROUND_TRIP_S)
    with suppress(TimeoutError):
        async with asyncio.timeout(LAST_RESPONSES_S):
            await asyncio.gather(*accepted, return_exceptions=True)
            while _needing_response(handlers):  # noqa: ASYNC110 - connections set no event
                await asyncio.sleep(_CHECK_S)


@contextmanager
def _accepting_earlier_clients(
    listener: int, serve: Callable[[socket.socket], None]
) -> Iterator[None]:
    """Accept clients that began to connect before this block, and then close the listener.

    A duplicate of the listener keeps the backlog when the server closes its own.

    Args:
        listener: file descriptor of the listening socket.
        serve: serves an accepted socket.
    """
    loop = asyncio.get_running_loop()
    with socket.socket(fileno=os.dup(listener)) as own:

        def accept_all() -> None:
            with suppress(OSError):  # the backlog is empty
                while True:
                    client, _ = own.accept()
                    client.setblocking(False)
                    serve(client)

        _ignore_new_clients(own)
        loop.add_reader(own, accept_all)
        try:
            yield
        finally:
            loop.remove_reader(own)
            accept_all()


def accept_new_clients(listener: int) -> None:
    """Let a listener that outlives its process accept new clients again, if they were ignored.

    Args:
        listener: file descriptor of the listening socket.
    """
    if sys.platform != "linux":
        return
    with socket.socket(fileno=os.dup(listener)) as own, suppress(OSError):  # nothing to detach
        own.setsockopt(socket.SOL_SOCKET, _SO_DETACH_FILTER, 0)


def _ignore_new_clients(listener: socket.socket) -> None:
    """Drop the first packet of new clients, so that no handshake begins before the close.

    Systems without this filter reset clients whose handshake is incomplete at the close.
    """
    if sys.platform != "linux":
        return
    program = ctypes.create_string_buffer(_FILTER)
    instructions = len(_FILTER) // struct.calcsize("=HBBI")
    described = struct.pack("HP", instructions, ctypes.addressof(program))
    with suppress(OSError):  # a sandbox may forbid filters
        listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)


def _needing_response(handlers: web.Server) -> list[Connection]:
    """Close idle connections, and return the others."""
    connections = [one for one in handlers.connections if isinstance(one, Connection)]
    return [one for one in connections if not one.close_if_idle()]
