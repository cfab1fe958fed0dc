"""Tests that the deployments which `draftgate plan` writes are valid and start."""

from __future__ import annotations

import asyncio
import subprocess
import sys
from pathlib import Path
from typing import Any

import httpx
import kubernetes_validate
import pytest
import yaml

from draftgate.gateway.cli.plan.deployment import compose_text, worker_name
from draftgate.gateway.cli.plan.kubernetes import stateful_set, write_kubernetes
from tests.deploy.compose import read
from tests.deploy.kubernetes import kustomization, manifests_of_kind, pod
from tests.deploy.processes import Addresses, free_ports, running

MACHINES: list[dict[str, Any]] = [
    {"profile": "a10g-8b", "role": "any", "count": 3, "speculation": "auto"},
    {"profile": "h100-8b", "role": "any", "count": 1, "speculation": "off"},
]
WORKERS = ("worker-a10g-8b", "worker-h100-8b")


def _written(folder: Path) -> Path:
    file = folder / "plan.yaml"
    file.write_text(compose_text(MACHINES), encoding="utf-8")
    return file


def test_compose_file_of_a_plan_satisfies_the_specification(tmp_path: Path) -> None:
    """The file satisfies the schema of the Compose specification, and has the planned machines."""
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    file = _written(tmp_path)
    done = subprocess.run(
        [*checker, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    services = read(str(file))["services"]
    assert set(services) == {"redis", "gateway", *WORKERS}
    assert [services[name]["deploy"]["replicas"] for name in WORKERS] == [3, 1]
    assert "off" in services["worker-h100-8b"]["command"]


def test_model_and_secret_come_from_the_environment(tmp_path: Path) -> None:
    """The file contains neither a secret nor a checkpoint, and requires both."""
    file = str(_written(tmp_path))
    for missing in ("PEER_SECRET", "DRAFTGATE_MODEL"):
        given = {"PEER_SECRET": "x", "DRAFTGATE_MODEL": "m"}
        del given[missing]
        with pytest.raises(KeyError, match=missing):
            read(file, given)


def test_groups_of_gpus_are_refused() -> None:
    """A worker has one GPU, so a tensor-parallel group needs another engine."""
    assert worker_name("profiles/My GPU.json") == "worker-my-gpu"
    with pytest.raises(ValueError, match="tensor-parallel group"):
        compose_text([{**MACHINES[0], "profile": "a100x4-70b"}])


def test_manifests_of_a_plan_satisfy_the_schema(tmp_path: Path) -> None:
    """Each profile has a StatefulSet with the planned replicas, on nodes with its GPUs."""
    write_kubernetes(MACHINES, tmp_path / "plan")
    found = list(yaml.safe_load_all((tmp_path / "plan" / "workers.yaml").read_text()))
    for manifest, machine in zip(found, MACHINES, strict=True):
        kubernetes_validate.validate(manifest, "1.37", strict=True)
        assert manifest["spec"]["replicas"] == machine["count"]
        assert pod(manifest)["nodeSelector"] == {"draftgate.dev/profile": machine["profile"]}


def test_manifests_of_a_plan_replace_the_workers_of_the_base(tmp_path: Path) -> None:
    """The kustomization removes the base's workers and autoscaler, and keeps the rest of it."""
    write_kubernetes(MACHINES, tmp_path)
    written = kustomization(tmp_path)
    removed = {(one["target"]["kind"], one["target"]["name"]) for one in written["patches"]}
    assert removed == {("StatefulSet", "worker"), ("HorizontalPodAutoscaler", "worker")}
    assert removed <= manifests_of_kind("StatefulSet", "HorizontalPodAutoscaler").keys()
    ((_, base),) = manifests_of_kind("StatefulSet").items()
    for manifest in yaml.safe_load_all((tmp_path / "workers.yaml").read_text()):
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert base["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert manifest["spec"]["serviceName"] == base["spec"]["serviceName"]


def test_compose_and_kubernetes_start_the_same_command(tmp_path: Path) -> None:
    """The arguments differ only in how a node finds the cluster and drains."""
    services = read(str(_written(tmp_path)))["services"]
    for machine in MACHINES:
        (container,) = pod(stateful_set(machine))["containers"]
        command = services[worker_name(machine["profile"])]["command"]
        assert set(command) - set(container["args"]) == {"--join", "redis://redis:6379"}
        assert set(container["args"]) - set(command) == {"--drain-timeout-s", "60"}


@pytest.mark.long
async def test_planned_machines_work_as_plain_processes(tmp_path: Path) -> None:
    """The services start with simulated workers, and the gateway serves with all of them."""
    services = read(str(_written(tmp_path)))["services"]
    for name in WORKERS:
        profile = name.removeprefix("worker-")
        simulated = {"DRAFTGATE_BACKEND": "sim", "DRAFTGATE_PROFILE": profile}
        services[name]["environment"] |= {**simulated, "DRAFTGATE_MODEL": None}
    names = ["redis", *WORKERS, "gateway"]
    addresses = Addresses(free_ports(services, names))
    async with running(services, names, addresses, tmp_path) as started:
        url = f"http://127.0.0.1:{addresses.ports['gateway', '8000']}"
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as http, asyncio.timeout(60.0):
            while len((await http.get("/health")).json()["workers"]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            body = {"prompt": "def main():", "max_tokens": 8, "ignore_eos": True}
            response = await http.post("/v1/completions", json=body)
        assert response.json()["usage"]["completion_tokens"] == 8
        for service in reversed(started):
            assert await service.stop() == 0, service.log_tail()
