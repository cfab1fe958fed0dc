"""The role of another node's worker, which gateways change and all gateways see."""

from __future__ import annotations

import asyncio

import httpx
import pytest

from draftgate.backends.errors import BackendFailed
from draftgate.backends.remote_worker import SetRole
from draftgate.policies.types import Role
from tests.gateway.harness import client, running, until
from tests.peer.harness import (
    SILENCE_S,
    an_update,
    behind_proxy,
    impostor,
    linked_to,
    ready_message,
)
from tests.upstream_settings import at


async def put(http: httpx.AsyncClient, worker_id: str, role: str) -> httpx.Response:
    """Set the role of a worker."""
    return await http.put(f"/workers/{worker_id}/role", json={"role": role})


async def test_role_set_at_one_gateway_is_seen_at_all() -> None:
    """A gateway sets the role of a worker of another node. Its response has the new role, and the
    node and another gateway see it."""
    async with (
        running(role="prefill") as peer,
        running(backend="peer", upstream=at(peer.url)) as one,
        running(backend="peer", upstream=at(peer.url)) as other,
        client(one) as http,
    ):
        (own,), (near,), (far,) = (each.node.fleet.workers for each in (peer, one, other))
        await until(lambda: far.role is near.role is Role.PREFILL)
        response = await put(http, near.worker_id, "decode")
        assert (response.status_code, response.json()["role"]) == (200, "decode")
        assert own.role is near.role is Role.DECODE
        await until(lambda: far.role is Role.DECODE)


async def test_role_outlives_the_link() -> None:
    """A gateway that links again finds the role that was set before."""
    async with behind_proxy() as (backend, proxy, where):
        await backend.change_role(Role.DECODE)
        assert where.node.fleet.workers[0].role is Role.DECODE
        proxy.cut(refuse=True)
        await until(lambda: backend.failure is not None)
        with pytest.raises(BackendFailed, match="the peer is lost"):
            await backend.change_role(Role.PREFILL)
        backend.role = Role.ANY
        proxy.accept()
        await until(lambda: backend.failure is None)
        assert backend.role is Role.DECODE


async def test_node_of_an_earlier_version_keeps_its_role() -> None:
    """A gateway sends no `SetRole` to a node that does not announce it, because that node would
    close the connection."""
    async with (
        impostor(ready_message()) as earlier,
        running(backend="peer", upstream=at(earlier.url)) as gateway,
        client(gateway) as http,
    ):
        (worker,) = gateway.node.fleet.workers
        refused = await put(http, worker.worker_id, "decode")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "fixed_role")
        assert earlier.commands == []


async def test_change_without_confirmation_fails() -> None:
    """A change fails if the peer continues to report another role."""
    async with (
        impostor(ready_message(changes_role=True)) as server,
        linked_to(server.url, silence_s=SILENCE_S) as backend,
    ):
        change = asyncio.create_task(backend.change_role(Role.DECODE))
        await until(lambda: server.commands == [SetRole(Role.DECODE)])
        server.say(an_update())
        with pytest.raises(BackendFailed, match="has not confirmed"):
            await change
