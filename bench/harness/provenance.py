"""Provenance of a result: command, commit, device, versions, date and machine load."""

from __future__ import annotations

import argparse
import datetime as dt
import json
import platform
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from draftgate import __version__
from draftgate.loadgen.outputs import check_output_folder

if TYPE_CHECKING:
    import torch

BUSY_LIMIT = 0.1
"""Share of the machine that other processes may use before a measurement is marked disturbed."""


def bench_parser(name: str, description: str | None) -> argparse.ArgumentParser:
    """Return the parser of a benchmark, with `--json`."""
    parser = argparse.ArgumentParser(
        prog=f"draftgate bench {name}",
        description=description,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--json", type=output_path, help="write the results to this JSON file")
    return parser


def output_path(text: str) -> Path:
    """Return the path of a file that a benchmark writes at its end, with its folders.

    Raises:
        ArgumentTypeError: it cannot be written.
    """
    path = Path(text)
    if path.is_dir():
        raise argparse.ArgumentTypeError(f"{path} is a folder")
    try:
        check_output_folder(path.parent)
    except ValueError as error:
        raise argparse.ArgumentTypeError(str(error)) from None
    return path


def simulated_provenance(name: str, arguments: Sequence[str] | None) -> dict[str, Any]:
    """Return command, commit, version and date of a study that only simulates."""
    given = sys.argv[1:] if arguments is None else arguments
    return {
        "command": command_line(f"draftgate bench {name}", given),
        "commit": commit(),
        "device": "simulated",
        "draftgate": __version__,
        "date": _today(),
    }


def provenance(device: torch.device | None = None) -> dict[str, Any]:
    """Return command, commit, device, versions, date, and the machine load before the run.

    Args:
        device: the measured device, or None for the processor.
    """
    import torch

    busy = busy_share()
    return {
        "command": command_line(_program(), sys.argv[1:]),
        "commit": commit(),
        "device": cpu_name() if device is None else device_name(device),
        "threads": torch.get_num_threads(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "date": _today(),
        "busy_share_before": round(busy, 3),
        "disturbed": busy > BUSY_LIMIT,
    }


def require_quiet(facts: dict[str, Any], *, allow_busy: bool) -> None:
    """Exit if the machine is busy, unless `allow_busy` is set.

    Raises:
        SystemExit: other processes use more than `BUSY_LIMIT` of the machine.
    """
    if facts["disturbed"] and not allow_busy:
        raise SystemExit(
            f"other processes use {facts['busy_share_before']:.0%} of this machine, more than the "
            f"{BUSY_LIMIT:.0%} allowed. Use --allow-busy to measure anyway"
        )


def write_results(path: Path | None, results: dict[str, Any]) -> None:
    """Write the JSON file of a benchmark, if there is a path."""
    if path is not None:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def device_name(device: torch.device) -> str:
    """Return the model of a GPU with its CUDA version, or of the processor."""
    import torch

    if device.type != "cuda":
        return cpu_name()
    return f"{torch.cuda.get_device_name(device)}, CUDA {torch.version.cuda}; {cpu_name()}"


def cpu_name() -> str:
    """Return the model of the processor and the number of its cores."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{names[0] if names else platform.processor()}, {len(names)} cores"


def busy_share(over_s: float = 1.0) -> float:
    """Return the share of the machine's CPU time in use, or 0 if it is unknown.

    Args:
        over_s: duration of the measurement, in seconds.
    """
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


def command_line(program: str, arguments: Sequence[str]) -> str:
    """Return a command without the folders of this machine."""
    words = [Path(word).name if Path(word).is_absolute() else word for word in arguments]
    return " ".join([program, *words])


def commit() -> str:
    """Return the commit of this checkout, with the suffix `-dirty` if files have changed."""
    command = ["git", "describe", "--always", "--dirty"]
    here = Path(__file__).parent
    try:
        # The command is constant.
        done = subprocess.run(command, capture_output=True, text=True, cwd=here, check=False)  # noqa: S603
    except OSError:  # git is not installed
        return "unknown"
    return done.stdout.strip() or "unknown"


def _today() -> str:
    return dt.datetime.now(dt.UTC).date().isoformat()
