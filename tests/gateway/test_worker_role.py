"""Tests of `PUT /workers/{worker_id}/role`, which changes the role of a running worker."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from pathlib import Path

import httpx
import pytest
from msgspec import structs

from draftgate.backends.sim.backend import SimBackend
from draftgate.gateway.dispatch.decisions import Decision
from draftgate.gateway.dispatch.job import Job
from draftgate.policies.types import Role
from tests.gateway.harness import ScriptedBackend, client, eventually, running
from tests.gateway.test_kv_fetch import CONFIG, make_job, undisturbed
from tests.gateway.test_moves import reached
from tests.gateway.test_phases import apart
from tests.gateway.test_roles import KEYS, bearer
from tests.gateway.troubles import Choice, Dispatched, run_job, run_scenario
from tests.gateway.upstreams import upstream
from tests.upstream_settings import at

PATH = "/v1/completions"
BODY = {"prompt": "def f(x):", "max_tokens": 24, "seed": 3, "ignore_eos": True}


async def put(http: httpx.AsyncClient, worker_id: str, role: str, key: str = "") -> httpx.Response:
    """Set the role of a worker."""
    path, headers = f"/workers/{worker_id}/role", bearer(key) if key else {}
    return await http.put(path, json={"role": role}, headers=headers)


async def roles(http: httpx.AsyncClient) -> list[str]:
    """Return the role of each worker."""
    return [one["role"] for one in (await http.get("/workers")).json()["workers"]]


async def test_role_of_one_worker_changes_at_once() -> None:
    """The response has the worker with its new role, and `/workers` shows the role."""
    backends = [ScriptedBackend(), ScriptedBackend()]
    async with running(backends=backends, role="decode") as gateway, client(gateway) as http:
        first, second = gateway.node.fleet.workers
        response = await put(http, second.worker_id, "prefill")
        assert response.status_code == 200
        listed = (await http.get("/workers")).json()["workers"]
        assert response.json() == listed[1] == {**listed[0], "worker_id": second.worker_id,
                                                "role": "prefill"}  # fmt: skip
        assert (first.role, second.role) == (Role.DECODE, Role.PREFILL)
        assert (await put(http, first.worker_id, "any")).json()["role"] == "any"
        assert await roles(http) == ["any", "prefill"]


async def test_errors_name_what_is_wrong(scripted: ScriptedBackend) -> None:
    """An unknown role, an unknown worker and another method are errors, and change nothing."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        (worker,) = gateway.node.fleet.workers
        path = f"/workers/{worker.worker_id}/role"
        for body in ({"role": "king"}, {"role": None}, {}):
            refused = await http.put(path, json=body)
            error = refused.json()["error"]
            assert (refused.status_code, error["param"]) == (400, "role")
        assert "king" in (await put(http, worker.worker_id, "king")).json()["error"]["message"]
        unknown = await put(http, "w-9", "decode")
        assert (unknown.status_code, unknown.json()["error"]["code"]) == (404, "worker_not_found")
        assert (await http.get(path)).status_code == 405
        assert await roles(http) == ["any"]


async def test_upstream_has_no_role() -> None:
    """An upstream computes both phases, so its role is fixed."""
    async with (
        upstream() as server,
        running(backend="openai", upstream=at(server.url)) as gateway,
        client(gateway) as http,
    ):
        (worker,) = gateway.node.fleet.workers
        refused = await put(http, worker.worker_id, "decode")
        assert (refused.status_code, refused.json()["error"]["code"]) == (409, "fixed_role")


async def test_only_operators_set_roles(tmp_path: Path) -> None:
    """Tenants and scrapers cannot set roles."""
    keys = tmp_path / "keys.yaml"
    keys.write_text(KEYS)
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        (worker,) = gateway.node.fleet.workers
        for key in ("sk-one", "sk-scrape"):
            refused = await put(http, worker.worker_id, "decode", key)
            assert (refused.status_code, refused.json()["error"]["code"]) == (403, "forbidden")
        assert worker.role is Role.ANY
        assert (await put(http, worker.worker_id, "decode", "sk-boss")).status_code == 200
        assert worker.role is Role.DECODE


async def test_foreign_page_cannot_set_a_role(scripted: ScriptedBackend) -> None:
    """A browser announces the request of a foreign page, and the node refuses it."""
    async with running(backends=[scripted]) as gateway, client(gateway) as http:
        path = f"/workers/{gateway.node.fleet.workers[0].worker_id}/role"
        foreign = {"Origin": "http://evil.example", "Content-Type": "text/plain"}
        refused = await http.put(path, content=b'{"role": "decode"}', headers=foreign)
        assert refused.json()["error"]["code"] == "forbidden_origin"
        assert await roles(http) == ["any"]


def jobs(first: int, count: int) -> list[Job]:
    return [replace(make_job(300, 1, 100), request_id=f"r{first + n}") for n in range(count)]


async def served(dispatched: Dispatched, some: list[Job]) -> list[list[Choice]]:
    """Run jobs at the same time."""
    return await asyncio.gather(*(run_job(dispatched.dispatcher, job) for job in some))


def places(decisions: list[Decision], some: list[Job]) -> set[tuple[str, str]]:
    """Return the workers of the first token and of the output for some jobs."""
    ids = {job.request_id for job in some}
    return {
        (one.worker_id, one.phases.decode_worker_id)
        for one in decisions
        if one.request_id in ids and one.phases is not None
    }


def test_requests_after_a_change_are_divided_by_the_new_roles() -> None:
    """Roles are exchanged while requests run. These end where they began, and later requests use
    the new roles. Only the workers of outputs draft, and all texts are those of a single worker."""

    async def scenario() -> None:
        async with apart(SimBackend, config=drafting) as dispatched:
            first, second = dispatched.fleet.workers
            before, after = jobs(0, 4), jobs(4, 4)
            early = asyncio.create_task(served(dispatched, before))
            await reached(lambda: second.backend.load().running)
            first.role, second.role = Role.DECODE, Role.PREFILL
            late = await served(dispatched, after)
            assert [*await early, *late] == [alone] * 8
            decisions = dispatched.decisions.latest(100)
            assert places(decisions, before) == {(first.worker_id, second.worker_id)}
            assert places(decisions, after) == {(second.worker_id, first.worker_id)}
            drafts = {(one.phases is None, one.plan.max_draft_tokens) for one in decisions}
            assert drafts == {(False, 0), (True, 3)}
            await eventually(dispatched.is_idle)

    drafting = structs.replace(CONFIG, speculation="fixed:3")
    alone = undisturbed(make_job(300, 1, 100))
    run_scenario(scenario())


@pytest.mark.parametrize("after", [0, 1, 2, 5, 20])
@pytest.mark.parametrize("change", [Role.ANY, Role.DECODE])
def test_running_handover_is_not_disturbed(change: Role, after: int) -> None:
    """A role that changes at any time of a handover changes neither the text nor the capacity."""

    async def scenario() -> list[Choice]:
        async with apart(SimBackend) as dispatched:
            source, _ = dispatched.fleet.workers
            choices = [Choice()]
            async with dispatched.dispatcher.run(job) as run:
                count = 0
                if not after:
                    source.role = change
                async for delta in run.deltas:
                    choices[0].append(delta)
                    count += 1
                    if count == after:
                        source.role = change
            await eventually(dispatched.is_idle)
            return choices

    job = make_job(1500, 1, 60)
    assert run_scenario(scenario()) == undisturbed(job)
