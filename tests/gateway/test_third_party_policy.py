"""Tests of the policy in docs/design/policies.md as an installed package."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import tomllib
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from draftgate.policies.protocols import RoutingPolicy, SpeculationPolicy
from draftgate.policies.registry import routing_policy, speculation_policy
from draftgate.policies.routing.types import RouteView
from draftgate.policies.testing import check_routing, check_speculation
from draftgate.policies.types import RequestView
from tests.gateway.test_cli import COMMAND, draftgate
from tests.policies.routing_workers import workers_with_tokens

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "policies.md"
GROUP = "draftgate.policies.speculation"
MOST_LINES = 30


def blocks() -> dict[str, str]:
    """Return the code blocks of the page, by language or by file name."""
    found = re.findall(
        r"^```(?:python )?([\w.]+)\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )
    return dict(found)


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the page's modules and the metadata of an installed package."""
    declared = tomllib.loads(blocks()["toml"])
    project = declared["project"]
    name, version = project["name"], project["version"]
    info = tmp_path / f"{name.replace('-', '_')}-{version}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: {name}\nVersion: {version}\n")
    lines = [
        line
        for group, entries in project["entry-points"].items()
        for line in (f"[{group}]", *(f"{one} = {value}" for one, value in entries.items()))
    ]
    (info / "entry_points.txt").write_text("\n".join(lines))
    for module in declared["tool"]["setuptools"]["py-modules"]:
        (tmp_path / f"{module}.py").write_text(blocks()[f"{module}.py"])
    return tmp_path


@pytest.fixture
def environ(package: Path) -> dict[str, str]:
    """The environment in which another process finds the package."""
    return {"PYTHONPATH": os.pathsep.join([str(package), os.environ.get("PYTHONPATH", "")])}


@pytest.fixture
def served(environ: dict[str, str]) -> Iterator[str]:
    """The URL of a real server with that policy and the simulator."""
    flags = ["serve", "--backend", "sim", "--port", "0", "--speculation", "quiet:3"]
    process = subprocess.Popen(
        [*COMMAND, *flags],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        env={**os.environ, **environ},
    )
    line = ""
    while "/v1" not in line:
        line = process.stdout.readline()
        assert line, process.stderr.read()
    yield line[line.index("http") : line.index("/v1")]
    process.terminate()
    process.communicate(timeout=60)


def test_the_policy_is_found_by_its_entry_point_and_conforms(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry finds an installed policy by name, and the policy passes the conformance
    suite."""
    with pytest.raises(ValueError, match="unknown speculation policy"):
        speculation_policy("quiet:3")
    monkeypatch.syspath_prepend(str(package))
    importlib.invalidate_caches()
    assert [entry.value for entry in entry_points(group=GROUP, name="quiet")] == ["quiet:quiet"]
    policy = speculation_policy("quiet:3")
    assert policy.name == "quiet:3"
    assert isinstance(policy, SpeculationPolicy)
    check_speculation(policy)
    assert Path(sys.modules.pop("quiet").__file__).parent == package
    assert len(blocks()["quiet.py"].splitlines()) <= MOST_LINES
    with pytest.raises(ValueError, match=r"known: .*quiet"):
        speculation_policy("loud")


def test_the_routing_policy_conforms_and_keeps_tenants_together(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The registry finds the routing policy of the page, whose choice depends on the tenant."""
    monkeypatch.syspath_prepend(str(package))
    importlib.invalidate_caches()
    policy = routing_policy("by_tenant")
    assert isinstance(policy, RoutingPolicy)
    check_routing(lambda: routing_policy("by_tenant"))
    assert len(blocks()["by_tenant.py"].splitlines()) <= MOST_LINES
    workers = workers_with_tokens(*[0] * 8)
    chosen = [
        policy.route(
            RouteView(RequestView(1, 1, 0.0), 2, 1.0, tenant=f"tenant {number % 20}"),
            workers,
            lambda: 0.5,
        ).worker_id
        for number in range(40)
    ]
    assert chosen[:20] == chosen[20:]
    assert len(set(chosen)) > 4


def test_the_policy_runs_in_serve(served: str) -> None:
    """A server with the policy drafts and names the policy in responses and metrics."""
    body = {"prompt": "def f(x):", "max_tokens": 200, "seed": 1}
    request = urllib.request.Request(f"{served}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as response:
        speculation = json.load(response)["metrics"]["speculative_decoding"]
    assert (speculation["policy"], speculation["proposer"]) == ("quiet:3", "ngram")
    assert speculation["max_draft_tokens"] == 4
    assert speculation["reason"] == "up to 4 draft tokens while at most 3 run"
    assert speculation["num_drafted_tokens"] > 0
    assert len(speculation["acceptance_histogram"]) <= 5
    with urllib.request.urlopen(f"{served}/metrics", timeout=60) as response:
        lines = response.read().decode().splitlines()
    series = [line for line in lines if line.startswith("draftgate_decisions_total")]
    counted = [line for line in series if not line.endswith(" 0.0")]
    assert any('policy="quiet:3"' in line and 'proposer="ngram"' in line for line in counted)


def test_the_policy_runs_in_simulate(environ: dict[str, str], tmp_path: Path) -> None:
    """The simulator runs both policies, and compares the results with the policy `off`."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"at_s": n / 5, "prompt_tokens": 40, "output_tokens": 40} for n in range(12)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--trace", str(trace), "--speculation", "off,quiet:3", "--json", str(out)]
    flags += ["--workers", "2", "--routing", "by_tenant"]
    done = draftgate("simulate", *flags, env=environ)
    assert done.returncode == 0, done.stderr
    results = json.loads(out.read_text())["policies"]
    assert list(results) == ["off", "quiet:3"]
    assert results["quiet:3"]["requests"] == 12
    assert results["quiet:3"]["latency_s"]["mean"] < results["off"]["latency_s"]["mean"]
