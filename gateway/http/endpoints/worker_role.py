"""The endpoint `/workers/{worker_id}/role`, which changes the role of a running worker.

Every gateway of a pool can change the role of every worker. The role belongs to the process of the
worker, which reports it to all gateways. It lasts until that process ends. Running requests stay
where they are.
"""

from __future__ import annotations

import logging
from typing import Final

import msgspec
from aiohttp import web

from draftgate.backends.peer.backend import PeerBackend
from draftgate.gateway.errors import FixedRole, WorkerNotFound
from draftgate.gateway.fleet import FleetWorker
from draftgate.gateway.http.context import json_response, node_of_operator, read_body
from draftgate.gateway.http.requests.decoding import decode
from draftgate.gateway.http.requests.schemas import WorkerRoleBody
from draftgate.gateway.logs import log
from draftgate.gateway.model_service import ModelService
from draftgate.gateway.node import Node
from draftgate.gateway.telemetry.worker_list import listed_worker
from draftgate.policies.types import Role

PATH: Final = "/workers/{worker_id:.+}/role"

_decoder: Final = msgspec.json.Decoder(WorkerRoleBody)


async def set_role(request: web.Request) -> web.Response:
    """Set the role of a worker, and return the worker once it has the role.

    Raises:
        Forbidden: the API key does not belong to an operator.
        InvalidRequest: the role does not exist.
        WorkerNotFound: the pool has no such worker.
        FixedRole: the worker is an upstream, or its node is too old.
        BackendFailed: the node of the worker does not respond.
    """
    node = node_of_operator(request)
    role = decode(await read_body(request), _decoder).role
    model, worker = _find(node, request.match_info["worker_id"])
    await _change_role(worker, role)
    log(logging.INFO, "an operator set the role of a worker", worker=worker.worker_id, role=role)
    model.dispatcher.queue.dispatch_waiting()  # the role may give a waiting request a worker
    return json_response(listed_worker(worker, model.name))


def _find(node: Node, worker_id: str) -> tuple[ModelService, FleetWorker]:
    for model, worker in node.workers():
        if worker.worker_id == worker_id:
            return model, worker
    raise WorkerNotFound(worker_id)


async def _change_role(worker: FleetWorker, role: Role) -> None:
    backend = worker.backend
    if worker.server is None:
        worker.role = role
    elif not isinstance(backend, PeerBackend):
        raise FixedRole("the configuration of this node sets the role of an upstream")
    elif backend.changes_role:
        await backend.change_role(role)
    else:
        raise FixedRole(
            "the node of this worker is too old to change roles; restart it with --role"
        )
