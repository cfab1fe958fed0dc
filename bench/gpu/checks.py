"""Stages that test the engine: environment, kernels, the engine, and floors of kernels."""

from __future__ import annotations

import importlib
import importlib.metadata
import os
import platform
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from bench.gpu.setting import Setting, Skipped

ROOT: Final = Path(__file__).parents[2]
PACKAGES: Final = ("torch", "triton", "numpy", "msgspec", "safetensors", "tokenizers", "jinja2")
OPTIONAL: Final = ("pytest", "hypothesis", "transformers", "vllm")

FILES_LIMIT_S: Final = 540
"""Longest time of all test files of a stage, which leaves time to write their results."""

FILE_LIMIT_S: Final = 280
"""Longest time of a test file, so that a hang leaves time for the others."""

PYTEST: Final = (
    "-q",
    # Options of plugins that may be missing are unknown, and --strict-config would refuse them.
    "-o", "addopts=--import-mode=importlib --strict-markers -ra",
    "-W", "ignore::pytest.PytestConfigWarning",
    "-p", "no:cacheprovider",
)  # fmt: skip

INTERPRETED: Final = {"TRITON_INTERPRET": "1", "OMP_NUM_THREADS": "1"} | (
    {"OPENBLAS_CORETYPE": "Prescott"} if platform.machine() == "x86_64" else {}
)
"""Variables of Triton's interpreter, which multiplies with NumPy. As on a GPU, the bits of a row
must not depend on its place in the batch. The OpenBLAS kernels for Haswell and Zen break this
rule."""

_COUNT: Final = re.compile(r"(\d+) (passed|failed|skipped|error)s?\b")


def run_environment(setting: Setting) -> dict[str, Any]:
    """Return versions and device.

    Raises:
        Exception: a package is missing, or the device cannot add two numbers.
    """
    import torch

    from bench.harness.provenance import provenance

    found = {name: _version(name) for name in (*PACKAGES, *OPTIONAL)}
    for name in PACKAGES:
        importlib.import_module(name)
    facts: dict[str, Any] = provenance(setting.device)
    facts["packages"] = found
    if setting.on_gpu:
        properties = torch.cuda.get_device_properties(setting.device)
        facts["compute_capability"] = f"{properties.major}.{properties.minor}"
        facts["memory_gib"] = round(properties.total_memory / 2**30, 1)
        facts["multiprocessors"] = properties.multi_processor_count
    ones = torch.ones(2, device=setting.device)
    assert float((ones + ones).sum()) == 4.0
    return facts


def _version(name: str) -> str | None:
    try:
        return importlib.metadata.version(name)
    except importlib.metadata.PackageNotFoundError:
        return None


def run_kernels(setting: Setting) -> dict[str, Any]:
    """Run the kernel tests on the GPU, or in the interpreter."""
    folder = ROOT / "tests" / "kernels"
    if setting.on_gpu:
        return run_files(setting, sorted(folder.glob("test_*_on_gpu.py")))
    files = sorted((folder / "interpreted").glob("test_*_kernel*.py"))
    return run_files(setting, files[:2] if setting.tiny else files)


def run_engine(setting: Setting) -> dict[str, Any]:
    """Run the engine's tests on the GPU, or the GPU runner in the interpreter."""
    if setting.on_gpu:
        return run_files(setting, sorted((ROOT / "tests" / "engine").glob("test_*_on_gpu.py")))
    return run_files(setting, [ROOT / "tests/kernels/interpreted/test_gpu_runner.py"])


def run_files(setting: Setting, files: list[Path]) -> dict[str, Any]:
    """Run each test file in a process, and return the counts of its tests.

    Raises:
        Skipped: pytest is not installed.
    """
    if _version("pytest") is None:
        raise Skipped("pytest is not installed")
    ends_s = time.monotonic() + FILES_LIMIT_S
    rows = []
    for file in files:
        left_s = min(FILE_LIMIT_S, ends_s - time.monotonic())
        rows.append(run_file(file, interpreted=not setting.on_gpu, limit_s=max(left_s, 1.0)))
        setting.keep({"files": rows})
    bad = [row["file"] for row in rows if not row["ok"]]
    status = {"status": "failed", "reason": f"failed: {', '.join(bad)}"} if bad else {}
    return {"files": rows, **status}


def run_file(
    file: Path, *, interpreted: bool = False, limit_s: float = FILE_LIMIT_S
) -> dict[str, Any]:
    """Run a test file in a process, and return its counts and the end of a failure's output."""
    # The GPU tests need no plugins, and a broken one of the machine would end every run.
    environment = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    if interpreted:
        environment |= INTERPRETED
    command = [sys.executable, "-m", "pytest", *PYTEST, str(file)]
    started_s = time.monotonic()
    try:
        done = subprocess.run(  # noqa: S603 - trusted arguments
            command, cwd=ROOT, env=environment, capture_output=True, text=True,
            timeout=limit_s, check=False,
        )  # fmt: skip
        code, output = done.returncode, done.stdout + done.stderr
    except subprocess.TimeoutExpired as error:
        code, output = None, _text(error.stdout)
    counts = {kind: int(number) for number, kind in _COUNT.findall(output[-400:])}
    row: dict[str, Any] = {
        "file": str(file.relative_to(ROOT)) if file.is_relative_to(ROOT) else file.name,
        "ok": code == 0 and counts.get("passed", 0) > 0,
        "seconds": round(time.monotonic() - started_s, 1),
        **counts,
    }
    print(row, flush=True)
    if not row["ok"]:
        row["reason"] = "timeout" if code is None else f"exit status {code}"
        row["output"] = output.splitlines()[-60:]
        print(output, flush=True)
    return row


def _text(output: bytes | str | None) -> str:
    return output.decode(errors="replace") if isinstance(output, bytes) else output or ""


def run_floors(setting: Setting) -> dict[str, Any]:
    """Return the results of `bench kernels`."""
    setting.need_gpu()
    from bench.engine.kernels import measure

    return measure(allow_busy=True)
