"""Tests that accepted sockets send small events without the delay of Nagle's algorithm."""

from __future__ import annotations

import asyncio
import os
import socket
import sys
from pathlib import Path

import pytest
import uvloop

from tests.gateway.harness import post_raw, running

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="reads sockets from /proc")


def _accepted(peer: tuple[str, int]) -> socket.socket:
    """Return this process's end of the connection from `peer`."""
    for entry in Path("/proc/self/fd").iterdir():
        try:
            found = socket.socket(fileno=os.dup(int(entry.name)))
        except OSError:  # the file is no socket or is closed
            continue
        if found.family == socket.AF_INET and _peer(found) == peer:
            return found
        found.close()
    raise AssertionError(f"found no accepted connection from {peer}")


def _peer(found: socket.socket) -> tuple[str, int] | None:
    try:
        return found.getpeername()
    except OSError:  # a listening socket has no peer
        return None


async def _nagle_is_off() -> None:
    async with running() as gateway:
        body = {"prompt": "a", "max_tokens": 2, "stream": True}
        reader, writer = await post_raw(gateway, "/v1/completions", body)
        await reader.readuntil(b"data: ")
        with _accepted(writer.get_extra_info("sockname")) as accepted:
            assert accepted.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY)
        writer.close()
        await writer.wait_closed()


@pytest.mark.parametrize("new_loop", [asyncio.new_event_loop, uvloop.new_event_loop])
def test_tcp_nodelay_is_set_while_a_stream_runs(new_loop) -> None:
    """The server sets TCP_NODELAY on accepted sockets under asyncio and uvloop."""
    with asyncio.Runner(loop_factory=new_loop) as runner:
        runner.run(_nagle_is_off())
