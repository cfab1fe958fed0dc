"""Tests of the Helm chart, and of the manifests that are rendered from it."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import kubernetes_validate
import pytest
import yaml

from draftgate import __version__
from draftgate.gateway.config import settings
from draftgate.gateway.telemetry.metric_definitions import DESIRED_WORKERS
from draftgate.lab.plan.deployment import Deployable, worker_name
from draftgate.lab.plan.kubernetes import BASE, write_kubernetes
from tests.deploy.compose import ROOT
from tests.deploy.kubernetes import FOLDER, RENDERED, Manifest, component, manifests, pod
from tests.deploy.programs import run
from tests.deploy.promql import adapter_expressions, selected_series

CHART = ROOT / "deploy" / "helm" / "draftgate"
CUSTOM = {"ScaledObject", "HTTPRoute", "PodMonitor", "PrometheusRule"}
"""Kinds that Kubernetes itself does not define."""


def render(*arguments: str, examples: tuple[str, ...] = ()) -> list[Manifest]:
    """Return the objects that helm renders with these examples and arguments."""
    files = [f"--values={CHART / 'examples' / name}.yaml" for name in examples]
    command = ("template", "draftgate", CHART, "--namespace", "draftgate", *files, *arguments)
    return [one for one in yaml.safe_load_all(run("helm", *command)) if one]


def of_kind(found: list[Manifest], kind: str) -> Manifest:
    """Return the only object of a kind."""
    (one,) = [manifest for manifest in found if manifest["kind"] == kind]
    return one


@pytest.fixture(scope="module")
def public() -> list[Manifest]:
    """The objects of an API with keys, with everything that the chart can add."""
    return render(examples=("public",))


def test_chart_has_the_version_of_the_package() -> None:
    """The chart and the application in it have the version of the package."""
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text(encoding="utf-8"))
    assert chart["version"] == chart["appVersion"] == __version__


@pytest.mark.parametrize("name", RENDERED)
def test_manifests_equal_what_the_chart_renders(name: str) -> None:
    """`make manifests` changes nothing, so Kustomize and Helm install the same objects."""
    assert render(examples=(name,)) == manifests(name)


@pytest.mark.parametrize("path", sorted((CHART / "examples").glob("*.yaml")), ids=lambda p: p.stem)
def test_chart_has_no_warnings(path: Path) -> None:
    """The chart with each example passes the strict checks of Helm."""
    run("helm", "lint", "--strict", "--quiet", CHART, "--values", path)


@pytest.mark.parametrize(
    ("values", "message"),
    [
        (("cluster.enabled=false", "redis.enabled=false"), "worker.enabled needs cluster.enabled"),
        (("cluster.enabled=false", "worker.enabled=false"), "redis.enabled needs cluster.enabled"),
        (
            ("cluster.enabled=false", "worker.enabled=false", "redis.enabled=false"),
            "set gateway.config.upstream",
        ),
        (("ingress.enabled=true",), "ingress.host is missing"),
        (("httpRoute.enabled=true",), "httpRoute.parentRefs is empty"),
        (("worker.autoscalling.kind=none",), "autoscalling"),
        (("worker.autoscaling.kind=vpa",), "must be one of"),
        (("gateway.config.upstraem=http://vllm:8000",), "upstraem"),
        (("worker.config.mdl=smollm2",), "mdl"),
    ],
)
def test_contradictory_and_unknown_values_are_refused(
    values: tuple[str, ...], message: str
) -> None:
    """The chart refuses values that install nothing useful, and names what to change."""
    settings = [f"--set={value}" for value in values]
    assert message in run("helm", "template", "draftgate", CHART, *settings, status=1)


def test_chart_knows_the_settings_of_nodes() -> None:
    """The schema of the values has every setting of a node, and no other."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    assert set(schema["definitions"]["settings"]["properties"]) == {
        setting.name for setting in settings()
    }


@pytest.mark.parametrize("version", ["1.29", "1.37"])
def test_every_object_of_a_public_api_satisfies_its_schema(
    public: list[Manifest], version: str
) -> None:
    """The objects of Kubernetes satisfy the official schemas, and the others are known kinds."""
    custom = {manifest["kind"] for manifest in public} & CUSTOM
    assert custom == CUSTOM
    for manifest in public:
        if manifest["kind"] not in CUSTOM:
            kubernetes_validate.validate(manifest, version, strict=True)


def test_routes_reach_the_service_of_the_gateways(public: list[Manifest]) -> None:
    """The Ingress and the HTTPRoute name the service of the gateways and its port."""
    (service,) = [one for one in public if one["kind"] == "Service" and component(one) == "gateway"]
    name, (port,) = service["metadata"]["name"], service["spec"]["ports"]
    (rule,) = of_kind(public, "Ingress")["spec"]["rules"]
    (path,) = rule["http"]["paths"]
    assert path["backend"]["service"] == {"name": name, "port": {"name": port["name"]}}
    (route,) = of_kind(public, "HTTPRoute")["spec"]["rules"]
    assert route["backendRefs"] == [{"name": name, "port": port["port"]}]
    assert route["timeouts"]["request"] == "0s"


