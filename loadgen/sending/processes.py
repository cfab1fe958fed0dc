"""Sends one load with several processes, each its part of the plan, from a common start time.

A single process is limited by its core (`sending.calibrate` measures the limit). The parent itself
sends no requests. It starts the processes, waits until all have built their requests, sets the
common start time, and merges their reports into one run. A process that dies or does not keep up
makes the run INVALID.
"""

from __future__ import annotations

import asyncio
import signal
import socket
import sys
import time
from asyncio.subprocess import DEVNULL, Process
from collections.abc import AsyncGenerator, Callable, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, replace
from typing import Final

from msgspec.structs import replace as replace_fields

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.events import End
from draftgate.loadgen.planning.plan import PlanPart
from draftgate.loadgen.sending.driver import resume_after_cancel
from draftgate.loadgen.sending.health import merge_health
from draftgate.loadgen.sending.sender import (
    REPORT,
    SenderJob,
    SenderReport,
    SenderStart,
    frame,
    receive,
)
from draftgate.loadgen.types import LoadRun, Record

AHEAD_S: Final = 0.1
"""Delay until the common start time. A process reads its message within milliseconds. A process
that takes longer starts late and reports the lag."""

_GRACE_S: Final = 10.0
"""Longest wait for a process to stop. Closing its streams takes milliseconds."""

GONE: Final = (asyncio.IncompleteReadError, ConnectionError)


async def run_in_processes(
    job: SenderJob,
    *,
    on_start: Callable[[], None] = lambda: None,
    on_record: Callable[[Record], None] = lambda _: None,
) -> LoadRun:
    """Send a load with several processes, and return the run.

    Cancelling stops the run as it stops `run_plan`. If a process dies, the parent stops the others.

    Args:
        job: the job of all parts, where `job.target.processes` is the number of processes.
        on_start: called for each request that started, with a short delay.
        on_record: called with the record of each request that ended, with a short delay.

    Raises:
        OSError: a process did not start.
    """
    processes = job.target.processes
    merger = RunMerger(processes, on_start, on_record)
    async with AsyncExitStack() as stack:
        senders = [
            await stack.enter_async_context(
                _start_sender(replace_fields(job, part=PlanPart(i, processes)))
            )
            for i in range(processes)
        ]
        for sender in senders:
            await sender.wait_until_ready()
        at_s = time.monotonic() + AHEAD_S
        for sender in senders:
            sender.writer.write(frame(SenderStart(at_s)))
        following = [asyncio.create_task(merger.follow(sender)) for sender in senders]
        try:
            await asyncio.wait(following, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            merger.run.interrupted = True
            resume_after_cancel()
        await _stop(senders, following)
        for sender, task in zip(senders, following, strict=True):
            death = await sender.wait_for_exit()
            if task.cancelled() or isinstance(task.exception(), GONE):
                merger.lose(sender.part, death)
            else:
                task.result()  # This raises the exception of a callback.
    return merger.merge()


@dataclass(slots=True)
class SenderProcess:
    """A sending process, as its parent sees it."""

    part: PlanPart
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def report(self) -> SenderReport:
        """Return the next report of the process, or raise one of `GONE` if it died."""
        return await receive(self.reader, REPORT)

    async def wait_until_ready(self) -> None:
        """Wait until the process has built its requests.

        Raises:
            OSError: the process died before it was ready.
        """
        try:
            await self.report()
        except GONE:
            death = await self.wait_for_exit()
            raise OSError(f"{describe(self.part)} did not start: {death}") from None

    async def wait_for_exit(self) -> str:
        """Wait until the process has ended, and return how it ended, in words."""
        try:
            async with asyncio.timeout(_GRACE_S):
                status = await self.process.wait()
        except TimeoutError:
            return "it did not stop in time"
        return f"by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class RunMerger:
    """Merges the reports of several processes into one run."""

    def __init__(
        self, processes: int, on_start: Callable[[], None], on_record: Callable[[Record], None]
    ) -> None:
        self.run = LoadRun({})
        self._on_start = on_start
        self._on_record = on_record
        self._ends: list[End | None] = [None] * processes
        self._open = [0] * processes
        self._stream_owners: dict[str, int] = {}

    async def follow(self, sender: SenderProcess) -> None:
        """Take the reports of a process to its end, or raise one of `GONE` if it dies early."""
        index = sender.part.index
        while self._ends[index] is None:
            self.take(index, await sender.report())

    def take(self, index: int, report: SenderReport) -> None:
        """Add a report of the process with that index."""
        for _ in range(report.started):
            self._on_start()
        for reported in report.records:
            record = self._check_stream(index, reported)
            self.run.records.append(record)
            self._on_record(record)
        self._open[index] += report.started - len(report.records)
        self._ends[index] = report.end

    def lose(self, part: PlanPart, death: str) -> None:
        """Record that a process died."""
        unknown = f"the outcome of {self._open[part.index]} open requests is unknown"
        self.run.lost = (*self.run.lost, f"{describe(part)} died: {death}; {unknown}")
        self.run.interrupted = True

    def merge(self) -> LoadRun:
        """Return the run, which ends with the last process and has the worst health."""
        run, ends = self.run, [end for end in self._ends if end is not None]
        run.records.sort(key=lambda record: record.end_s)
        known_s = run.records[-1].end_s if run.records else 0.0
        run.duration_s = max((end.duration_s for end in ends), default=known_s)
        schedules = [e.scheduled_duration_s for e in ends if e.scheduled_duration_s is not None]
        run.scheduled_duration_s = max(schedules, default=None)
        run.health = merge_health([None if end is None else end.health for end in self._ends])
        return run

    def _check_stream(self, index: int, record: Record) -> Record:
        """Return the record, with a fault if another process had a stream of the same id.

        The audit of each stream performs this check within a process.
        """
        if not record.stream_id:
            return record
        owner = self._stream_owners.setdefault(record.stream_id, index)
        if owner == index or record.verdict != Verdict.OK:
            return record
        detail = f"another stream of the run has the id {record.stream_id!r}"
        return replace(record, verdict=Verdict.CROSSED.value, detail=detail)


def describe(part: PlanPart) -> str:
    """Return the name of a part's process in words."""
    return f"process {part.index + 1} of {part.of} of the generator"


@asynccontextmanager
async def _start_sender(job: SenderJob) -> AsyncGenerator[SenderProcess, None]:
    """Start a process and send its job. On exit the process has ended.

    The process has a session of its own, so that a terminal's Ctrl-C reaches the parent alone.
    """
    ours, theirs = socket.socketpair()
    module = "draftgate.loadgen.sending.sender"
    with theirs:
        process = await asyncio.create_subprocess_exec(
            sys.executable,
            "-m",
            module,
            str(theirs.fileno()),
            stdin=DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        writer.write(frame(job))
        yield SenderProcess(job.part, process, reader, writer)
    finally:
        writer.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _stop(senders: Sequence[SenderProcess], following: Sequence[asyncio.Task[None]]) -> None:
    """Request the running processes to stop, and wait a limited time for their end."""
    for sender, task in zip(senders, following, strict=True):
        if not task.done():
            sender.writer.write_eof()  # The process closes its streams and reports the end.
    _, hanging = await asyncio.wait(following, timeout=_GRACE_S)
    for task in hanging:
        task.cancel()
    if hanging:
        await asyncio.wait(hanging)
