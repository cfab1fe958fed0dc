"""Profiles of the shipped model on this machine."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Final

from bench.harness.processes import start, stop

PROFILER: Final = "bench.engine.serving_profile"


def measure_profiles(cores: Mapping[Path, int | None]) -> None:
    """Measure profiles at the same time, each in its own process.

    The engine's thread has the torch settings of a server only in a separate process.

    Args:
        cores: for each file to write, the only core of its process, or None for all cores.

    Raises:
        RuntimeError: a profile could not be measured.
    """
    processes = {}
    try:
        for path, core in cores.items():
            command = [sys.executable, "-m", PROFILER, "--json", str(path)]
            processes[path] = start(command, core, path.with_suffix(".log"), {})
        for path, process in processes.items():
            if process.wait():
                log = path.with_suffix(".log").read_text(encoding="utf-8")
                raise RuntimeError(f"the profile could not be measured: {log}")
    finally:
        for process in processes.values():
            stop(process)
