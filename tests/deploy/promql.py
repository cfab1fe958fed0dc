"""PromQL expressions of dashboard, alerts and autoscaler, and the series that they read."""

from __future__ import annotations

import json
import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import promql_parser as promql
import yaml

from tests.deploy.compose import ROOT

DASHBOARD = ROOT / "deploy" / "grafana" / "dashboards" / "draftgate.json"
ALERTS = ROOT / "deploy" / "prometheus" / "alerts.yaml"
ADAPTER = ROOT / "deploy" / "kubernetes" / "monitoring" / "adapter.yaml"

GRAFANA = {"$__rate_interval": "1m", "$__range": "15m"}
"""Variables that Grafana sets."""


@dataclass(frozen=True)
class SelectedSeries:
    """A series that an expression reads.

    Attributes:
        name: the name of the series.
        matched: the values by label, required or excluded.
        required: the required values by label.
    """

    name: str
    matched: dict[str, str]
    required: dict[str, str]


def dashboard() -> dict[str, Any]:
    """Return the Grafana dashboard."""
    return dict(json.loads(DASHBOARD.read_text(encoding="utf-8")))


def variables() -> dict[str, list[str]]:
    """Return the possible values of each variable that expressions of the dashboard may use."""
    listed = (v for v in dashboard()["templating"]["list"] if v["type"] == "custom")
    return {variable["name"]: variable["query"].split(",") for variable in listed}


def dashboard_expressions() -> list[str]:
    """Return every expression of the dashboard with the first value of each variable."""
    shown = (t["expr"] for panel in dashboard()["panels"] for t in panel.get("targets", []))
    values = {f"${name}": values[0] for name, values in variables().items()} | GRAFANA
    return [_substitute(expression, values) for expression in shown]


def alerts() -> dict[str, dict[str, Any]]:
    """Return the alerts by name."""
    (group,) = yaml.safe_load(ALERTS.read_text(encoding="utf-8"))["groups"]
    return {rule["alert"]: rule for rule in group["rules"]}


def alert_expressions() -> list[str]:
    """Return the expression of every alert."""
    return [rule["expr"] for rule in alerts().values()]


def adapter_expressions() -> list[str]:
    """Return every expression of the autoscaler's rules with the template fields substituted."""
    rules = yaml.safe_load(ADAPTER.read_text(encoding="utf-8"))["rules"]
    found = []
    for rule in rules["external"]:
        series = rule["seriesQuery"]
        templates = {
            "<<.Series>>": series.partition("{")[0],
            "<<.LabelMatchers>>": 'namespace="draftgate"',
            "<<.GroupBy>>": ",".join(rule["resources"]["overrides"]),
        }
        found += [series, _substitute(rule["metricsQuery"], templates)]
    return found


def _substitute(expression: str, values: dict[str, str]) -> str:
    pattern = re.compile("|".join(map(re.escape, sorted(values, key=len, reverse=True))))
    return pattern.sub(lambda match: values[match[0]], expression)


def selected_series(expression: str) -> Iterator[SelectedSeries]:
    """Yield every series that an expression reads.

    Raises:
        ValueError: if the expression is not PromQL.
    """
    for node in _nodes(promql.parse(expression)):
        if isinstance(node, promql.VectorSelector):
            matchers = node.matchers.matchers
            matched = {matcher.name: matcher.value for matcher in matchers}
            equal = promql.MatchOp.Equal
            required = {one.name: one.value for one in matchers if one.op == equal}
            yield SelectedSeries(node.name, matched, required)


def grouping_labels(expression: str) -> set[str]:
    """Return the labels by which an expression groups or joins."""
    modifiers = (getattr(node, "modifier", None) for node in _nodes(promql.parse(expression)))
    return {label for modifier in modifiers for label in getattr(modifier, "labels", None) or ()}


def _nodes(node: Any) -> Iterator[Any]:
    yield node
    children = [getattr(node, name, None) for name in ("expr", "param", "lhs", "rhs")]
    children += [getattr(node, "vector_selector", None), *(getattr(node, "args", None) or ())]
    for child in children:
        if child is not None:
            yield from _nodes(child)
