"""The policy that docs/design/policies.md shows works when it is installed as a package."""

from __future__ import annotations

import importlib
import json
import os
import re
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from importlib.metadata import entry_points
from pathlib import Path

import pytest

from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.registry import speculation_policy
from draftgate.policies.testing import check_speculation
from tests.gateway.test_cli import COMMAND, draftgate

PAGE = Path(__file__).resolve().parents[2] / "docs" / "design" / "policies.md"
GROUP = "draftgate.policies.speculation"
MOST_LINES = 30


def shown(language: str) -> str:
    """The first block of a language on the page."""
    return re.search(
        rf"^```{language}\b[^\n]*\n(.*?)^```", PAGE.read_text(), re.MULTILINE | re.DOTALL
    )[1]


@pytest.fixture
def package(tmp_path: Path) -> Path:
    """A folder with the page's module, installed as far as Python can tell."""
    group, name, factory = re.search(r'"(.+?)"\]\s(\w+) = "(.+?)"', shown("toml")).groups()
    info = tmp_path / "quiet-1.0.dist-info"
    info.mkdir()
    (info / "METADATA").write_text("Metadata-Version: 2.1\nName: quiet\nVersion: 1.0\n")
    (info / "entry_points.txt").write_text(f"[{group}]\n{name} = {factory}\n")
    (tmp_path / "quiet.py").write_text(shown("python"))
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
    process.communicate(timeout=30)


def test_the_policy_is_found_by_its_entry_point_and_conforms(
    package: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A policy outside the tree is found by name and passes the conformance suite."""
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
    assert len(shown("python").splitlines()) <= MOST_LINES
    with pytest.raises(ValueError, match=r"known: .*quiet"):
        speculation_policy("loud")


def test_the_policy_runs_in_serve(served: str) -> None:
    """A gateway with the policy drafts and names it in responses and metrics."""
    body = {"prompt": "def f(x):", "max_tokens": 200, "seed": 1}
    request = urllib.request.Request(f"{served}/v1/completions", json.dumps(body).encode())
    with urllib.request.urlopen(request, timeout=60) as answer:
        told = json.load(answer)["metrics"]["speculative_decoding"]
    assert (told["policy"], told["proposer"], told["max_draft_tokens"]) == ("quiet:3", "ngram", 4)
    assert told["reason"] == "up to 4 draft tokens while at most 3 run"
    assert told["num_drafted_tokens"] > 0
    assert len(told["acceptance_histogram"]) <= 5
    with urllib.request.urlopen(f"{served}/metrics", timeout=60) as answer:
        lines = answer.read().decode().splitlines()
    counted = [line for line in lines if line.startswith("draftgate_decisions_total")]
    assert any('policy="quiet:3"' in line and 'proposer="ngram"' in line for line in counted)


def test_the_policy_runs_in_simulate(environ: dict[str, str], tmp_path: Path) -> None:
    """The policy runs beside the shipped ones in a simulation."""
    trace, out = tmp_path / "trace.jsonl", tmp_path / "out.json"
    rows = [{"at_s": n / 5, "prompt_tokens": 40, "output_tokens": 40} for n in range(12)]
    trace.write_text("\n".join(map(json.dumps, rows)))
    flags = ["--trace", str(trace), "--speculation", "off,quiet:3", "--json", str(out)]
    done = draftgate("simulate", *flags, env=environ)
    assert done.returncode == 0, done.stderr
    told = json.loads(out.read_text())["policies"]
    assert list(told) == ["off", "quiet:3"]
    assert told["quiet:3"]["requests"] == 12
    assert told["quiet:3"]["latency_s"]["mean"] < told["off"]["latency_s"]["mean"]
