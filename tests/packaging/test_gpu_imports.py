"""The packages that a GPU machine must have."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

pytest.importorskip("torch")
pytest.importorskip("triton")

ROOT = Path(__file__).parents[2]
WHEELS = ROOT / "bench" / "gpu" / "wheels.txt"
OF_THE_MACHINE = {"torch", "torchgen", "triton", "numpy", "typing_extensions"}
PYTEST = {"pytest", "iniconfig", "packaging", "pluggy", "pygments"}
OURS = {"bench", "draftgate", "tests", "training", "py"}  # `py` is part of pytest

BLOCK = """
import importlib, sys

allowed, modules = map(set, (sys.argv[1].split(), sys.argv[2].split()))

class Block:
    def find_spec(self, name, path=None, target=None):
        top = name.partition(".")[0]
        if top in allowed or top in sys.stdlib_module_names or top.startswith("_"):
            return None
        raise ModuleNotFoundError(f"{name} is not on the list", name=name)

sys.meta_path.insert(0, Block())
for module in sorted(modules):
    importlib.import_module(module)
"""


def _modules() -> list[str]:
    """Return the tests of the GPU and their fixtures, and the benchmarks of the engine."""
    files = [ROOT / "tests" / "conftest.py", *(ROOT / "tests").rglob("test_*_on_gpu.py")]
    for folder in ("engine", "gpu"):
        files += (ROOT / "bench" / folder).glob("[!_]*.py")
    return [".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files]


def _import(modules: list[str], allowed: set[str]) -> None:
    """Import modules in a process without all other packages."""
    command = [sys.executable, "-c", BLOCK, " ".join(allowed | OF_THE_MACHINE | OURS)]
    done = subprocess.run(
        [*command, " ".join(modules)], cwd=ROOT, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr


def test_gpu_tests_and_benchmarks_need_few_packages() -> None:
    """Without all packages but those of the list, the GPU tests and the benchmarks import."""
    lines = WHEELS.read_text(encoding="utf-8").splitlines()
    modules = _modules()
    assert sum(name.endswith("_on_gpu") for name in modules) >= 4
    _import(modules, {line for line in lines if not line.startswith("#")})


def test_gpu_tests_of_kernels_need_only_pytest() -> None:
    """A machine that got no wheels compares the kernels with their references."""
    kernels = [name for name in _modules() if name.startswith("tests.kernels.")]
    assert len(kernels) >= 4
    _import(["tests.conftest", *kernels], PYTEST)
