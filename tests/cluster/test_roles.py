"""Roles of workers that one gateway of a pool changes, and another one follows."""

from __future__ import annotations

from draftgate.gateway.state.memory.store import MemoryStore
from draftgate.policies.types import Role
from tests.cluster.test_members import BODY, PATH, member, until_linked
from tests.gateway.harness import client, until


async def test_requests_are_divided_by_roles_that_another_gateway_has_set() -> None:
    """One gateway exchanges the roles of two workers. The next request of the other gateway runs
    accordingly, with the text that it had before."""
    store = MemoryStore()
    async with (
        member(store, role="prefill") as first,
        member(store, role="decode") as second,
        member(store, no_worker=True) as one,
        member(store, no_worker=True, phases="apart") as other,
        client(one) as http,
        client(other) as direct,
    ):
        for where in (one, other):
            await until_linked(where, 2)
        prefill, decode = (where.node.fleet.own[0] for where in (first, second))
        before = (await direct.post(PATH, json=BODY)).json()["choices"]
        for worker, role in ((prefill, "decode"), (decode, "prefill")):
            path = f"/workers/{worker.worker_id}/role"
            response = await http.put(path, json={"role": role})
            assert (response.status_code, response.json()["role"]) == (200, role)
        seen = {worker.worker_id: worker for worker in other.node.fleet.workers}
        await until(lambda: seen[prefill.worker_id].role is Role.DECODE)
        await until(lambda: seen[decode.worker_id].role is Role.PREFILL)
        assert (await direct.post(PATH, json=BODY)).json()["choices"] == before
        decisions = [one for one in other.node.decisions.latest(9) if one.phases is not None]
        assert [(one.worker_id, one.phases.decode_worker_id) for one in decisions] == [
            (decode.worker_id, prefill.worker_id),
            (prefill.worker_id, decode.worker_id),
        ]
