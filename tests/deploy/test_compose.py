"""Tests that compose.yaml is valid, confined and working, without Docker."""

from __future__ import annotations

import asyncio
import json
import re
import subprocess
import sys
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import pytest

from draftgate.gateway.app import CLOSE_S
from draftgate.gateway.config import ServeConfig
from tests.deploy.compose import ROOT, read, seconds, services
from tests.deploy.processes import Addresses, LocalService, free_ports, running
from tests.gateway.collector import Collector, collecting

NODES = ("gateway", "worker-1", "worker-2")
SERVING = ("redis", "worker-1", "worker-2", "gateway")
"""Services that run permanently, in the order of their start."""

TOO_BUSY = {3, 4}  # exit statuses for an overloaded load generator or server
REQUEST_S = 300.0

SERVICES = services()
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-\w+)?(@sha256:[0-9a-f]{64})?")


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_compose_file_satisfies_the_specification(name: str) -> None:
    """The compose file satisfies the schema of the Compose specification."""
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*checker, str(ROOT / name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_peer_secret_is_required() -> None:
    """Compose requires the peer secret, which has no default in the repository."""
    with pytest.raises(KeyError, match="PEER_SECRET"):
        read(environ={})
    given = read(environ={"PEER_SECRET": "x"})
    assert {given["services"][name]["environment"]["PEER_SECRET"] for name in NODES} == {"x"}


@pytest.mark.parametrize("name", SERVICES)
def test_service_runs_without_privileges(name: str) -> None:
    """The service runs without root, capabilities, new privileges and a writable root file
    system."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    ours = service["image"].startswith("draftgate:")  # the image sets the user
    assert ours or service["user"].partition(":")[0] not in {"0", "root"}


@pytest.mark.parametrize("name", SERVICES)
def test_service_has_a_pinned_image_a_memory_limit_and_a_health_check(name: str) -> None:
    """The service has a pinned image and a memory limit, and most services have a health check."""
    service = SERVICES[name]
    assert service["image"].startswith("draftgate:") or PINNED.fullmatch(service["image"])
    assert re.fullmatch(r"\d+[mg]", service["deploy"]["resources"]["limits"]["memory"])
    # The load generator exits by itself. The collector's image has no program for a check.
    without = {"loadgen", "otel-collector"}
    assert bool(service["healthcheck"].get("disable")) == (name in without)


@pytest.mark.parametrize("name", SERVICES)
def test_files_volumes_and_dependencies_of_a_service_exist(name: str) -> None:
    """Every file, volume, network and dependency of the service exists."""
    service, document = SERVICES[name], read()
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        assert (ROOT / source).exists() if source.startswith(".") else source in document["volumes"]
    assert set(service.get("networks", [])) <= {*document["networks"], "default"}
    for needed in service.get("depends_on", {}):
        assert not SERVICES[needed]["healthcheck"].get("disable")


def test_only_the_api_can_be_published_beyond_this_machine() -> None:
    """The variable GATEWAY_ADDRESS publishes only the API, and other ports stay local."""
    services_by_name = read(environ={"PEER_SECRET": "x", "GATEWAY_ADDRESS": "0.0.0.0"})["services"]
    published = {
        name: port for name in services_by_name for port in services_by_name[name].get("ports", [])
    }
    assert published.pop("gateway") == "0.0.0.0:8000:8000"
    assert SERVICES["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published.values())


def test_only_nodes_reach_redis() -> None:
    """Only nodes share a network with Redis, which has no password."""
    document = read()
    assert document["networks"]["cluster"] == {"internal": True}
    assert SERVICES["redis"]["networks"] == ["cluster"]
    assert {n for n in SERVICES if "cluster" in SERVICES[n].get("networks", [])} == {
        "redis",
        *NODES,
    }
    assert "ports" not in SERVICES["redis"]


@pytest.mark.parametrize("name", NODES)
def test_grace_period_covers_the_drain_timeout(name: str) -> None:
    """The grace period covers the drain timeout and the time to close connections."""
    drain_s = ServeConfig().drain_timeout_s
    assert "--drain-timeout-s" not in SERVICES[name]["command"]
    assert seconds(SERVICES[name]["stop_grace_period"]) >= drain_s + 2 * CLOSE_S


def test_each_gpu_worker_has_its_own_gpu() -> None:
    """Each worker of the GPU override reserves its own GPU and uses the CUDA image."""
    workers = read("compose.gpu.yaml")["services"]
    assert set(workers) == {name for name in SERVICES if name.startswith("worker-")}
    devices = []
    for worker in workers.values():
        (device,) = worker["deploy"]["resources"]["reservations"]["devices"]
        assert device["driver"] == "nvidia"
        assert worker["image"] == "draftgate:engine-cuda"
        devices += device["device_ids"]
    assert len(set(devices)) == len(devices) == len(workers)


@asynccontextmanager
async def cluster(home: Path) -> AsyncIterator[tuple[list[LocalService], Addresses, Collector]]:
    """Run the cluster of compose.yaml with a trace collector and yield when it is healthy."""
    async with collecting() as collector:
        ports = free_ports(SERVICES, SERVING)
        ports["otel-collector", "4318"] = int(collector.url.rpartition(":")[2])
        addresses = Addresses(ports)
        async with running(SERVICES, SERVING, addresses, home) as started:
            yield started, addresses, collector


async def wait_for_both_workers(http: httpx.AsyncClient) -> None:
    """Wait until the gateway knows both workers, because it serves with the first worker."""
    async with asyncio.timeout(REQUEST_S):
        while len((await http.get("/health")).json()["workers"]) < 2:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.1)


async def completion(http: httpx.AsyncClient) -> dict[str, Any]:
    """Request a completion and return the response."""
    body = {"prompt": "def main():", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    response = await http.post("/v1/completions", json=body)
    assert response.status_code == 200, response.text
    return dict(response.json())


async def test_the_cluster_works_as_plain_processes(tmp_path: Path) -> None:
    """The cluster serves requests through the gateway, sends traces and stops in time."""
    async with cluster(tmp_path) as (started, addresses, collector):
        url = f"http://127.0.0.1:{addresses.ports['gateway', '8000']}"
        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S) as http:
            await wait_for_both_workers(http)
            responses = [await completion(http) for _ in range(4)]
            workers = (await http.get("/health")).json()["workers"]
        assert {response["usage"]["completion_tokens"] for response in responses} == {8}
        assert len({response["choices"][0]["text"] for response in responses}) == 1
        assert [worker["status"] for worker in workers] == ["ok", "ok"], json.dumps(workers)
        for service in reversed(started):
            assert await service.stop() == 0, service.log_tail()
        names = {span.resource["service.name"] for span in collector.spans}
        assert names == {"draftgate-gateway", "draftgate-worker"}


@pytest.mark.long
async def test_bench_profile_runs_a_load_test_against_the_cluster(tmp_path: Path) -> None:
    """The load generator of the bench profile receives every stream intact."""
    async with cluster(tmp_path) as (_, addresses, _):
        loadgen = LocalService("loadgen", SERVICES["loadgen"], addresses, tmp_path)
        await loadgen.start()
        assert await loadgen.finish() in {0, *TOO_BUSY}, loadgen.log_tail()
