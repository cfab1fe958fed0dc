"""Why an upstream did not answer, in words that anybody may read."""

from __future__ import annotations

import os

import aiohttp


def plain_reason(error: Exception) -> str:
    """Return what went wrong without saying where: strangers may ask for a node's health.

    aiohttp's own words quote addresses, names and parts of answers.
    """
    if isinstance(error, aiohttp.ClientConnectorDNSError):
        return "its name cannot be resolved"
    if isinstance(error, aiohttp.ClientConnectorCertificateError | aiohttp.ClientSSLError):
        return "TLS failed"
    if isinstance(error, TimeoutError):
        return "it did not answer in time"
    if isinstance(error, aiohttp.ServerDisconnectedError):
        return "it closed the connection"
    if isinstance(error, aiohttp.ClientPayloadError):
        return "the body is incomplete"
    if isinstance(error, aiohttp.ClientConnectionError) and not isinstance(error, OSError):
        return str(error) or "the connection broke"  # our own words: `HttpExchange.fail`
    if isinstance(error, OSError):
        return os.strerror(error.errno).lower() if error.errno else "it cannot be reached"
    return f"it answers what cannot be read ({type(error).__name__})"
