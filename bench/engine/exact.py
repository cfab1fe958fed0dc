"""What `--exact` costs on a GPU: the same steps in a process of its own.

How cuBLAS adds up sums is settled once for a process, so exact steps and plain ones cannot take
turns in one, as they do on a CPU (`steps.py`).
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

from bench.engine.cases import Case, Grid

MODULE: Final = "bench.engine"

Row = dict[str, Any]


def measure_exact(
    asked: argparse.Namespace, grid: Grid, model: str, dtype: str, device_type: str
) -> list[Row]:
    """Return rows of the steps of one model with the promise of exact bits.

    Raises:
        CalledProcessError: the other process failed; what it said is on stderr.
    """
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "exact.json"
        settings: dict[str, Sequence[object]] = {
            "--json": [path],
            "--parts": ["steps"],
            "--device": [device_type],
            "--models": [model],
            "--dtypes": [dtype],
            "--batches": grid.batches,
            "--contexts": grid.contexts,
            "--drafts": grid.drafts,
            "--prefill": [grid.prefill_tokens],
            "--rounds": [asked.rounds],
            "--threads": [] if asked.threads is None else [asked.threads],
        }
        command = [sys.executable, "-m", MODULE, "--exact", "--allow-busy"]
        for flag, values in settings.items():
            command += [flag, *map(str, values)] if values else []
        # Our own module with settings of ours.
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return rows


def add_exact(plain: list[Row], exact: list[Row]) -> None:
    """Add to each plain row how many times as long the exact step took, by a GPU's own time."""
    found = {_case(row): row for row in exact}
    for row in plain:
        other = found.get(_case(row), {})
        key = "device_ms" if "device_ms" in row else "ms"
        if key in row and key in other:
            row["exact_over_plain"] = round(other[key] / row[key], 3)


def _case(row: Row) -> Case:
    return Case(*(row[name] for name in Case._fields))
