"""A node with its own workers and with upstreams."""

from __future__ import annotations

from collections.abc import AsyncIterator
from pathlib import Path

import httpx
import pytest

from draftgate.backends.worker_config import UpstreamSettings
from draftgate.gateway.app import Listening
from draftgate.gateway.banner import banner
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.reading import effective_config
from draftgate.gateway.processes.parent import plan_processes
from tests.gateway.harness import client, running
from tests.gateway.upstreams import ScriptedUpstream, upstream, whole

OWN = "draftgate-demo"
CHAT = {"messages": [{"role": "user", "content": "x"}], "max_tokens": 4}
REMOTE = {"model": "remote", "prompt": "x", "max_tokens": 4}


@pytest.fixture
async def remote() -> AsyncIterator[ScriptedUpstream]:
    async with upstream(whole) as server:
        server.models = ("remote", "second")
        yield server


@pytest.fixture
async def node(remote: ScriptedUpstream) -> AsyncIterator[Listening]:
    """A node with a simulated worker and an upstream with two models."""
    async with running(backend="sim", upstream=(UpstreamSettings(url=remote.url),)) as gateway:
        yield gateway


@pytest.fixture
async def http(node: Listening) -> AsyncIterator[httpx.AsyncClient]:
    async with client(node) as found:
        yield found


async def probe(gateway: Listening) -> None:
    for _, worker in gateway.node.workers():
        if worker.server is not None:
            await worker.backend.probe()


async def test_a_request_goes_where_its_model_is(
    http: httpx.AsyncClient, remote: ScriptedUpstream
) -> None:
    """Own models run here, and the models of the list of the upstream there."""
    own = await http.post("/v1/completions", json={"model": OWN, "prompt": "x", "max_tokens": 4})
    assert own.status_code == 200
    assert not remote.requests
    for name in ("remote", "second"):
        forwarded = await http.post("/v1/completions", json={**REMOTE, "model": name})
        assert forwarded.status_code == 200
    assert len(remote.requests) == 2


async def test_a_request_without_a_model_runs_here(
    http: httpx.AsyncClient, remote: ScriptedUpstream
) -> None:
    """The first model of a node is its own one."""
    for path, body in (("/v1/completions", {"prompt": "x"}), ("/v1/chat/completions", CHAT)):
        assert (await http.post(path, json=body)).status_code == 200
    assert not remote.requests


async def test_unknown_models_are_not_found_with_all_names(
    http: httpx.AsyncClient, remote: ScriptedUpstream
) -> None:
    """The error names own models and those of the upstream."""
    response = await http.post("/v1/completions", json={**REMOTE, "model": "w"})
    assert response.status_code == 404
    assert all(name in response.json()["error"]["message"] for name in (OWN, "remote", "second"))
    assert not remote.requests


async def test_models_are_listed_together(http: httpx.AsyncClient) -> None:
    """`/v1/models` has all of them in both formats, and describes each."""
    listed = (await http.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == [OWN, "remote", "second"]
    page = await http.get("/v1/models", headers={"anthropic-version": "2023-06-01"})
    assert [one["id"] for one in page.json()["data"]] == [OWN, "remote", "second"]
    for name in (OWN, "second"):
        assert (await http.get(f"/v1/models/{name}")).json()["id"] == name
    missing = await http.get("/v1/models/w")
    assert missing.status_code == 404
    assert "second" in missing.json()["error"]["message"]


async def test_an_own_model_hides_one_of_the_same_name(
    node: Listening, http: httpx.AsyncClient, remote: ScriptedUpstream
) -> None:
    """The list has the name once, and its requests run here."""
    remote.models = (OWN, "remote")
    await probe(node)
    listed = (await http.get("/v1/models")).json()["data"]
    assert [one["id"] for one in listed] == [OWN, "remote"]
    assert (await http.get(f"/v1/models/{OWN}")).json()["owned_by"] == listed[0]["owned_by"]
    body = {"model": OWN, "prompt": "x", "max_tokens": 4}
    assert (await http.post("/v1/completions", json=body)).status_code == 200
    assert not remote.requests


async def test_an_outage_of_the_upstream_concerns_its_models_only(
    node: Listening, http: httpx.AsyncClient, remote: ScriptedUpstream
) -> None:
    """The node stays ready, and its own model answers."""
    remote.status = 503
    for _ in range(3):
        await probe(node)
    assert (await http.post("/v1/completions", json=REMOTE)).status_code == 503
    own = {"model": OWN, "prompt": "x", "max_tokens": 4}
    assert (await http.post("/v1/completions", json=own)).status_code == 200
    ready = await http.get("/ready")
    assert ready.status_code == 200
    assert [one["id"] for one in ready.json()["workers"]] == ["upstream-1"]


async def test_tokens_are_counted_where_the_model_is(
    http: httpx.AsyncClient, remote: ScriptedUpstream
) -> None:
    """`/tokenize` and the two endpoints that count tokens follow the model of their body."""
    bodies = {
        "/tokenize": {"prompt": "x"},
        "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
        "/v1/responses/input_tokens": {"input": "x"},
    }
    for path, body in bodies.items():
        before = len(remote.requests)
        own = await http.post(path, json={"model": OWN, **body})
        assert (own.status_code, len(remote.requests)) == (200, before), path
        await http.post(path, json={"model": "remote", **body})
        assert len(remote.requests) == before + 1, path


async def test_banner_metrics_and_workers_show_both(
    node: Listening, http: httpx.AsyncClient
) -> None:
    """Operators see the model, the upstream, and the series of each once."""
    shown = banner(node)
    assert OWN in shown
    assert "upstreams" in shown
    assert (await http.post("/v1/completions", json=REMOTE)).status_code == 200
    lines = (await http.get("/metrics")).text.splitlines()
    series = [line.rpartition(" ")[0] for line in lines if line and not line.startswith("#")]
    assert len(series) == len(set(series))
    workers = (await http.get("/workers")).json()["workers"]
    assert [one["model"] for one in workers] == [OWN, "remote"]
    assert workers[1]["worker_id"] == "upstream-1"


@pytest.mark.parametrize(
    ("flags", "backend"),
    [
        ({"upstream": ["http://gpu-1:8000"]}, "openai"),
        ({"upstream": ["http://gpu-1:8000"], "model": "smollm2"}, "engine"),
        ({"upstream": ["http://gpu-1:8000"], "models": ["a=smollm2"]}, "engine"),
        ({"upstream": ["http://gpu-1:8000"], "backend": "sim"}, "sim"),
        ({}, "engine"),
    ],
)
def test_a_node_that_names_no_model_only_forwards(flags: dict[str, object], backend: str) -> None:
    """`serve --upstream URL` needs no backend, and a model makes it a node with both."""
    assert effective_config(flags, {}).config.backend == backend


def test_the_processes_of_a_node_share_its_workers_and_forward_themselves(tmp_path: Path) -> None:
    """The process with the workers has no upstreams, and each front has them."""
    upstreams = (UpstreamSettings(url="http://gpu-1:8000"),)
    config = ServeConfig(backend="sim", upstream=upstreams, processes=2)
    plan = plan_processes(config, tmp_path / "stores")
    assert plan.worker is not None
    assert not plan.worker.upstream
    assert [(front.no_worker, front.upstream) for front in plan.fronts] == [(True, upstreams)] * 2
