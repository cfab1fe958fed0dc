"""Runs the tests of interpreted kernels in separate processes."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from bench.gpu.checks import INTERPRETED

pytest.importorskip("triton")

_FOLDER = Path(__file__).parent / "interpreted"
_ROOT = Path(__file__).parents[2]
_FILES = sorted(_FOLDER.glob("test_*.py"))
_ON_ENGINE = [path for path in _FILES if path.stem.startswith(("test_gpu", "test_triton"))]
# All files share two processes, because an import of torch and Triton takes seconds.
_GROUPS = {
    "kernels": [path for path in _FILES if path not in _ON_ENGINE],
    "engine": _ON_ENGINE,
}


@pytest.mark.parametrize("group", _GROUPS)
def test_kernels_equal_their_references_in_the_interpreter(
    group: str, request: pytest.FixtureRequest
) -> None:
    """Every Triton kernel in the interpreter gives the result of its torch reference."""
    environment = os.environ | INTERPRETED
    # The inner run inherits no other options of the outer run, such as coverage and parallelism.
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    if request.config.getoption("--long"):
        command.append("--long")
    result = subprocess.run(
        [*command, *map(str, _GROUPS[group])],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=1200,
        check=False,
    )
    if result.returncode != 0:
        pytest.fail(f"{group} failed:\n{result.stdout}\n{result.stderr}", pytrace=False)


def test_interpreted_tests_are_found() -> None:
    """Both groups of interpreted tests contain at least one test."""
    assert all(len(files) >= 3 for files in _GROUPS.values())
