"""Tests that the Kubernetes manifests are valid, confined and consistent."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml
from aiohttp import web

from draftgate.gateway.app import CLOSE_S
from draftgate.gateway.config.reading import effective_config
from draftgate.gateway.node import Node
from draftgate.gateway.routes import build_app
from draftgate.gateway.telemetry.metric_definitions import DESIRED_WORKERS
from tests.deploy.kubernetes import (
    FOLDER,
    RENDERED,
    Manifest,
    component,
    kustomization,
    manifests,
    manifests_of_kind,
    pod,
    workloads,
)
from tests.gateway.harness import running

VERSIONS = ("1.29", "1.37")
"""Oldest and newest supported version of Kubernetes."""

WORKLOADS = workloads()
NODES = {key: value for key, value in WORKLOADS.items() if key[1] in {"gateway", "worker"}}


def _id(key: object) -> str:
    return "-".join(key) if isinstance(key, tuple) else str(key)


def _labels(workload: Manifest) -> dict[str, str]:
    return dict(workload["spec"]["template"]["metadata"]["labels"])


def _selected(selector: dict[str, str]) -> list[str]:
    """Return the names of the workloads whose pods have these labels."""
    found = (name for (_, name), w in WORKLOADS.items() if selector.items() <= _labels(w).items())
    return list(found)


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RENDERED)
def test_manifests_satisfy_the_schemas_of_their_kinds(name: str, version: str) -> None:
    """The manifests satisfy the official schemas without unknown fields."""
    found = manifests(name)
    assert found
    for manifest in found:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("name", RENDERED)
def test_settings_of_nodes_exist(name: str, tmp_path: Path) -> None:
    """The files of settings in the manifests have valid keys and values."""
    files = [one["data"]["config.yaml"] for one in manifests(name) if one["kind"] == "ConfigMap"]
    assert files
    for text in files:
        (tmp_path / "config.yaml").write_text(text, encoding="utf-8")
        effective_config({}, {}, str(tmp_path / "config.yaml"))


@pytest.mark.parametrize("name", RENDERED)
def test_kustomization_lists_the_rendered_manifests(name: str) -> None:
    """Each folder has the manifests and their kustomization, and no other file."""
    folder = FOLDER / name
    assert {path.name for path in folder.iterdir()} == {"kustomization.yaml", "manifests.yaml"}
    assert kustomization(folder)["resources"] == ["manifests.yaml"]


def test_gateways_in_front_of_upstreams_run_alone() -> None:
    """The manifests `gateway-only` have neither Redis nor workers nor a secret, but an upstream."""
    found = manifests("gateway-only")
    assert {component(manifest) for manifest in found} == {"gateway"}
    assert "secretKeyRef" not in str(found)
    (config,) = [manifest for manifest in found if manifest["kind"] == "ConfigMap"]
    assert yaml.safe_load(config["data"]["config.yaml"])["upstream"]


@pytest.mark.parametrize("key", WORKLOADS, ids=_id)
def test_pod_satisfies_the_restricted_security_level(key: tuple[str, str]) -> None:
    """The pod satisfies the restricted level, has a read-only root and no API token."""
    spec = pod(WORKLOADS[key])
    assert spec["automountServiceAccountToken"] is False
    # Service links would set DRAFTGATE_ variables for the services.
    assert spec["enableServiceLinks"] is False
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
def test_pod_has_requests_a_memory_limit_and_probes(key: tuple[str, str]) -> None:
    """Each container has resource requests, a memory limit and liveness and readiness probes."""
    for container in pod(WORKLOADS[key])["containers"]:
        assert {"cpu", "memory"} <= set(container["resources"]["requests"])
        assert "memory" in container["resources"]["limits"]
        assert {"livenessProbe", "readinessProbe"} <= set(container)


@pytest.mark.parametrize("key", NODES, ids=_id)
async def test_probes_use_endpoints_of_the_node(key: tuple[str, str]) -> None:
    """The liveness probe uses `/health`, and the readiness probe uses `/ready`."""
    (container,) = pod(NODES[key])["containers"]
    async with running() as gateway:
        paths = {route.resource.canonical for route in _routes(gateway.node)}
    ports = {port["name"] for port in container["ports"]}
    requested = {kind: container[kind]["httpGet"] for kind in container if kind.endswith("Probe")}
    assert {kind: get["path"] for kind, get in requested.items()} == {
        "startupProbe": "/health",
        "livenessProbe": "/health",
        "readinessProbe": "/ready",
    }
    assert {get["path"] for get in requested.values()} <= paths
    assert {get["port"] for get in requested.values()} <= ports


def _routes(node: Node) -> list[Any]:
    app: web.Application = build_app(node)
    return [route for route in app.router.routes() if route.resource is not None]


@pytest.mark.parametrize("key", NODES, ids=_id)
def test_termination_grace_period_covers_draining(key: tuple[str, str]) -> None:
    """The grace period covers preStop, the drain timeout and the closing of connections."""
    spec = pod(NODES[key])
    (container,) = spec["containers"]
    sleep, pause_s = container["lifecycle"]["preStop"]["exec"]["command"]
    assert sleep == "sleep"
    arguments = container["args"]
    drain_s = float(arguments[arguments.index("--drain-timeout-s") + 1])
    needed_s = float(pause_s) + drain_s + 2 * CLOSE_S
    assert spec["terminationGracePeriodSeconds"] >= needed_s


@pytest.mark.parametrize("key", NODES, ids=_id)
def test_node_listens_on_the_port_of_its_container(key: tuple[str, str]) -> None:
    """The flag `--port` equals the container port."""
    (container,) = pod(NODES[key])["containers"]
    arguments = container["args"]
    (port,) = container["ports"]
    assert str(port["containerPort"]) == arguments[arguments.index("--port") + 1]


def test_selectors_match_the_labels_of_pods() -> None:
    """Each service, budget and policy selects one workload, and each workload selects its pods."""
    for key, manifest in manifests_of_kind(
        "Service", "PodDisruptionBudget", "NetworkPolicy"
    ).items():
        spec = manifest["spec"]
        selector = spec.get("podSelector") or spec["selector"]
        assert len(_selected(selector.get("matchLabels", selector))) == 1, key
    for (_, name), workload in WORKLOADS.items():
        assert _selected(workload["spec"]["selector"]["matchLabels"]) == [name]


def test_ports_of_services_and_policies_exist() -> None:
    """Each port of a service or policy is a port of the selected containers."""
    for manifest in manifests_of_kind("Service").values():
        (name,) = _selected(manifest["spec"]["selector"])
        named = {port["targetPort"] for port in manifest["spec"]["ports"]}
        assert named <= _ports(name)
    for manifest in manifests_of_kind("NetworkPolicy").values():
        (name,) = _selected(manifest["spec"]["podSelector"]["matchLabels"])
        for rule in manifest["spec"]["ingress"]:
            assert {port["port"] for port in rule["ports"]} <= _ports(name)


def _ports(workload: str) -> set[str]:
    (found,) = (value for (_, name), value in WORKLOADS.items() if name == workload)
    return {port["name"] for container in pod(found)["containers"] for port in container["ports"]}


def test_workers_have_a_headless_service() -> None:
    """The workers have a headless service, which gives each worker an address."""
    workers = WORKLOADS["StatefulSet", "worker"]
    service = manifests_of_kind("Service")["Service", "worker"]
    assert service["metadata"]["name"] == workers["spec"]["serviceName"]
    assert service["spec"]["clusterIP"] == "None"
    assert service["spec"]["selector"] == workers["spec"]["selector"]["matchLabels"]


def test_only_autoscalers_set_the_number_of_nodes() -> None:
    """Each node workload has an autoscaler and no replica count."""
    targets = []
    for scaler in manifests_of_kind("HorizontalPodAutoscaler").values():
        target = scaler["spec"]["scaleTargetRef"]
        targets.append((target["kind"], target["name"].removeprefix("draftgate-")))
        assert "replicas" not in WORKLOADS[targets[-1]]["spec"]
    assert sorted(targets) == sorted(NODES)


def test_workers_scale_to_the_largest_advice_of_the_gateways() -> None:
    """The autoscaler runs as many workers as the adapter's metric, the largest advice, says."""
    (rule,) = yaml.safe_load((FOLDER / "monitoring" / "adapter.yaml").read_text())["rules"][
        "external"
    ]
    assert rule["metricsQuery"].startswith("max(")
    scalers = manifests_of_kind("HorizontalPodAutoscaler")
    (metric,) = scalers["HorizontalPodAutoscaler", "worker"]["spec"]["metrics"]
    assert metric["external"]["metric"]["name"] == rule["name"]["as"] == DESIRED_WORKERS.name
    assert metric["external"]["target"] == {"type": "AverageValue", "averageValue": "1"}


def test_one_secret_holds_all_credentials() -> None:
    """Pods read all credentials from one secret that the guide creates and no manifest contains."""
    read = set()
    for workload in WORKLOADS.values():
        for container in pod(workload)["containers"]:
            for variable in container["env"]:
                reference = variable.get("valueFrom", {}).get("secretKeyRef")
                if reference is not None:
                    assert reference["name"] == "draftgate"
                    read.add(reference["key"])
    assert not manifests_of_kind("Secret")
    guide = (FOLDER.parents[1] / "docs" / "guide" / "deployment.md").read_text(encoding="utf-8")
    assert read == {"join", "peer-secret", "redis-password", "hf-token"}
    assert all(f"--from-literal={key}=" in guide for key in read - {"hf-token"})
