"""Tests of listeners that share a port."""

from __future__ import annotations

import errno
import socket
import sys

import pytest

from draftgate.gateway.processes.parent import open_listeners


def test_all_listeners_have_the_same_free_port() -> None:
    """Port 0 selects one free port for all processes."""
    listeners, opened = open_listeners("127.0.0.1", 0, 3)
    with opened:
        assert len({listener.getsockname() for listener in listeners}) == 1
        assert len(listeners) == 3


@pytest.mark.skipif(sys.platform != "linux", reason="only Linux spreads connections")
def test_the_kernel_spreads_connections_over_the_listeners() -> None:
    """Each of two listeners gets some of 64 connections."""
    listeners, opened = open_listeners("127.0.0.1", 0, 2)
    with opened:
        clients = [socket.create_connection(listeners[0].getsockname()) for _ in range(64)]
        counts = [_accepted(listener) for listener in listeners]
        assert sum(counts) == 64
        assert min(counts) > 0
        for client in clients:
            client.close()


def test_a_port_in_use_is_refused() -> None:
    """A second node cannot share the port of the first node by accident."""
    listeners, opened = open_listeners("127.0.0.1", 0, 2)
    with opened:
        port = listeners[0].getsockname()[1]
        with pytest.raises(OSError) as refused:  # noqa: PT011 - the number is checked
            open_listeners("127.0.0.1", port, 2)
        assert refused.value.errno == errno.EADDRINUSE


def _accepted(listener: socket.socket) -> int:
    """Accept the connections in the backlog and return their number."""
    count = 0
    while True:
        try:
            listener.accept()[0].close()
        except BlockingIOError:
            return count
        count += 1
