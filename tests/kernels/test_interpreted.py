"""Runs the interpreted kernel tests in a process of their own."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("triton")

_FOLDER = Path(__file__).parent / "interpreted"
_ROOT = Path(__file__).parents[2]
# The interpreter multiplies with numpy. Which bits a row gets must not depend on where it stands,
# as on a GPU, but in OpenBLAS' kernels for Haswell and Zen it does; these run on any x86-64.
_SAME_ROWS = {"OPENBLAS_CORETYPE": "Prescott"} if platform.machine() == "x86_64" else {}
# One process per file keeps failures apart and lets the files run side by side.
_FILES = sorted(path.name for path in _FOLDER.glob("test_*.py"))


@pytest.mark.parametrize("name", _FILES)
def test_kernels_equal_their_references_in_the_interpreter(name: str) -> None:
    """Every Triton kernel computes what its torch reference does, run by Triton's interpreter."""
    environment = os.environ | {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1", **_SAME_ROWS}
    # An outer run's options (coverage, parallelism) are not meant for the inner one.
    environment.pop("PYTEST_ADDOPTS", None)
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", "-p", "no:cacheprovider"]
    result = subprocess.run(
        [*command, str(_FOLDER / name)],
        cwd=_ROOT,
        env=environment,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    if result.returncode != 0:
        pytest.fail(f"{name} failed:\n{result.stdout}\n{result.stderr}", pytrace=False)


def test_interpreted_tests_are_found() -> None:
    """The folder of interpreted tests is not empty, so its run means something."""
    assert len(_FILES) >= 3
