"""The endpoints `GET /peer/v1/workers/NUMBER`, to which other nodes connect.

A node has a WebSocket for requests, and a stream for KV blocks at `/blocks`.

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
from draftgate.backends.peer.block_stream import BLOCKS_PATH, PROOF_HEADER, UPGRADE, format_digest
from draftgate.backends.peer.channel import MOST_FRAME_BYTES, PREFIX, WORKER_PATH
from draftgate.gateway.errors import RouteNotFound
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.context import NODE
from draftgate.gateway.http.peers.blocks import BlockSession
from draftgate.gateway.http.peers.session import PeerSession
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
    path = WORKER_PATH + "{number:[0-9]{1,3}}"
    app.router.add_route("*", path, _serve_peer)
    app.router.add_route("*", path + BLOCKS_PATH, _serve_blocks)
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
    if PROOF_ANSWER in request:
        node.lifecycle.require_ready()
    worker = _worker(request)
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


async def _serve_blocks(request: web.Request) -> web.StreamResponse:
    """Exchange KV blocks with another node until its connection ends. A draining node does so too.

    Raises:
        RouteNotFound: the request has no proof, or no worker has blocks of the requested format.
    """
    worker = _worker(request)
    form = worker.kv_format
    if form is None or request.query.get("format") != format_digest(form):
        raise _not_found(request)
    headers = {"Connection": "Upgrade", "Upgrade": UPGRADE, PROOF_HEADER: request[PROOF_ANSWER]}
    response = web.StreamResponse(status=101, headers=headers)
    await response.prepare(request)
    access = request.app[NODE].peer_access
    secret = None if access is None else access.secret
    await BlockSession(worker, form, request, secret).run()
    return response


def _worker(request: web.Request) -> FleetWorker:
    """Return the requested worker of this process.

    Raises:
        RouteNotFound: the request has no proof, or the worker does not exist, is an upstream, or
            belongs to another node.
    """
    workers, number = request.app[NODE].fleet.workers, int(request.match_info["number"])
    if PROOF_ANSWER not in request or number >= len(workers):
        raise _not_found(request)
    worker = workers[number]
    if worker.forwards or isinstance(worker.backend, PeerBackend):
        raise _not_found(request)
    return worker


def _not_found(request: web.Request) -> RouteNotFound:
    return RouteNotFound(f"the path {request.path} does not exist")


async def _end_sessions(app: web.Application) -> None:
    """Close all connections, whose requests have already ended."""
    sockets = app[SESSIONS]
    goodbyes = (socket.close(code=aiohttp.WSCloseCode.GOING_AWAY) for socket in sockets)
    await asyncio.gather(*goodbyes)
