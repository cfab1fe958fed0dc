"""Tests of the alerts: in Prometheus, and against their runbooks."""

from __future__ import annotations

import asyncio
import re
import socket
import time
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import httpx
import yaml

from tests.deploy.compose import ROOT
from tests.deploy.programs import program, run
from tests.deploy.promql import ALERTS, alert_expressions, alerts, dashboard_expressions
from tests.gateway.harness import client, running

CASES = Path(__file__).with_name("alerts_test.yaml")
CONFIG = ROOT / "deploy" / "prometheus" / "prometheus.yaml"
RUNBOOKS = ROOT / "docs" / "guide" / "alerts.md"
READY_S = 60.0


def test_promtool_accepts_the_configuration_and_the_alerts() -> None:
    """The configuration of Prometheus and its alerts are valid."""
    assert f"{len(alerts())} rules found" in run("promtool", "check", "config", CONFIG)


def test_each_alert_fires_for_its_fault_and_none_for_healthy_nodes() -> None:
    """The cases of promtool pass, and they cover every alert."""
    run("promtool", "test", "rules", CASES)
    assert set(re.findall(r'alertname="(\w+)"', CASES.read_text())) == set(alerts())


def test_each_alert_has_a_runbook() -> None:
    """The page has a section for each alert, in the same order, and the alert links to it."""
    text = RUNBOOKS.read_text(encoding="utf-8")
    assert re.findall(r"^## (.*)$", text, re.MULTILINE) == list(alerts())
    for name, rule in alerts().items():
        page, anchor = rule["annotations"]["runbook_url"].split("#")
        assert page.endswith(RUNBOOKS.relative_to(ROOT).as_posix())
        assert anchor == name.lower()
        assert rule["annotations"]["summary"]
        assert rule["labels"]["severity"] in {"warning", "critical"}


@asynccontextmanager
async def prometheus(target: str, home: Path) -> AsyncIterator[httpx.AsyncClient]:
    """Run a Prometheus server with the alerts that scrapes a node as gateway and as worker."""
    server = program("prometheus")
    with socket.create_server(("127.0.0.1", 0)) as free:
        address = f"127.0.0.1:{free.getsockname()[1]}"
    job = {"scrape_interval": "500ms", "scrape_timeout": "500ms"}
    targets = [{"targets": [target]}]
    jobs = [{"job_name": n, "static_configs": targets, **job} for n in ("gateway", "worker")]
    config = home / "prometheus.yaml"
    config.write_text(yaml.safe_dump({"rule_files": [str(ALERTS)], "scrape_configs": jobs}))
    process = await asyncio.create_subprocess_exec(
        server,
        f"--config.file={config}",
        f"--storage.tsdb.path={home / 'data'}",
        f"--web.listen-address={address}",
        "--log.level=error",
    )
    try:
        async with httpx.AsyncClient(base_url=f"http://{address}") as http:
            yield http
    finally:
        process.terminate()
        await process.wait()


async def query(http: httpx.AsyncClient, expression: str) -> Any:
    """Return the result of an expression, or None if the server does not respond yet."""
    try:
        response = await http.get("/api/v1/query", params={"query": expression})
    except httpx.TransportError:
        return None
    if response.status_code == httpx.codes.SERVICE_UNAVAILABLE:
        return None
    assert response.is_success, response.text
    return response.json()["data"]["result"]


async def test_prometheus_finds_the_series_of_every_panel(tmp_path: Path) -> None:
    """A Prometheus server that scrapes a node has data for every query of the dashboard, and
    evaluates every alert."""
    async with (
        running() as gateway,
        client(gateway) as node,
        prometheus(gateway.url.removeprefix("http://"), tmp_path) as http,
    ):
        body = {"prompt": "def main():", "max_tokens": 32, "ignore_eos": True}
        assert (await node.post("/v1/completions", json=body)).is_success
        empty = dashboard_expressions()
        deadline = time.monotonic() + READY_S
        while empty and time.monotonic() < deadline:  # a rate needs two scrapes
            await asyncio.sleep(0.2)
            empty = [one for one in empty if not await query(http, one)]
        assert empty == []
        for expression in alert_expressions():
            assert await query(http, expression) is not None
        rules = (await http.get("/api/v1/rules")).json()["data"]["groups"]
        assert [rule["name"] for group in rules for rule in group["rules"]] == list(alerts())
