"""`draftgate collect-env`, which describes the machine and its packages for bug reports.

The command never imports torch.
"""

from __future__ import annotations

import os
import platform
import re
import shutil
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, requires, version
from pathlib import Path
from typing import Any, Final

from draftgate import __version__

_FLAGS: Final = (
    "avx2", "avx512f", "avx512_bf16", "avx512_vnni", "amx_bf16", "amx_tile", "asimd", "bf16", "sve",
)  # fmt: skip
"""Processor flags that affect data types and speed."""

_OPTIONAL: Final = (
    "huggingface-hub", "openai", "ray", "safetensors", "scipy", "torch", "transformers",
    "triton",
)  # fmt: skip
"""Packages of the extras and of common clients."""


def collect_environment() -> dict[str, Any]:
    """Return a description of this machine and its packages, with None for unknown values."""
    return {
        "draftgate": __version__,
        "python": sys.version.split()[0],
        "implementation": platform.python_implementation(),
        "platform": platform.platform(),
        "cpu": _cpu(),
        "memory_gib": _memory_gib(),
        "gpus": _gpus(),
        "packages": _packages(),
    }


def as_text(found: dict[str, Any], indent: str = "") -> str:
    """Return the description as aligned lines."""
    lines = []
    for key, value in found.items():
        if isinstance(value, dict):
            lines += [f"{indent}{key}:", as_text(value, indent + "  ")]
            continue
        shown = ", ".join(map(str, value)) if isinstance(value, list) else value
        lines.append(f"{indent}{key:{24 - len(indent)}} {'-' if shown in (None, '') else shown}")
    return "\n".join(lines)


def _cpu() -> dict[str, Any]:
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    except OSError:
        text = ""
    model = re.search(r"^model name\s*:\s*(.+)$", text, re.MULTILINE)
    flags = re.search(r"^(?:flags|Features)\s*:\s*(.+)$", text, re.MULTILINE)
    present = set(flags[1].split()) if flags else set()
    return {
        "model": model[1] if model else platform.processor() or None,
        "cores": os.cpu_count(),
        "usable_cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        "flags": [flag for flag in _FLAGS if flag in present],
    }


def _memory_gib() -> float | None:
    try:
        size = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (ValueError, OSError):
        return None
    return round(size / (1 << 30), 1)


def _gpus() -> list[str]:
    command = shutil.which("nvidia-smi")
    if command is None:
        return []
    query = [command, "--query-gpu=name,memory.total,driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(query, capture_output=True, timeout=10, check=True)  # noqa: S603 - a fixed command
    except (OSError, subprocess.SubprocessError):
        return []
    return [
        line.strip() for line in done.stdout.decode(errors="replace").splitlines() if line.strip()
    ]


def _packages() -> dict[str, str | None]:
    try:
        declared = requires("draftgate") or []
    except PackageNotFoundError:
        declared = []
    core = [line for line in declared if "extra ==" not in line]
    names = [re.split(r"[\s\[<>=!~;]", line, maxsplit=1)[0] for line in core]
    return {name: _version(name) for name in (*sorted(names), *_OPTIONAL)}


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None
