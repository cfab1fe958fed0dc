"""The progress of a run, as a table that is redrawn twice a second, or as lines elsewhere."""

from __future__ import annotations

import asyncio
import time
from collections import Counter
from collections.abc import AsyncGenerator
from contextlib import asynccontextmanager, nullcontext
from dataclasses import dataclass, field
from math import ceil, exp, log
from typing import Final

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.measuring.metrics import tpot_s, ttft_s
from draftgate.loadgen.measuring.slo import meets_slo
from draftgate.loadgen.report.formatting import milliseconds, percent
from draftgate.loadgen.sending.health import lag_s
from draftgate.loadgen.types import Record

REDRAWS_PER_S: Final = 2.0
"""Redraws per second. Drawing blocks the event loop for some milliseconds."""

PROGRESS_S: Final = 10.0
"""Interval between lines of progress, in seconds, if stderr is not a terminal."""

_STEP: Final = 0.02
"""Width of a histogram's buckets, as a share of their value."""


class Histogram:
    """Percentiles of a stream of positive values, within 1 %, in constant time and memory."""

    def __init__(self) -> None:
        self._buckets: Counter[int] = Counter()
        self._count = 0

    def add(self, value: float) -> None:
        """Count a value. A value below a microsecond counts as a microsecond."""
        self._buckets[round(log(max(value, 1e-6)) / _STEP)] += 1
        self._count += 1

    def percentile(self, percent: float) -> float | None:
        """Return the middle of the bucket that reaches the percentile, or None without values."""
        wanted, seen = ceil(self._count * percent / 100), 0
        for bucket in sorted(self._buckets):
            seen += self._buckets[bucket]
            if seen >= wanted:
                return exp(bucket * _STEP)
        return None


@dataclass(slots=True)
class Progress:
    """The progress of a run.

    Attributes:
        total: the number of planned requests, or None if only a duration ends the run.
        schedule_s: the length of the schedule or of the closed loop's duration, or None.
    """

    total: int | None
    schedule_s: float | None
    sent: int = 0
    done: int = 0
    met: int = 0
    failed: Counter[str] = field(default_factory=Counter)
    ttft_s: Histogram = field(default_factory=Histogram)
    tpot_s: Histogram = field(default_factory=Histogram)
    lag_s: Histogram = field(default_factory=Histogram)

    def start(self) -> None:
        """Count a request that is being sent."""
        self.sent += 1

    def record(self, record: Record) -> None:
        """Count a request that has ended."""
        self.done += 1
        self.lag_s.add(lag_s(record))
        if record.verdict != Verdict.OK:
            self.failed[record.verdict] += 1
            return
        self.met += meets_slo(record)
        for histogram, value_s in ((self.ttft_s, ttft_s(record)), (self.tpot_s, tpot_s(record))):
            if value_s is not None:
                histogram.add(value_s)

    def share(self, elapsed_s: float) -> float | None:
        """Return the completed share of the run, or None if unknown."""
        if self.total:
            return self.done / self.total
        return min(1.0, elapsed_s / self.schedule_s) if self.schedule_s else None

    def left_s(self, elapsed_s: float) -> float | None:
        """Return the estimated rest of the run in seconds, or None if unknown.

        A schedule ends at its time, except for requests that are still open then.
        """
        if self.schedule_s:
            return max(0.0, self.schedule_s - elapsed_s)
        share = self.share(elapsed_s)
        return elapsed_s * (1.0 / share - 1.0) if share else None


def describe_times(elapsed_s: float, left_s: float | None) -> str:
    """Return how long a command has run, and how long it will still take, if known."""
    return f"{elapsed_s:.0f} s" + ("" if left_s is None else f", about {left_s:.0f} s left")


def render_progress(progress: Progress, elapsed_s: float) -> RenderableType:
    """Return the table."""
    share = progress.share(elapsed_s)
    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    total = "" if progress.total is None else f" of {progress.total}"
    open_now = progress.sent - progress.done
    table.add_row("sent", f"{progress.sent}{total}", "open", str(open_now))
    met_share = progress.met / progress.done if progress.done else None
    table.add_row("done", str(progress.done), "attainment", percent(met_share))
    shown = (("TTFT", progress.ttft_s), ("TPOT", progress.tpot_s), ("lag", progress.lag_s))
    for name, histogram in shown:
        median, p99 = (milliseconds(histogram.percentile(p)) for p in (50, 99))
        table.add_row(name, f"p50 {median}", "", f"p99 {p99}")
    for cause, number in sorted(progress.failed.items()):
        table.add_row("failed", cause, "", str(number), style="red")
    bar = ProgressBar(total=1.0, completed=share or 0.0, width=60, pulse=share is None)
    return Group(bar, describe_times(elapsed_s, progress.left_s(elapsed_s)), table)


def progress_line(progress: Progress, elapsed_s: float) -> str:
    """Return the progress in one line."""
    total = "" if progress.total is None else f" of {progress.total}"
    times = describe_times(elapsed_s, progress.left_s(elapsed_s))
    failed = f", {progress.failed.total()} failed" if progress.failed else ""
    return f"sent {progress.sent}{total} requests, {progress.done} done{failed}, {times}"


@asynccontextmanager
async def live_view(console: Console, progress: Progress) -> AsyncGenerator[None, None]:
    """Show the progress until the context ends.

    A task of the run's own event loop draws. A thread would hold the interpreter just as long, at
    arbitrary times, and would read counters while they change.
    """
    started_s = time.monotonic()

    async def redraw() -> None:
        while True:
            live.update(render_progress(progress, time.monotonic() - started_s), refresh=True)
            await asyncio.sleep(1 / REDRAWS_PER_S)

    async def print_lines() -> None:
        while True:
            await asyncio.sleep(PROGRESS_S)
            console.print(progress_line(progress, time.monotonic() - started_s), soft_wrap=True)

    terminal = console.is_terminal
    live = Live(console=console, auto_refresh=False, transient=True)
    with live if terminal else nullcontext():
        drawing = asyncio.create_task(redraw() if terminal else print_lines())
        try:
            yield
        finally:
            drawing.cancel()
