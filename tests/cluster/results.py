"""Results of a run, printed and written to files."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.harness.provenance import provenance
from draftgate.loadgen.measuring.metrics import tpot_s, ttft_s
from draftgate.loadgen.types import Record


def percentile(values: Sequence[float], share: float) -> float:
    """Return the nearest-rank percentile of some values."""
    ranked = sorted(values)
    return ranked[max(1, math.ceil(share * len(ranked))) - 1]


def latencies(records: Sequence[Record]) -> dict[str, Any]:
    """Return latency percentiles in milliseconds by name."""
    measured = {
        "ttft": [found for r in records if (found := ttft_s(r)) is not None],
        "tpot": [found for r in records if (found := tpot_s(r)) is not None],
        "longest_gap": [
            max(b.at_s - a.at_s for a, b in zip(r.chunks, r.chunks[1:], strict=False))
            for r in records
            if len(r.chunks) > 1
        ],
    }
    return {
        f"{name}_p{round(share * 100)}_ms": round(percentile(values, share) * 1e3, 1)
        for name, values in measured.items()
        if values
        for share in (0.5, 0.99)
    }


def write_results(variable: str, command: str, results: dict[str, Any]) -> None:
    """Print the results of a run and write them to the file in an environment variable.

    Args:
        variable: the name of the environment variable.
        command: the command that produces the results.
        figures: the results.
    """
    sys.stdout.write(json.dumps(results, indent=1) + "\n")
    if variable in os.environ:
        facts = {**provenance(), "command": command, "load_average": os.getloadavg()[0]}
        Path(os.environ[variable]).write_text(json.dumps(facts | results, indent=1) + "\n")
