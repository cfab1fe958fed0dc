"""The endpoints `GET /peer/v1/workers/NUMBER`, to which other nodes connect.

A node has a connection for requests, and another one for KV blocks at `/blocks`.

A client without a proof gets the response for an unknown path, after the usual check of its API
key. The OpenAPI document is for clients, so it does not contain this path.
"""

from __future__ import annotations

import logging
from typing import Final

from aiohttp import web

from draftgate.backends.peer.blocks import BLOCKS_PATH, format_digest
from draftgate.backends.peer.channel import PREFIX, WORKER_PATH
from draftgate.backends.peer.upgrade import PROOF_HEADER, UPGRADE
from draftgate.gateway.errors import RouteNotFound
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.context import NODE
from draftgate.gateway.http.peers.blocks import BlockSession
from draftgate.gateway.http.peers.session import PeerSession
from draftgate.gateway.logs import log
from draftgate.gateway.model_service import ModelService

PROOF_ANSWER: Final = web.RequestKey("proof_answer", str)
"""The response to a node's proof. Only requests from other nodes have this key."""

SESSIONS: Final = web.AppKey("peer_sessions", set[PeerSession])


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


async def _serve_peer(request: web.Request) -> web.StreamResponse:
    """Serve another node until its connection ends.

    Raises:
        RouteNotFound: the request has no proof, or the worker does not exist.
        Unavailable: this node accepts no requests at present.
    """
    node = request.app[NODE]
    if PROOF_ANSWER in request:
        node.lifecycle.require_ready()
    model, worker = _worker(request)
    response = await _upgraded(request)
    session = PeerSession(node, model.dispatcher, worker)
    request.app[SESSIONS].add(session)
    log(logging.INFO, "a peer connected", remote=request.remote, worker=worker.worker_id)
    try:
        await session.run(request)
    finally:
        request.app[SESSIONS].discard(session)
        log(logging.INFO, "a peer disconnected", remote=request.remote, worker=worker.worker_id)
    return response


async def _serve_blocks(request: web.Request) -> web.StreamResponse:
    """Exchange KV blocks with another node until its connection ends. A draining node does so too.

    Raises:
        RouteNotFound: the request has no proof, or no worker has blocks of the requested format.
    """
    _, worker = _worker(request)
    form = worker.kv_format
    if form is None or request.query.get("format") != format_digest(form):
        raise _not_found(request)
    response = await _upgraded(request)
    access = request.app[NODE].peer_access
    secret = None if access is None else access.secret
    await BlockSession(worker, form, request, secret).run()
    return response


async def _upgraded(request: web.Request) -> web.StreamResponse:
    """Change the connection of a request from HTTP to frames, with the answer to its proof."""
    headers = {"Connection": "Upgrade", "Upgrade": UPGRADE, PROOF_HEADER: request[PROOF_ANSWER]}
    response = web.StreamResponse(status=101, headers=headers)
    await response.prepare(request)
    return response


def _worker(request: web.Request) -> tuple[ModelService, FleetWorker]:
    """Return the requested worker of this process, and its model.

    Raises:
        RouteNotFound: the request has no proof, or the worker does not exist, is an upstream, or
            belongs to another node.
    """
    workers, number = request.app[NODE].own_workers(), int(request.match_info["number"])
    if PROOF_ANSWER not in request or number >= len(workers):
        raise _not_found(request)
    model, worker = workers[number]
    if worker.server is not None:
        raise _not_found(request)
    return model, worker


def _not_found(request: web.Request) -> RouteNotFound:
    return RouteNotFound(f"the path {request.path} does not exist")


async def _end_sessions(app: web.Application) -> None:
    """Close all connections, whose requests have already ended."""
    sessions = app[SESSIONS]
    for session in tuple(sessions):
        session.end()
