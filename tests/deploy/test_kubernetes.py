"""The Kubernetes manifests: valid, confined, and consistent with one another and with the node."""

from __future__ import annotations

from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiohttp import web

from draftgate.gateway.app import CLOSE_S
from draftgate.gateway.http.routes import build_app
from draftgate.gateway.node import Node
from tests.deploy.kubernetes import (
    BASE,
    FOLDER,
    Manifest,
    kustomization,
    manifests,
    of_kind,
    pod,
    workloads,
)
from tests.gateway.harness import running

VERSIONS = ("1.29", "1.37")
"""The first and the last that the manifests are meant for."""

WORKLOADS = workloads()
NODES = {key: value for key, value in WORKLOADS.items() if key[1] in {"gateway", "worker"}}


def _key(manifest: Manifest) -> str:
    return f"{manifest['kind']}-{manifest['metadata']['name']}"


def _id(key: object) -> str:
    return "-".join(key) if isinstance(key, tuple) else str(key)


def _labels(workload: Manifest) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def _selected(selector: dict[str, str]) -> list[str]:
    """Names of the workloads whose pods have these labels."""
    found = (name for (_, name), w in WORKLOADS.items() if selector.items() <= _labels(w).items())
    return list(found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("manifest", manifests(), ids=_key)
def test_it_is_what_kubernetes_takes(manifest: Manifest, version: str) -> None:
    """Every object satisfies the official schema of its kind, without unknown fields."""
    kubernetes_validate.validate(manifest, version, strict=True)


def test_every_file_is_used() -> None:
    """No manifest lies beside the kustomization, unapplied."""
    for folder, beside in ((BASE, set()), (FOLDER / "gpu", {"workers.yaml"})):
        there = {path.name for path in folder.glob("*.yaml")} - {"kustomization.yaml"}
        named = set(kustomization(folder)["resources"]) - {"../base"}
        assert there - beside == named
        assert {p["path"] for p in kustomization(folder).get("patches", [])} == beside


@pytest.mark.parametrize("key", WORKLOADS, ids=_id)
def test_a_pod_has_no_more_rights_than_it_needs(key: tuple[str, str]) -> None:
    """What Pod Security's level `restricted` asks for, a read-only root, no token of the API."""
    spec = pod(WORKLOADS[key])
    assert spec["automountServiceAccountToken"] is False
    assert spec["enableServiceLinks"] is False  # else it sets DRAFTGATE_... for its own services
    assert spec["securityContext"]["runAsNonRoot"] is True
    assert spec["securityContext"]["runAsUser"] > 0
    assert spec["securityContext"]["seccompProfile"] == {"type": "RuntimeDefault"}
    for container in spec["containers"]:
        assert container["securityContext"] == {
            "allowPrivilegeEscalation": False,
            "readOnlyRootFilesystem": True,
            "capabilities": {"drop": ["ALL"]},
        }


@pytest.mark.parametrize("key", WORKLOADS, ids=_id)
def test_a_pod_is_bounded_and_probed(key: tuple[str, str]) -> None:
    """It states what it needs, cannot take all memory, and has probes for life and readiness."""
    for container in pod(WORKLOADS[key])["containers"]:
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert {"livenessProbe", "readinessProbe"} <= set(container)


@pytest.mark.parametrize("key", NODES, ids=_id)
async def test_probes_ask_what_the_node_answers(key: tuple[str, str]) -> None:
    """Life and start are judged by /health, which is about the process alone, traffic by /ready."""
    (container,) = pod(NODES[key])["containers"]
    async with running() as where:
        paths = {route.resource.canonical for route in _routes(where.node)}
    ports = {port["name"] for port in container["ports"]}
    asked = {kind: container[kind]["httpGet"] for kind in container if kind.endswith("Probe")}
    assert {kind: get["path"] for kind, get in asked.items()} == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert {get["path"] for get in asked.values()} <= paths
    assert {get["port"] for get in asked.values()} <= ports


def _routes(node: Node) -> list[Any]:
    app: web.Application = build_app(node)
    return [route for route in app.router.routes() if route.resource is not None]


@pytest.mark.parametrize("key", NODES, ids=_id)
def test_a_pod_has_the_time_to_drain(key: tuple[str, str]) -> None:
    """Kubernetes waits as long as preStop, the drain timeout and the closing take together."""
    spec = pod(NODES[key])
    (container,) = spec["containers"]
    sleep, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    arguments = container["args"]
    drain_s = float(arguments[arguments.index("--drain-timeout-s") + 1])
    needed_s = float(pause_s) + drain_s + 2 * CLOSE_S
    assert spec["terminationGracePeriodSeconds"] >= needed_s


@pytest.mark.parametrize("key", NODES, ids=_id)
def test_a_pod_keeps_to_its_port(key: tuple[str, str]) -> None:
    """The node listens where its container says."""
    (container,) = pod(NODES[key])["containers"]
    arguments = container["args"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == arguments[arguments.index("--port") + 1]


def test_whoever_selects_pods_finds_them() -> None:
    """Services, budgets and policies select one workload each; a workload selects its own pods."""
    for key, manifest in of_kind("Service", "PodDisruptionBudget", "NetworkPolicy").items():
        spec = manifest["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        assert len(_selected(selector.get("matchLabels", selector))) == 1, key
    for (_, name), workload in WORKLOADS.items():
        assert _selected(workload["spec"]["selector"]["matchLabels"]) == [name]


def test_services_reach_the_ports_of_their_pods() -> None:
    """Every port that a service or a policy names is one of the containers it leads to."""
    for manifest in of_kind("Service").values():
        (name,) = _selected(manifest["spec"]["selector"])
        named = {port["targetPort"] for port in manifest["spec"]["ports"]}
        assert named <= _ports(name)
    for manifest in of_kind("NetworkPolicy").values():
        (name,) = _selected(manifest["spec"]["podSelector"]["matchLabels"])
        for rule in manifest["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= _ports(name)


def _ports(workload: str) -> set[str]:
    (found,) = (value for (_, name), value in WORKLOADS.items() if name == workload)
    return {port["name"] for container in pod(found)["containers"] for port in container["ports"]}


def test_workers_have_a_headless_service() -> None:
    """The set's own service gives every worker an address, and spreads nothing."""
    workers = WORKLOADS["StatefulSet", "worker"]
    service = of_kind("Service")["Service", workers["spec"]["serviceName"]]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == workers["spec"]["selector"]["matchLabels"]


def test_autoscalers_own_the_number_of_nodes() -> None:
    """Each node workload has one autoscaler, and no number of its own that would fight it."""
    targets = []
    for scaler in of_kind("HorizontalPodAutoscaler").values():
        target = scaler["spec"]["scaleTargetRef"]
        targets.append((target["kind"], target["name"]))
        assert "replicas" not in WORKLOADS[targets[-1]]["spec"]
    assert sorted(targets) == sorted(NODES)


def test_the_workers_scale_by_what_the_adapter_tells() -> None:
    """Queue and price have a rule of the adapter each, under the name the autoscaler asks for."""
    rules = yaml.safe_load((FOLDER / "monitoring" / "adapter.yaml").read_text())["rules"]
    told = {kind: {rule["name"]["as"] for rule in rules[kind]} for kind in ("custom", "external")}
    metrics = of_kind("HorizontalPodAutoscaler")["HorizontalPodAutoscaler", "worker"]["spec"]
    asked = {m["type"]: m[m["type"].lower()]["metric"]["name"] for m in metrics["metrics"]}
    assert {asked["Pods"]} == told["custom"]
    assert {asked["External"]} == told["external"]


def test_one_secret_holds_all_that_is_secret() -> None:
    """What documentation tells to create is what the pods read, and none of it is in the files."""
    read = set()
    for workload in WORKLOADS.values():
        for container in pod(workload)["containers"]:
            for variable in container["env"]:
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference is not None:
                    assert reference["name"] == "draftgate"
                    read.add(reference["key"])
    assert not of_kind("Secret")
    told = (FOLDER.parents[1] / "docs" / "guide" / "deployment.md").read_text(encoding="utf-8")
    assert read == {"join", "peer-secret", "redis-password"}
    assert all(f"--from-literal={key}=" in told for key in read)
