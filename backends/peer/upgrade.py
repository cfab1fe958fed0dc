"""The beginning of a connection to a peer, which changes from HTTP to frames.

    GET PATH                 Authorization: proof that this node knows the secret (`proof`)
    Connection: Upgrade, Upgrade: tcp

    101                      Draftgate-Peer: answer to the proof

The connecting node sends the first frame only after it has accepted the answer.
"""

from __future__ import annotations

import asyncio
import time
from typing import Final, NamedTuple

import aiohttp
from yarl import URL

from draftgate.backends.connection_errors import public_reason
from draftgate.backends.errors import BackendFailed
from draftgate.backends.peer.proof import SharedSecret, is_answer

PROOF_HEADER: Final = "Draftgate-Peer"
"""Response header with the answer to the proof of the connecting node."""

UPGRADE: Final = "tcp"
"""Protocol in the `Upgrade` header. aiohttp hands over connections only to this protocol and to
`websocket`."""

CONNECT_S: Final = 5.0
"""Timeout of a connection and its first message, in seconds. A node with a slower event loop is
overloaded."""

_REFUSAL_STATUSES: Final = (401, 404)
"""Statuses of a node with another secret, and of a server that is not a node."""


class PeerRefused(BackendFailed):
    """The peer is not the expected peer, or refuses this node, so further attempts do not help."""


class Upgraded(NamedTuple):
    """A connection that no longer carries HTTP. Closing the response closes the transport."""

    response: aiohttp.ClientResponse
    transport: asyncio.Transport


async def upgraded(http: aiohttp.ClientSession, url: URL, secret: SharedSecret | None) -> Upgraded:
    """Connect to a peer's path, and change the connection from HTTP to frames.

    Raises:
        PeerRefused: the peer does not know the secret, or is not a node.
        BackendFailed: the peer cannot be reached, or cannot serve now.
    """
    proof = None if secret is None else secret.proof(url.path, time.time())
    headers = {"Connection": "Upgrade", "Upgrade": UPGRADE}
    if proof is not None:
        headers["Authorization"] = proof.header
    try:
        response = await http.get(url, headers=headers, allow_redirects=False)
    except (aiohttp.ClientError, OSError) as error:
        raise BackendFailed(public_reason(error)) from None
    connection, status = response.connection, response.status
    if status != 101 or connection is None or connection.transport is None:
        response.close()
        what = f"it responded with status {status}"
        if status in _REFUSAL_STATUSES:
            raise PeerRefused(f"{what}: it does not accept peers, or has another secret")
        raise BackendFailed(what)
    if not is_answer(proof, response.headers.get(PROOF_HEADER, "")):
        response.close()
        raise PeerRefused("it has another secret, or none")
    return Upgraded(response, connection.transport)
