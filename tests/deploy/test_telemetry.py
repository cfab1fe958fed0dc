"""Tests that dashboards, scrapes and rules use existing metrics and addresses."""

from __future__ import annotations

import asyncio
import re
from collections import defaultdict
from typing import Any

import pytest
import yaml
from prometheus_client.parser import text_string_to_metric_families

from draftgate.gateway.telemetry.ending import Ending
from draftgate.gateway.telemetry.metric_definitions import METRICS
from draftgate.gateway.telemetry.metric_form import Kind
from tests.deploy.compose import ROOT, services
from tests.deploy.kubernetes import workloads
from tests.deploy.promql import (
    adapter_expressions,
    alert_expressions,
    dashboard,
    dashboard_expressions,
    grouping_labels,
    selected_series,
    variables,
)
from tests.gateway.harness import client, running

DEPLOY = ROOT / "deploy"
EXPRESSIONS = [*dashboard_expressions(), *alert_expressions(), *adapter_expressions()]
PROVISIONED = "grafana/provisioning/datasources/datasources.yaml"
PROMETHEUS_LABELS = {"job", "instance", "namespace", "pod"}
"""Labels that Prometheus adds when it scrapes a target."""


def _yaml(path: str) -> Any:
    return yaml.safe_load((DEPLOY / path).read_text(encoding="utf-8"))


@pytest.fixture(scope="module")
def exported() -> dict[str, set[str]]:
    """The labels of each series that a node exports on `/metrics`, by series name."""
    labels: defaultdict[str, set[str]] = defaultdict(set)
    for family in text_string_to_metric_families(asyncio.run(_page())):
        for sample in family.samples:
            labels[sample.name] |= set(sample.labels)
    return labels


async def _page() -> str:
    """Return the metrics page of a node that has recorded each metric once."""
    async with running() as gateway, client(gateway) as http:
        metrics = gateway.node.metrics
        for metric in METRICS:
            if metric.of_worker is None and metric.labels:
                record = metrics.observe if metric.kind is Kind.HISTOGRAM else metrics.add
                record(metric, 1.0, *("x" for _ in metric.labels))
        return (await http.get("/metrics")).text


@pytest.mark.parametrize("expression", EXPRESSIONS)
def test_expression_reads_series_that_nodes_export(
    expression: str, exported: dict[str, set[str]]
) -> None:
    """Each series of the expression exists and has the labels that the expression uses."""
    found = list(selected_series(expression))
    assert found
    found = [series for series in found if series.name != "up"]  # of Prometheus itself
    for series in found:
        assert series.name in exported
        assert set(series.matched) <= exported[series.name] | PROMETHEUS_LABELS
    labels = set[str]().union(*(exported[series.name] for series in found))
    assert grouping_labels(expression) <= labels | PROMETHEUS_LABELS


@pytest.fixture(scope="module")
def at_start() -> dict[str, list[dict[str, str]]]:
    """The labels of each sample on the page of a node without requests, by series name."""

    async def page() -> str:
        async with running() as gateway, client(gateway) as http:
            return (await http.get("/metrics")).text

    samples: defaultdict[str, list[dict[str, str]]] = defaultdict(list)
    for family in text_string_to_metric_families(asyncio.run(page())):
        for sample in family.samples:
            samples[sample.name].append(sample.labels)
    return samples


@pytest.mark.parametrize("expression", dashboard_expressions())
def test_panel_finds_its_series_before_the_first_request(
    expression: str, at_start: dict[str, list[dict[str, str]]]
) -> None:
    """A node without requests exports each series of the dashboard with the required labels."""
    for series in selected_series(expression):
        required = {
            label: value
            for label, value in series.required.items()
            if label not in PROMETHEUS_LABELS
        }
        assert any(required.items() <= labels.items() for labels in at_start[series.name])


def test_dashboard_thresholds_are_bucket_bounds() -> None:
    """Each threshold of the dashboard is a bucket bound, because other values give an empty
    share."""
    bounds = {f.name: {repr(float(bound)) for bound in f.buckets} for f in METRICS}
    offered = variables()
    assert set(offered["ttft_s"]) <= bounds["draftgate_time_to_first_token_seconds"]
    assert set(offered["tpot_s"]) <= bounds["draftgate_time_per_output_token_seconds"]
    for variable in dashboard()["templating"]["list"]:
        if variable["type"] == "custom":
            assert variable["current"]["value"] in offered[variable["name"]]


