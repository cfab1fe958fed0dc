"""Public descriptions of failed connections, for example in `/health`."""

from __future__ import annotations

import os
import socket
import ssl

import aiohttp


class ConnectionFailed(ConnectionError):
    """A connection that a server has closed, or whose bytes cannot be read.

    The message is public.

    Attributes:
        has_begun: whether a part of the head of a response has arrived.
    """

    has_begun = False


def public_reason(error: Exception) -> str:
    """Return the cause of a failed connection, without addresses and parts of responses.

    The messages of aiohttp contain both.
    """
    if isinstance(error, ConnectionFailed):
        return str(error)
    if isinstance(error, aiohttp.ClientConnectorDNSError | socket.gaierror):
        return "its name cannot be resolved"
    if isinstance(error, aiohttp.ClientSSLError | ssl.SSLError):
        return "TLS failed"
    if isinstance(error, TimeoutError):
        return "it did not respond in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the body is incomplete"
    if isinstance(error, aiohttp.ClientConnectionError) and not isinstance(error, OSError):
        return str(error) or "the connection broke"  # a message of `HttpExchange.fail`
    if isinstance(error, OSError):
        return os.strerror(error.errno).lower() if error.errno else "it cannot be reached"
    return f"its response cannot be read ({type(error).__name__})"
