"""What every recorded measurement says about itself."""

from __future__ import annotations

import datetime as dt
import platform
import sys
import time
from pathlib import Path
from typing import Any

import torch

from bench.harness.recording import command_line, commit

BUSY_LIMIT = 0.1
"""Share of the machine others may use before a measurement is marked disturbed."""


def provenance(device: torch.device | None = None) -> dict[str, Any]:
    """Return command, commit, device, versions, date and how busy the machine was before.

    Args:
        device: what is measured; None is the processor.
    """
    busy = busy_share()
    return {
        "command": command_line(_program(), sys.argv[1:]),
        "commit": commit(),
        "device": cpu_name() if device is None else device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": dt.datetime.now(dt.UTC).date().isoformat(),
        "busy_share_before": round(busy, 3),
        "disturbed": busy > BUSY_LIMIT,
    }


def require_quiet(facts: dict[str, Any], *, allow_busy: bool) -> None:
    """Return if nobody else uses the machine, or if that does not matter.

    Raises:
        SystemExit: the machine is busy.
    """
    if facts["disturbed"] and not allow_busy:
        raise SystemExit(
            f"others use {facts['busy_share_before']:.0%} of this machine, and more than "
            f"{BUSY_LIMIT:.0%} is too much to measure beside; --allow-busy measures all the same"
        )


def device_name(device: torch.device) -> str:
    """Return the model of a GPU with its CUDA version, or of the processor."""
    if device.type != "cuda":
        return cpu_name()
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}; {cpu_name()}"


def cpu_name() -> str:
    """Return the processor's model and the cores we may use."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def busy_share(over_s: float = 1.0) -> float:
    """Return the share of the machine's CPU time that is in use right now; 0 if unknown."""
    before = _cpu_ticks()
    time.sleep(over_s)
    after = _cpu_ticks()
    if before is None or after is None:
        return 0.0
    total, idle = after[0] - before[0], after[1] - before[1]
    return 1.0 - idle / total if total else 0.0


def _cpu_ticks() -> tuple[int, int] | None:
    stat = Path("/proc/stat")
    if not stat.exists():
        return None
    ticks = [int(field) for field in stat.read_text().splitlines()[0].split()[1:9]]
    return sum(ticks), ticks[3] + ticks[4]


def _program() -> str:
    spec = getattr(sys.modules["__main__"], "__spec__", None)
    return f"python -m {spec.name.removesuffix('.__main__')}" if spec else Path(sys.argv[0]).name