def test_outcomes_of_the_dashboard_exist() -> None:
    """The dashboard filters only by existing request outcomes."""
    used_values = {
        value
        for expression in dashboard_expressions()
        for series in selected_series(expression)
        for value in series.matched.get("outcome", "").split("|")
    }
    assert used_values - {""} <= {ending.value for ending in Ending}
    assert used_values - {""}


def test_dashboard_can_be_imported_and_provisioned() -> None:
    """An import asks for the source DS_PROMETHEUS. A provisioned dashboard, whose inputs Grafana
    ignores, has a variable of this name, which begins with the source of compose."""
    (needed,) = dashboard()["__inputs"]
    variable = dashboard()["templating"]["list"][0]
    assert needed["name"] == variable["name"] == "DS_PROMETHEUS"
    assert needed["type"] == variable["type"] == "datasource"
    (source,) = [one for one in _yaml(PROVISIONED)["datasources"] if one.get("isDefault")]
    assert needed["pluginId"] == variable["query"] == source["type"]
    assert variable["current"]["value"] == source["uid"]


def test_panels_do_not_overlap_and_have_a_source() -> None:
    """Each panel has a unique id, a place of its own and the data source of the dashboard."""
    panels = dashboard()["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    taken: set[tuple[int, int]] = set()
    for panel in panels:
        at = panel["gridPos"]
        cells = {
            (x, y)
            for x in range(at["x"], at["x"] + at["w"])
            for y in range(at["y"], at["y"] + at["h"])
        }
        assert max(x for x, _ in cells) < 24
        assert not taken & cells, panel["title"]
        taken |= cells
        assert panel["type"] == "row" or panel["datasource"]["uid"] == "${DS_PROMETHEUS}"


def test_addresses_of_scrapes_and_exporters_are_exposed() -> None:
    """Each scrape and exporter address names a compose service and an exposed port."""
    exposed = {(name, port) for name, s in services().items() for port in s.get("expose", [])}
    collector = _yaml("otel-collector.yaml")
    named = [
        target
        for job in _yaml("prometheus/prometheus.yaml")["scrape_configs"]
        for config in job["static_configs"]
        for target in config["targets"]
    ]
    named += [source["url"] for source in _yaml(PROVISIONED)["datasources"]]
    named += [exporter["endpoint"] for exporter in collector["exporters"].values()]
    for service in services().values():
        named += [service.get("environment", {}).get("DRAFTGATE_OTLP_ENDPOINT")]
    addresses = [tuple(name.removeprefix("http://").split(":")) for name in named if name]
    assert len(addresses) >= 9
    assert set(addresses) <= exposed


def test_expressions_use_the_job_names_of_prometheus() -> None:
    """The expressions use the job names of compose and Kubernetes."""
    used_values = {
        job
        for expression in EXPRESSIONS
        for series in selected_series(expression)
        for job in series.matched.get("job", "gateway").split("|")
    }
    assert used_values == {"gateway", "worker"}
    jobs = {
        job["job_name"]: job["static_configs"][0]["targets"]
        for job in _yaml("prometheus/prometheus.yaml")["scrape_configs"]
    }
    assert jobs["gateway"] == ["gateway:8000"]
    workers = {f"{name}:8000" for name in services() if name.startswith("worker-")}
    assert set(jobs["worker"]) == workers
    component = "app.kubernetes.io/component"
    (job,) = _yaml("kubernetes/monitoring/scrape.yaml")["scrape_configs"]
    source = "__meta_kubernetes_pod_label_" + re.sub(r"\W", "_", component)
    assert {"source_labels": [source], "target_label": "job"} in job["relabel_configs"]
    nodes = (workload for (_, name), workload in workloads().items() if name != "redis")
    assert {node["metadata"]["labels"][component] for node in nodes} == used_values


def test_pipelines_of_the_collector_are_complete() -> None:
    """The pipelines name existing components, and compose exposes their ports."""
    config = _yaml("otel-collector.yaml")
    used = {
        (kind, name)
        for pipeline in config["service"]["pipelines"].values()
        for kind, names in pipeline.items()
        for name in names
    }
    kinds = ("receivers", "processors", "exporters")
    assert used == {(kind, name) for kind in kinds for name in config[kind]}
    endpoints = [config["receivers"]["otlp"]["protocols"]["http"]["endpoint"]]
    (reader,) = config["service"]["telemetry"]["metrics"]["readers"]
    own = reader["pull"]["exporter"]["prometheus"]
    endpoints.append(f"{own['host']}:{own['port']}")
    exposed = services()["otel-collector"]["expose"]
    assert sorted(endpoints) == sorted(f"0.0.0.0:{port}" for port in exposed)
