"""The progress of a search, as a bar on a terminal or as lines elsewhere."""

from __future__ import annotations

import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Final, Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

PROGRESS_S: Final = 10.0
"""Interval between lines of progress, in seconds, if stderr is not a terminal."""


class SearchProgress:
    """Shows the current step of a search on stderr."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        columns = TextColumn("{task.description}", markup=False), BarColumn()
        self._console, self._lines = console, not console.is_terminal
        self._bars = Progress(
            *columns,
            MofNCompleteColumn(),
            TimeElapsedColumn(),
            console=console,
            transient=True,
            disable=self._lines,
        )
        self._task = self._bars.add_task("bounds", total=None)
        self._text = "simulating the most promising deployments"
        self._began_s = self._printed_s = time.monotonic()

    def report(self, what: str, done: int, total: int) -> None:
        """Show how many deployments of a step are done."""
        self._text = f"{what} {done} of {total} deployments"
        self._bars.update(self._task, description=what, completed=done, total=total)
        self.tick()

    def tick(self) -> None:
        """Print a line if the last one is old."""
        now_s = time.monotonic()
        if self._lines and now_s - self._printed_s >= PROGRESS_S:
            self._printed_s = now_s
            text = f"{self._text}, {now_s - self._began_s:.0f} s"
            self._console.print(text, highlight=False, markup=False)

    def __enter__(self) -> Self:
        """Show the progress until the search ends."""
        self._bars.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Remove the bar."""
        self._bars.stop()


@contextmanager
def interruptible() -> Iterator[None]:
    """Let SIGTERM interrupt a search as Ctrl-C does."""
    before = signal.signal(signal.SIGTERM, _interrupt)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)


def _interrupt(_signal: int, _frame: FrameType | None) -> None:
    raise KeyboardInterrupt
