"""Measure the cost of `--exact` on a GPU, with the same steps in a separate process.

cuBLAS fixes the order of its sums once per process. A process can therefore not alternate exact and
plain steps on a GPU, unlike on a CPU (`steps.py`).
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

MODULE: Final = "bench.engine.command"

Row = dict[str, Any]


def measure_exact(
    args: argparse.Namespace, grid: Grid, model: str, dtype: str, device_type: str
) -> list[Row]:
    """Return the rows of the steps of a model in exact mode.

    Raises:
        CalledProcessError: the other process failed, and its error output is on stderr.
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
            "--rounds": [args.rounds],
            "--threads": [] if args.threads is None else [args.threads],
        }
        command = [sys.executable, "-m", MODULE, "--exact", "--allow-busy"]
        for flag, values in settings.items():
            command += [flag, *map(str, values)] if values else []
        # The command runs this package with trusted arguments.
        subprocess.run(command, check=True, stdout=subprocess.DEVNULL)  # noqa: S603
        rows: list[Row] = json.loads(path.read_text(encoding="utf-8"))["steps"]
        return rows


def add_exact(plain: list[Row], exact: list[Row]) -> None:
    """Add the ratio of exact to plain GPU time to each plain row."""
    found = {_case(row): row for row in exact}
    for row in plain:
        other = found.get(_case(row), {})
        key = "device_ms" if "device_ms" in row else "ms"
        if key in row and key in other:
            row["exact_over_plain"] = round(other[key] / row[key], 3)


def _case(row: Row) -> Case:
    return Case(*(row[name] for name in Case._fields))
