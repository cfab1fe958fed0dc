"""The progress of a long command, as a bar on a terminal or as lines elsewhere."""

from __future__ import annotations

import time
from threading import Event, Thread
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)

from draftgate.loadgen.report.live import PROGRESS_S, REDRAWS_PER_S, describe_times


class StepProgress:
    """Shows on stderr how far a long command is.

    A command has steps, such as runs or rounds, of which one is shown. A terminal shows a bar with
    the elapsed time and the time left of the step. Elsewhere, there is a line at the beginning of
    each step, and another one every `PROGRESS_S`.

    Attributes:
        console: prints further lines of the command, which the bar does not overwrite.
    """

    def __init__(self, first: str, unit: str) -> None:
        """Prepare to show a first step, of which only the name is known.

        Args:
            first: the name of the step.
            unit: what steps count, in the plural.
        """
        self.console = Console(stderr=True, soft_wrap=True)
        self._unit, self._step, self._text = unit, first, first
        self._bars = Progress(
            TextColumn("{task.description}", markup=False),
            BarColumn(),
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            TimeRemainingColumn(),
            console=self.console,
            refresh_per_second=REDRAWS_PER_S,
            transient=True,
            disable=not self.console.is_terminal,
        )
        self._task = self._bars.add_task(first, total=None)
        self._began_s, self._ended = time.monotonic(), Event()
        self._lines = Thread(target=self._print_lines, name="progress", daemon=True)

    def report(self, step: str, done: int, total: int | None) -> None:
        """Show how much of a step is done.

        Args:
            total: the size of the step, or None if it is unknown.
        """
        of_total = "" if total is None else f" of {total}"
        self._text = f"{step}: {done}{of_total} {self._unit}"
        if step != self._step:
            self._step = step
            self._bars.reset(self._task, description=step, total=total)
            if self._bars.disable:
                self.print(step)
        self._bars.update(self._task, completed=done, total=total)

    def print(self, line: str) -> None:
        """Print a line above the bar."""
        self.console.print(line, highlight=False, markup=False)

    def _print_lines(self) -> None:
        while not self._ended.wait(PROGRESS_S):
            left_s = self._bars.tasks[0].time_remaining
            times = describe_times(time.monotonic() - self._began_s, left_s)
            self.print(f"{self._text}, {times}")

    def __enter__(self) -> Self:
        """Show the progress until the command ends."""
        if self._bars.disable:
            self._lines.start()
        else:
            self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._ended.set()
        if self._bars.disable:
            self._lines.join()
        else:
            self._bars.stop()
