"""Create an environment for each compared load generator.

    python -m bench.tool_comparison.rivals DIR

The command creates `DIR/NAME` and installs `NAME` into it. `draftgate bench tool-comparison
--rivals DIR` then runs the installed tools. With `--torch-index`, torch is the CPU wheel of that
index. vLLM is built from source without a device (`VLLM_TARGET_DEVICE=empty`), because its wheel
needs CUDA.
"""

from __future__ import annotations

import argparse
import os
import subprocess
from pathlib import Path
from typing import Final

PACKAGES: Final = {
    "vllm": "vllm==0.33.0",
    "guidellm": "guidellm==0.8.1",
    "aiperf": "aiperf==0.13.0",
    "inference-perf": "inference-perf==0.7.0",
}
"""Latest versions of the packages on 2026-11-21."""

_PYTHON: Final = {"inference-perf": "python3.12"}
"""Python versions of the environments that do not use 3.11, by name."""

_TORCH: Final = "torch==2.13.0"
_VLLM: Final = {
    "VLLM_TARGET_DEVICE": "empty",
    # Without this variable the version is 0.33.0+empty, which pip rejects for a source of 0.33.0.
    "VLLM_VERSION_OVERRIDE": PACKAGES["vllm"].partition("==")[2],
}
_VLLM_BUILDS_WITH: Final = (
    *(_TORCH, "cmake", "ninja", "packaging", "setuptools>=77,<81", "setuptools-scm>=8"),
    *("setuptools-rust", "jinja2", "wheel"),
)


def python_of(environments: Path, name: str) -> Path:
    """Return the interpreter of an environment."""
    return environments / name / "bin" / "python"


def main() -> None:
    """Create the missing environments."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("directory", type=Path)
    parser.add_argument("--torch-index", help="package index with CPU wheels of torch")
    args = parser.parse_args()
    index = ["--extra-index-url", args.torch_index] if args.torch_index else []
    for name, package in PACKAGES.items():
        if not python_of(args.directory, name).exists():
            interpreter = _PYTHON.get(name, "python3.11")
            _run(interpreter, "-m", "venv", str(args.directory / name))
            _install(python_of(args.directory, name), name, package, index)


def _install(python: Path, name: str, package: str, index: list[str]) -> None:
    pip = (str(python), "-m", "pip", "install", "--quiet", *index)
    if name != "vllm":
        _run(*pip, package, *([_TORCH] if name == "guidellm" else []))
        return
    _run(*pip, *_VLLM_BUILDS_WITH)
    _run(*pip, "--no-build-isolation", "--no-binary", "vllm", package)


def _run(*command: str) -> None:
    subprocess.run(command, check=True, env={**os.environ, **_VLLM})  # noqa: S603 - our own list


if __name__ == "__main__":
    main()
