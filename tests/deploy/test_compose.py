"""compose.yaml: valid, confined, and what it starts works, be it without Docker."""

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
"""In an order in which they can be started."""

TOO_BUSY = {3, 4}  # exit statuses of a load whose generator, or whose server, could not keep up
REQUEST_S = 60.0

SERVICES = services()
PINNED = re.compile(r"[\w./-]+:v?\d+\.\d+\.\d+(-\w+)?(@sha256:[0-9a-f]{64})?")


@pytest.mark.parametrize("name", ["compose.yaml", "compose.gpu.yaml"])
def test_it_is_what_the_specification_allows(name: str) -> None:
    """Compose files satisfy the schema of the Compose specification."""
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    done = subprocess.run(
        [*checker, str(ROOT / name)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr


def test_the_secret_has_to_be_set() -> None:
    """Nobody runs a cluster with a secret that stands in this repository."""
    with pytest.raises(KeyError, match="PEER_SECRET"):
        read(environ={})
    given = read(environ={"PEER_SECRET": "x"})
    assert {given["services"][name]["environment"]["PEER_SECRET"] for name in NODES} == {"x"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_has_no_more_rights_than_it_needs(name: str) -> None:
    """No root, no capabilities, no new privileges, nothing to write but what is mounted."""
    service = SERVICES[name]
    assert service["read_only"] is True
    assert service["cap_drop"] == ["ALL"]
    assert service["security_opt"] == ["no-new-privileges:true"]
    ours = service["image"].startswith("draftgate:")  # whose user the image has
    assert ours or service["user"].partition(":")[0] not in {"0", "root"}


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_pinned_bounded_and_watched(name: str) -> None:
    """Its image is one version, its memory has a limit, and one can ask it how it is."""
    service = SERVICES[name]
    assert service["image"].startswith("draftgate:") or PINNED.fullmatch(service["image"])
    assert re.fullmatch(r"\d+[mg]", service["deploy"]["resources"]["limits"]["memory"])
    without = {"loadgen", "otel-collector"}  # one ends by itself, one has no program to ask with
    assert bool(service["healthcheck"].get("disable")) == (name in without)


@pytest.mark.parametrize("name", SERVICES)
def test_what_a_service_names_is_there(name: str) -> None:
    """Files that it mounts, volumes, networks and services it waits for exist."""
    service, document = SERVICES[name], read()
    for volume in service.get("volumes", []):
        source = volume.partition(":")[0]
        assert (ROOT / source).exists() if source.startswith(".") else source in document["volumes"]
    assert set(service.get("networks", [])) <= {*document["networks"], "default"}
    for needed in service.get("depends_on", {}):
        assert not SERVICES[needed]["healthcheck"].get("disable")


def test_only_the_api_can_be_opened_to_others() -> None:
    """Every published port is one of this machine, unless GATEWAY_ADDRESS says otherwise."""
    told = read(environ={"PEER_SECRET": "x", "GATEWAY_ADDRESS": "0.0.0.0"})["services"]
    published = {name: port for name in told for port in told[name].get("ports", [])}
    assert published.pop("gateway") == "0.0.0.0:8000:8000"
    assert SERVICES["gateway"]["ports"] == ["127.0.0.1:8000:8000"]
    assert len(published) == 3
    assert all(port.startswith("127.0.0.1:") for port in published.values())


def test_redis_is_for_the_nodes_alone() -> None:
    """Redis has no password: it is on a network of its own, with the nodes and nobody else."""
    document = read()
    assert document["networks"]["cluster"] == {"internal": True}
    assert SERVICES["redis"]["networks"] == ["cluster"]
    assert {n for n in SERVICES if "cluster" in SERVICES[n].get("networks", [])} == {
        "redis",
        *NODES,
    }
    assert "ports" not in SERVICES["redis"]


@pytest.mark.parametrize("name", NODES)
def test_a_node_has_the_time_to_drain(name: str) -> None:
    """Compose waits for open streams as long as the node does, and while connections close."""
    drain_s = ServeConfig().drain_timeout_s
    assert "--drain-timeout-s" not in SERVICES[name]["command"]
    assert seconds(SERVICES[name]["stop_grace_period"]) >= drain_s + 2 * CLOSE_S


def test_the_gpus_are_shared_out() -> None:
    """With the override each worker has a GPU of its own, in an image that can use it."""
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
    """The cluster of compose.yaml, healthy, and a collector where it sends its traces."""
    async with collecting() as collector:
        ports = free_ports(SERVICES, SERVING)
        ports["otel-collector", "4318"] = int(collector.url.rpartition(":")[2])
        addresses = Addresses(ports)
        async with running(SERVICES, SERVING, addresses, home) as started:
            yield started, addresses, collector


async def both_found(http: httpx.AsyncClient) -> None:
    """Return once the gateway has found both workers: it begins with the first."""
    async with asyncio.timeout(REQUEST_S):
        while len((await http.get("/health")).json()["workers"]) < 2:  # noqa: ASYNC110 - over HTTP
            await asyncio.sleep(0.1)


async def completion(http: httpx.AsyncClient) -> dict[str, Any]:
    """Ask for a completion."""
    body = {"prompt": "def main():", "max_tokens": 8, "temperature": 0, "ignore_eos": True}
    answer = await http.post("/v1/completions", json=body)
    assert answer.status_code == 200, answer.text
    return dict(answer.json())


async def test_the_cluster_works_as_plain_processes(tmp_path: Path) -> None:
    """Started with compose's commands and environment, every service of ours becomes healthy by
    compose's own check, requests are answered through the gateway, traces of gateway and workers
    arrive, and each process stops in order, in time and without an error."""
    async with cluster(tmp_path) as (started, addresses, collector):
        url = f"http://127.0.0.1:{addresses.ports['gateway', '8000']}"
        async with httpx.AsyncClient(base_url=url, timeout=REQUEST_S) as http:
            await both_found(http)
            answers = [await completion(http) for _ in range(4)]
            workers = (await http.get("/health")).json()["workers"]
        assert {answer["usage"]["completion_tokens"] for answer in answers} == {8}
        assert len({answer["choices"][0]["text"] for answer in answers}) == 1
        assert [worker["status"] for worker in workers] == ["ok", "ok"], json.dumps(workers)
        for service in reversed(started):
            assert await service.stop() == 0, service.told()
        names = {span.resource["service.name"] for span in collector.spans}
        assert names == {"draftgate-gateway", "draftgate-worker"}


@pytest.mark.long
async def test_the_bench_profile_loads_the_cluster(tmp_path: Path) -> None:
    """The load generator runs as the profile starts it, against the cluster, and is content."""
    async with cluster(tmp_path) as (_, addresses, _):
        loadgen = LocalService("loadgen", SERVICES["loadgen"], addresses, tmp_path)
        await loadgen.start()
        assert await loadgen.finish() in {0, *TOO_BUSY}, loadgen.told()
