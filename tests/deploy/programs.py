"""Programs that some tests of the deployment files need."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.deploy.compose import ROOT

SOURCES = {
    "helm": ".ci/kubernetes-tools .venv/bin",
    "kubectl": ".ci/kubernetes-tools .venv/bin",
    "prometheus": "apt-get install prometheus",
    "promtool": "apt-get install prometheus",
    "systemd-analyze": "apt-get install systemd",
}
"""The command that installs each program."""


def program(name: str) -> str:
    """Return the path of a program, or skip the test if it is not installed."""
    folders = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    found = shutil.which(name, path=folders)
    if found is None:
        pytest.skip(f"{name} is not installed: {SOURCES[name]}")
    return found


def run(name: str, *arguments: str | Path, status: int = 0) -> str:
    """Run a program in the repository and return its output, or its errors if it must fail."""
    done = subprocess.run(
        [program(name), *map(str, arguments)],
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == status, done.stdout + done.stderr
    return done.stderr if status else done.stdout
