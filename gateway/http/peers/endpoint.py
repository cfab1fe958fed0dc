"""The endpoint `GET /peer/v1/workers/NUMBER`, to which other nodes connect.

A client without a proof gets the response for an unknown path, after the usual check of its API
key. The OpenAPI document is for clients, so it does not contain this path.
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
"""The response to a node's proof. Only requests from other nodes have this key."""

SESSIONS: Final = web.AppKey("peer_sessions", set[web.WebSocketResponse])

PING_S: Final = 10.0
"""The silence of a node, in seconds, after which it gets a ping. The requests of a lost node are
cancelled after one and a half times this duration."""

GOODBYE_S: Final = 0.25
"""Time to wait for the reply to a close frame, in seconds. A hung node never replies."""


def add_peer_routes(app: web.Application) -> None:
    """Let other nodes use the workers of this node, if the settings allow it."""
    if app[NODE].peer_access is None:
        return
    app[SESSIONS] = set()
    app.router.add_route("*", WORKER_PATH + "{number:[0-9]{1,3}}", _serve_peer)
    app.on_shutdown.append(_end_sessions)


def is_peer(request: web.Request) -> bool:
    """Return whether a request is from another node.

    Call this function only once per request, because a proof is valid only once.
    """
    access = request.app[NODE].peer_access
    if access is None or not request.path.startswith(PREFIX):
        return False
    answer = access.admit(request.path, request.headers)
    if answer is None:
        log(logging.WARNING, "rejected a peer", remote=request.remote)
        return False
    request[PROOF_ANSWER] = answer
    return True


async def _serve_peer(request: web.Request) -> web.WebSocketResponse:
    """Serve another node until its connection ends.

    Raises:
        RouteNotFound: the request has no proof, or the worker does not exist.
        Unavailable: this node accepts no requests at present.
    """
    node = request.app[NODE]
    if PROOF_ANSWER not in request:
        raise RouteNotFound(f"the path {request.path} does not exist")
    node.lifecycle.require_ready()
    worker = _worker(node, int(request.match_info["number"]))
    if worker is None:
        raise RouteNotFound(f"the path {request.path} does not exist")
    socket = web.WebSocketResponse(
        heartbeat=PING_S, timeout=GOODBYE_S, compress=False, max_msg_size=MOST_FRAME_BYTES
    )
    await socket.prepare(request)
    request.app[SESSIONS].add(socket)
    log(logging.INFO, "a peer connected", remote=request.remote, worker=worker.worker_id)
    try:
        await PeerSession(node, worker, socket).run(request[PROOF_ANSWER])
    finally:
        request.app[SESSIONS].discard(socket)
        log(logging.INFO, "a peer disconnected", remote=request.remote, worker=worker.worker_id)
    return socket


def _worker(node: Node, number: int) -> FleetWorker | None:
    """Return a worker of this process by its number, or None for upstreams and remote workers."""
    workers = node.fleet.workers
    worker = workers[number] if number < len(workers) else None
    if worker is None or worker.forwards or isinstance(worker.backend, PeerBackend):
        return None
    return worker


async def _end_sessions(app: web.Application) -> None:
    """Close all connections, whose requests have already ended."""
    sockets = app[SESSIONS]
    goodbyes = (socket.close(code=aiohttp.WSCloseCode.GOING_AWAY) for socket in sockets)
    await asyncio.gather(*goodbyes)
