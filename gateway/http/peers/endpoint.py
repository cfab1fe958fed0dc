"""`GET /peer/v1/workers/NUMBER`: the connections of other nodes, which nobody else finds.

To strangers there is no such path: they are answered as for any path that does not exist, after the
same question for an API key. These paths are no part of the OpenAPI document, which is for clients.
"""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import aiohttp
from aiohttp import web

from draftgate.backends.peer.backend import PeerBackend
from draftgate.backends.peer.channel import MOST_FRAME_BYTES, PREFIX, WORKER_PATH
from draftgate.gateway.errors import RouteNotFound
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.context import NODE
from draftgate.gateway.http.peers.session import PeerSession
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.logs import log

PROOF_ANSWER: Final = web.RequestKey("proof_answer", str)
"""The answer to a node's proof; only requests of nodes have one."""

SESSIONS: Final = web.AppKey("peer_sessions", set[web.WebSocketResponse])

PING_S: Final = 10.0
"""A node that says nothing for so long is asked whether it is there. If it is cut off without a
word, what it left running is ended after one and a half of this."""

GOODBYE_S: Final = 0.25
"""For the other side's goodbye, which one that hangs never says."""


def add_peer_routes(app: web.Application) -> None:
    """Let other nodes use the workers of this one, if any may."""
    if app[NODE].peer_access is None:
        return
    app[SESSIONS] = set()
    app.router.add_route("*", WORKER_PATH + "{number:[0-9]{1,3}}", _serve_peer)
    app.on_shutdown.append(_end_sessions)


def is_peer(request: web.Request) -> bool:
    """Return whether a request is of another node; it is asked once, as a proof counts once."""
    access = request.app[NODE].peer_access
    if access is None or not request.path.startswith(PREFIX):
        return False
    answer = access.admit(request.path, request.headers)
    if answer is None:
        log(logging.WARNING, "a peer was refused", remote=request.remote)
        return False
    request[PROOF_ANSWER] = answer
    return True


async def _serve_peer(request: web.Request) -> web.WebSocketResponse:
    """Serve a node for as long as its connection lasts.

    Raises:
        RouteNotFound: it did not prove that it is one, or there is no such worker here.
        Unavailable: this node takes no requests now.
    """
    node = request.app[NODE]
    if PROOF_ANSWER not in request:
        raise RouteNotFound(f"there is no {request.path}")
    node.lifecycle.require_ready()
    worker = _worker(node, int(request.match_info["number"]))
    if worker is None:
        raise RouteNotFound(f"there is no {request.path}")
    socket = web.WebSocketResponse(
        heartbeat=PING_S, timeout=GOODBYE_S, compress=False, max_msg_size=MOST_FRAME_BYTES
    )
    await socket.prepare(request)
    request.app[SESSIONS].add(socket)
    log(logging.INFO, "a peer came", remote=request.remote, worker=worker.worker_id)
    try:
        await PeerSession(node, worker, socket).run(request[PROOF_ANSWER])
    finally:
        request.app[SESSIONS].discard(socket)
        log(logging.INFO, "a peer left", remote=request.remote, worker=worker.worker_id)
    return socket


def _worker(node: Node, number: int) -> FleetWorker | None:
    """Return a worker of this process by its number; others may be asked themselves."""
    workers = node.fleet.workers
    worker = workers[number] if number < len(workers) else None
    if worker is None or worker.forwards or isinstance(worker.backend, PeerBackend):
        return None
    return worker


async def _end_sessions(app: web.Application) -> None:
    """Say goodbye to every node: their requests have ended by now."""
    sockets = app[SESSIONS]
    goodbyes = (socket.close(code=aiohttp.WSCloseCode.GOING_AWAY) for socket in sockets)
    await asyncio.gather(*goodbyes)