def test_monitor_finds_the_pods_and_names_their_jobs(public: list[Manifest]) -> None:
    """The PodMonitor selects gateways and workers, and scrapes their port with a key."""
    spec = of_kind(public, "PodMonitor")["spec"]
    (endpoint,) = spec["podMetricsEndpoints"]
    nodes = [one for one in public if one["kind"] in {"Deployment", "StatefulSet"}]
    for node in nodes:
        labels = node["spec"]["template"]["metadata"]["labels"]
        assert spec["selector"]["matchLabels"].items() <= labels.items()
        ports = [port["name"] for one in pod(node)["containers"] for port in one["ports"]]
        assert (endpoint["port"] in ports) == (component(node) != "redis")
    (relabeling,) = endpoint["relabelings"]
    (label,) = relabeling["sourceLabels"]
    assert label == "__meta_kubernetes_pod_label_app_kubernetes_io_component"
    assert relabeling["targetLabel"] == "job"
    assert endpoint["authorization"]["credentials"]["name"] == "draftgate-api-keys"


def test_chart_has_the_alerts_and_the_dashboard(public: list[Manifest]) -> None:
    """The rule and the dashboard in the cluster are those of the other deployments."""
    alerts = yaml.safe_load((ROOT / "deploy/prometheus/alerts.yaml").read_text())
    assert of_kind(public, "PrometheusRule")["spec"] == alerts
    found = [one["data"]["draftgate.json"] for one in public if "dashboard" in str(one["metadata"])]
    dashboard = json.loads((ROOT / "deploy/grafana/dashboards/draftgate.json").read_text())
    assert list(map(json.loads, found)) == [dashboard]


def test_keda_and_the_autoscaler_of_kubernetes_follow_the_same_advice(
    public: list[Manifest],
) -> None:
    """KEDA reads the same maximum as prometheus-adapter, and scales with the same limits."""
    keda = of_kind(public, "ScaledObject")["spec"]
    (hpa,) = [
        one["spec"]
        for one in manifests("engine")
        if one["kind"] == "HorizontalPodAutoscaler" and component(one) == "worker"
    ]
    assert keda["scaleTargetRef"] == hpa["scaleTargetRef"]
    limits = (keda["minReplicaCount"], keda["maxReplicaCount"])
    assert limits == (hpa["minReplicas"], hpa["maxReplicas"])
    advanced = keda["advanced"]["horizontalPodAutoscalerConfig"]
    assert advanced["behavior"] == hpa["behavior"]
    (trigger,) = keda["triggers"]
    _, adapter = adapter_expressions()
    for expression in (trigger["metadata"]["query"], adapter):
        assert expression.startswith("max(")
        (series,) = selected_series(expression)
        assert series.name == DESIRED_WORKERS.name
        assert series.required == {"job": "gateway", "namespace": "draftgate"}
    (metric,) = hpa["metrics"]
    target = metric["external"]["target"]["averageValue"]
    assert target == trigger["metadata"]["threshold"] == "1"


def test_api_keys_are_mounted_where_nodes_read_them(public: list[Manifest]) -> None:
    """Each node reads the file of API keys from the mounted secret."""
    for node in (one for one in public if one["kind"] in {"Deployment", "StatefulSet"}):
        if component(node) == "redis":
            continue
        (container,) = pod(node)["containers"]
        file = {v["name"]: v.get("value") for v in container["env"]}["DRAFTGATE_API_KEYS_FILE"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        name = mounts[str(Path(str(file)).parent)]
        (volume,) = [one for one in pod(node)["volumes"] if one["name"] == name]
        assert volume["secret"]["secretName"] == "draftgate-api-keys"


@pytest.mark.parametrize("name", RENDERED)
def test_kustomize_builds_the_manifests_in_their_namespace(name: str) -> None:
    """`kubectl apply -k` applies every object of the folder in the namespace draftgate."""
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", FOLDER / name)))
    assert len(built) == len(manifests(name))
    assert {one["metadata"]["namespace"] for one in built} == {"draftgate"}


def test_kustomize_replaces_the_workers_by_those_of_a_plan(tmp_path: Path) -> None:
    """The kustomization of a plan builds: planned workers and policies, and no other workers."""
    machine: dict[str, Any] = {"profile": "a10g-8b", "role": "prefill", "count": 3}
    plan = Deployable([{**machine, "speculation": "off"}], "apart")
    write_kubernetes(plan, tmp_path / "plan")
    shutil.copytree(FOLDER / "engine", tmp_path / "engine")
    file = tmp_path / "plan" / "kustomization.yaml"
    file.write_text(file.read_text().replace(BASE, "../engine"))
    built = list(yaml.safe_load_all(run("kubectl", "kustomize", tmp_path / "plan")))
    workers = of_kind(built, "StatefulSet")
    assert workers["metadata"]["name"] == worker_name(plan.machines[0])
    scaled = of_kind(built, "HorizontalPodAutoscaler")["spec"]["scaleTargetRef"]
    assert scaled["kind"] == "Deployment"
    (gateway,) = [
        one for one in built if one["kind"] == "Deployment" and component(one) == "gateway"
    ]
    (container,) = pod(gateway)["containers"]
    variables = {one["name"]: one.get("value") for one in container["env"]}
    assert plan.policies.items() <= variables.items()
    assert {"DRAFTGATE_JOIN", "PEER_SECRET"} <= variables.keys()
