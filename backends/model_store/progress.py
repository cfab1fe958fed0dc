"""The progress of a download, as a bar on a terminal or as a line every ten seconds elsewhere."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Final, TextIO

LINE_INTERVAL_S: Final = 10.0
"""Interval of the lines without a terminal, in seconds."""

_MB: Final = 1e6


@contextmanager
def progress_shown(
    what: str,
    total_bytes: int,
    stream: TextIO | None = None,
    clock: Callable[[], float] = time.monotonic,
) -> Iterator[Callable[[int], None]]:
    """Show the progress of a download until the block ends.

    Args:
        what: the words in front of the figures.
        stream: where to show it, or None for stderr.
        clock: a monotonic clock in seconds.

    Yields:
        A function that takes the number of bytes that exist.
    """
    stream = stream or sys.stderr
    if stream.isatty():
        with _bar(what, total_bytes, stream) as show:
            yield show
    else:
        yield _Lines(what, total_bytes, stream, clock).show


@contextmanager
def _bar(what: str, total_bytes: int, stream: TextIO) -> Iterator[Callable[[int], None]]:
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        DownloadColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
        TransferSpeedColumn,
    )

    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        DownloadColumn(),
        TransferSpeedColumn(),
        TimeRemainingColumn(),
    )
    with Progress(*columns, console=Console(file=stream)) as bar:
        task = bar.add_task(what, total=total_bytes)
        yield lambda done_bytes: bar.update(task, completed=done_bytes)


class _Lines:
    """Writes lines at an interval, with the speed since the line before."""

    def __init__(
        self, what: str, total_bytes: int, stream: TextIO, clock: Callable[[], float]
    ) -> None:
        self._what, self._total_bytes = what, total_bytes
        self._stream, self._clock = stream, clock
        self._line_s = clock()
        self._line_bytes: int | None = None  # unknown until the first report, after a resumption

    def show(self, done_bytes: int) -> None:
        if self._line_bytes is None:
            self._line_bytes = done_bytes
        elapsed_s = self._clock() - self._line_s
        if elapsed_s < LINE_INTERVAL_S:
            return
        speed = max(0, done_bytes - self._line_bytes) / elapsed_s
        print(
            f"{self._what}: {done_bytes / _MB:.1f} of {self._total_bytes / _MB:.1f} MB, "
            f"{speed / _MB:.1f} MB/s",
            file=self._stream,
            flush=True,
        )
        self._line_s, self._line_bytes = self._clock(), done_bytes
