"""The progress of a study in the simulator, and its results after an interruption."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from bench.harness.provenance import write_results
from draftgate.loadgen.interruption import interruptible
from draftgate.loadgen.report.progress import StepProgress


@contextmanager
def running_study(path: Path | None, results: dict[str, Any], unit: str) -> Iterator[StepProgress]:
    """Show the progress of a study, and write its results when it ends.

    Ctrl-C and SIGTERM write the results so far, with `"interrupted": true`.

    Args:
        path: the JSON file, or None.
        results: the results, which the study completes.
        unit: what the steps of the study count, in the plural.

    Raises:
        OSError: the file cannot be written.
        SystemExit: the study was interrupted. The status is 130 or 143.
    """
    with interruptible() as interruption:
        try:
            with StepProgress("preparing", unit) as progress:
                yield progress
        except KeyboardInterrupt:
            write_results(path, {**results, "interrupted": True})
            raise SystemExit(interruption.status) from None
        write_results(path, results)
