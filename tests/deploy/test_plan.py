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

from draftgate.lab.plan.deployment import Deployable, compose_text, worker_name
from draftgate.lab.plan.kubernetes import stateful_set, write_kubernetes
from tests.deploy.compose import read
from tests.deploy.kubernetes import component, kustomization, manifests_of_kind, pod
from tests.deploy.processes import Addresses, free_ports, running


def _machine(profile: str, role: str, count: int, speculation: str) -> dict[str, Any]:
    return {"profile": profile, "role": role, "count": count, "speculation": speculation}


MIX = Deployable([_machine("a10g-8b", "any", 3, "auto"), _machine("h100-8b", "any", 1, "off")])
POOLS = Deployable(
    [_machine("a10g-8b", "prefill", 1, "off"), _machine("a10g-8b", "decode", 2, "auto")], "apart"
)
plans = pytest.mark.parametrize("planned", [MIX, POOLS], ids=["mix", "pools"])


def _written(folder: Path, planned: Deployable = MIX) -> Path:
    file = folder / "plan.yaml"
    file.write_text(compose_text(planned), encoding="utf-8")
    return file


@plans
def test_compose_file_of_a_plan_satisfies_the_specification(
    tmp_path: Path, planned: Deployable
) -> None:
    """The file satisfies the schema of the Compose specification, and has the planned machines."""
    checker = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec"]
    file = _written(tmp_path, planned)
    done = subprocess.run(
        [*checker, str(file)], capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stdout + done.stderr
    services = read(str(file))["services"]
    assert set(services) == {"redis", "gateway", *map(worker_name, planned.machines)}
    for machine in planned.machines:
        service = services[worker_name(machine)]
        flags = dict(zip(service["command"], service["command"][1:], strict=False))
        assert service["deploy"]["replicas"] == machine["count"]
        assert (flags["--role"], flags["--speculation"]) == (
            machine["role"],
            machine["speculation"],
        )
    policies = services["gateway"]["environment"]
    assert policies["DRAFTGATE_PHASES"] == planned.phases
    assert policies["DRAFTGATE_SPECULATION"] == "auto"


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
    assert worker_name(_machine("profiles/My GPU.json", "any", 1, "off")) == "worker-my-gpu"
    with pytest.raises(ValueError, match="tensor-parallel group"):
        compose_text(Deployable([_machine("a100x4-70b", "any", 1, "off")]))


def test_different_gpus_that_divide_the_phases_are_refused() -> None:
    """Workers on different GPUs do not exchange KV blocks, so they cannot divide the phases."""
    machines = [_machine("h100-8b", "prefill", 1, "off"), _machine("a100-8b", "decode", 1, "off")]
    with pytest.raises(ValueError, match="do not exchange KV blocks"):
        Deployable.from_plan({"machines": machines, "phases": "splitwise"})
    assert Deployable.from_plan({"machines": machines, "phases": "together"}).machines == machines
    with pytest.raises(ValueError, match="no machines"):
        Deployable.from_plan({"machines": [], "phases": None})


@plans
def test_manifests_of_a_plan_satisfy_the_schema(tmp_path: Path, planned: Deployable) -> None:
    """Each profile and role has a StatefulSet of its own, on nodes with its GPUs."""
    write_kubernetes(planned, tmp_path / "plan")
    found = list(yaml.safe_load_all((tmp_path / "plan" / "workers.yaml").read_text()))
    for manifest, machine in zip(found, planned.machines, strict=True):
        kubernetes_validate.validate(manifest, "1.37", strict=True)
        assert manifest["spec"]["replicas"] == machine["count"]
        assert pod(manifest)["nodeSelector"] == {"draftgate.dev/profile": machine["profile"]}
    selectors = [one["spec"]["selector"]["matchLabels"] for one in found]
    assert selectors[0] != selectors[1]


def test_manifests_of_a_plan_replace_the_workers_of_the_base(tmp_path: Path) -> None:
    """The kustomization removes the base's workers and autoscaler, and keeps the rest of it."""
    write_kubernetes(MIX, tmp_path)
    *removals, _ = kustomization(tmp_path)["patches"]
    removed = {(one["target"]["kind"], one["target"]["name"]) for one in removals}
    existing = manifests_of_kind("StatefulSet", "HorizontalPodAutoscaler").values()
    workers = {
        (one["kind"], one["metadata"]["name"]) for one in existing if component(one) == "worker"
    }
    assert removed == workers
    assert len(removed) == 2
    ((_, base),) = manifests_of_kind("StatefulSet").items()
    for manifest in yaml.safe_load_all((tmp_path / "workers.yaml").read_text()):
        labels = manifest["spec"]["template"]["metadata"]["labels"]
        assert base["spec"]["selector"]["matchLabels"].items() <= labels.items()
        assert manifest["spec"]["serviceName"] == base["spec"]["serviceName"]


def test_gateways_of_the_base_get_the_planned_policies(tmp_path: Path) -> None:
    """The patch names the container of the base, and sets the same variables as Compose."""
    write_kubernetes(POOLS, tmp_path)
    patch = yaml.safe_load(kustomization(tmp_path)["patches"][-1]["patch"])
    base = manifests_of_kind("Deployment")["Deployment", "gateway"]
    assert patch["metadata"]["name"] == base["metadata"]["name"]
    (container,), (known,) = pod(patch)["containers"], pod(base)["containers"]
    assert container["name"] == known["name"]
    assert {one["name"]: one["value"] for one in container["env"]} == POOLS.policies


@plans
def test_compose_and_kubernetes_start_the_same_command(tmp_path: Path, planned: Deployable) -> None:
    """The arguments differ only in how a node finds the cluster and drains."""
    services = read(str(_written(tmp_path, planned)))["services"]
    for machine in planned.machines:
        (container,) = pod(stateful_set(machine))["containers"]
        command = services[worker_name(machine)]["command"]
        assert set(command) - set(container["args"]) == {"--join", "redis://redis:6379"}
        assert set(container["args"]) - set(command) == {"--drain-timeout-s", "60"}


@pytest.mark.long
@plans
async def test_planned_machines_work_as_plain_processes(
    tmp_path: Path, planned: Deployable
) -> None:
    """The services start with simulated workers, and the gateway serves with all of them."""
    services = read(str(_written(tmp_path, planned)))["services"]
    names = {worker_name(machine): machine for machine in planned.machines}
    for name, machine in names.items():
        simulated = {"DRAFTGATE_BACKEND": "sim", "DRAFTGATE_PROFILE": machine["profile"]}
        services[name]["environment"] |= {**simulated, "DRAFTGATE_MODEL": None}
    started_names = ["redis", *names, "gateway"]
    addresses = Addresses(free_ports(services, started_names))
    async with running(services, started_names, addresses, tmp_path) as started:
        url = f"http://127.0.0.1:{addresses.ports['gateway', '8000']}"
        async with httpx.AsyncClient(base_url=url, timeout=60.0) as http, asyncio.timeout(60.0):
            while len((await http.get("/health")).json()["workers"]) < 2:  # noqa: ASYNC110
                await asyncio.sleep(0.1)
            body = {"prompt": "def main():", "max_tokens": 8, "ignore_eos": True}
            response = await http.post("/v1/completions", json=body)
            workers = (await http.get("/workers")).json()["workers"]
            decisions = (await http.get("/decisions")).json()["decisions"]
        assert response.json()["usage"]["completion_tokens"] == 8
        assert sorted(one["role"] for one in workers) == sorted(
            machine["role"] for machine in planned.machines
        )
        found = {phases["decode_worker_id"] for one in decisions if (phases := one["phases"])}
        assert found - {""} == {one["worker_id"] for one in workers if one["role"] == "decode"}, (
            decisions
        )
        for service in reversed(started):
            assert await service.stop() == 0, service.log_tail()
