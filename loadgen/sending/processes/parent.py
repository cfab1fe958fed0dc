"""Several processes send one load: each its part of the same plan, all from one instant on.

One process is limited by its one core (`loadgen.sending.calibrate` says where). Here the parent
sends nothing itself: it starts the processes, waits until all have made their questions, names the
instant at which they begin, and merges what they report into one run. A process that dies, or did
not keep up, makes the run INVALID.
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

from msgspec.structs import replace as with_fields

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.events import End
from draftgate.loadgen.planning.plan import Part
from draftgate.loadgen.sending.health import of_processes
from draftgate.loadgen.sending.processes.wire import (
    REPORT,
    SenderJob,
    SenderReport,
    SenderStart,
    frame,
    receive,
)
from draftgate.loadgen.types import LoadRun, Record

AHEAD_S: Final = 0.1
"""From naming the instant to the instant: a process reads its message within some milliseconds, and
one that should need longer starts late, which its lag then tells."""

GRACE_S: Final = 10.0
"""How long a process may take to stop; closing its streams takes it milliseconds."""

GONE: Final = (asyncio.IncompleteReadError, ConnectionError)


async def run_in_processes(
    job: SenderJob,
    processes: int,
    *,
    on_start: Callable[[], None] = lambda: None,
    on_record: Callable[[Record], None] = lambda _: None,
) -> LoadRun:
    """Send a load with so many processes, and return the run.

    Cancelling stops it as `run_plan` is stopped; once one process died the others are stopped, too.

    Args:
        job: of all parts.
        on_start: told of each request that started, a moment later.
        on_record: told of each request that is over, a moment later.

    Raises:
        OSError: a process did not start.
    """
    merger = Merger(processes, on_start, on_record)
    async with AsyncExitStack() as stack:
        senders = [
            await stack.enter_async_context(_sender(with_fields(job, part=Part(i, processes))))
            for i in range(processes)
        ]
        for sender in senders:
            await sender.ready()
        at_s = time.monotonic() + AHEAD_S
        for sender in senders:
            sender.writer.write(frame(SenderStart(at_s)))
        following = [asyncio.create_task(merger.follow(sender)) for sender in senders]
        try:
            await asyncio.wait(following, return_when=asyncio.FIRST_EXCEPTION)
        except asyncio.CancelledError:
            merger.run.interrupted = True
            if (this := asyncio.current_task()) is not None:
                this.uncancel()
        await _stop(senders, following)
        for sender, task in zip(senders, following, strict=True):
            death = await sender.death()
            if task.cancelled() or isinstance(task.exception(), GONE):
                merger.lost(sender.part, death)
            else:
                task.result()  # raises what a callback raised
    return merger.merged()


@dataclass(slots=True)
class Sender:
    """A process that sends a part, as its parent sees it."""

    part: Part
    process: Process
    reader: asyncio.StreamReader
    writer: asyncio.StreamWriter

    async def report(self) -> SenderReport:
        """Return its next report; raise one of `GONE` if it died."""
        return await receive(self.reader, REPORT)

    async def ready(self) -> None:
        """Wait until its questions are made.

        Raises:
            OSError: it died before.
        """
        try:
            await self.report()
        except GONE:
            name = name_of(self.part)
            raise OSError(f"{name} did not start: {await self.death()}") from None

    def stop(self) -> None:
        """Tell it to close its streams and to report the end."""
        self.writer.write_eof()

    async def death(self) -> str:
        """Wait until it ended, and return how, in words."""
        try:
            async with asyncio.timeout(GRACE_S):
                status = await self.process.wait()
        except TimeoutError:
            return "it did not stop when told to"
        return f"by {signal.Signals(-status).name}" if status < 0 else f"exit status {status}"


class Merger:
    """Makes one run of what several processes report."""

    def __init__(
        self, processes: int, on_start: Callable[[], None], on_record: Callable[[Record], None]
    ) -> None:
        self.run = LoadRun({})
        self._on_start = on_start
        self._on_record = on_record
        self._ends: list[End | None] = [None] * processes
        self._open = [0] * processes
        self._streams: dict[str, int] = {}

    async def follow(self, sender: Sender) -> None:
        """Take a process' reports to its end; raise one of `GONE` if it dies before."""
        index = sender.part.index
        while self._ends[index] is None:
            self.take(index, await sender.report())

    def take(self, index: int, report: SenderReport) -> None:
        """Take what a process reported."""
        for _ in range(report.started):
            self._on_start()
        for told in report.records:
            record = self._checked(index, told)
            self.run.records.append(record)
            self._on_record(record)
        self._open[index] += report.started - len(report.records)
        self._ends[index] = report.end

    def lost(self, part: Part, death: str) -> None:
        """Note that a process died."""
        unknown = f"what became of {self._open[part.index]} open requests is not known"
        self.run.lost = (*self.run.lost, f"{name_of(part)} died: {death}; {unknown}")
        self.run.interrupted = True

    def merged(self) -> LoadRun:
        """Return the run: it ends with the last process, and is as healthy as the worst."""
        run, ends = self.run, [end for end in self._ends if end is not None]
        run.records.sort(key=lambda record: record.end_s)
        known_s = run.records[-1].end_s if run.records else 0.0
        run.duration_s = max((end.duration_s for end in ends), default=known_s)
        schedules = [e.scheduled_duration_s for e in ends if e.scheduled_duration_s is not None]
        run.scheduled_duration_s = max(schedules, default=None)
        run.health = of_processes([None if end is None else end.health for end in self._ends])
        return run

    def _checked(self, index: int, record: Record) -> Record:
        """Return the record, at fault if its stream has the id of one of another process.

        Within a process its own audit finds that.
        """
        if not record.stream_id:
            return record
        owner = self._streams.setdefault(record.stream_id, index)
        if owner == index or record.verdict != Verdict.OK:
            return record
        detail = f"another stream of the run has the id {record.stream_id!r}"
        return replace(record, verdict=Verdict.CROSSED.value, detail=detail)


def name_of(part: Part) -> str:
    """Return what a part's process is called in words."""
    return f"process {part.index + 1} of {part.of} of the generator"


@asynccontextmanager
async def _sender(job: SenderJob) -> AsyncGenerator[Sender, None]:
    """SenderStart a process and give it its job; when left, it is no more.

    It has a session of its own, so that a terminal's Ctrl-C reaches the parent alone.
    """
    ours, theirs = socket.socketpair()
    with theirs:
        process = await asyncio.create_subprocess_exec(
            *(
                sys.executable,
                "-m",
                "draftgate.loadgen.sending.processes.sender",
                str(theirs.fileno()),
            ),
            stdin=DEVNULL,
            pass_fds=[theirs.fileno()],
            start_new_session=True,
        )
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    try:
        writer.write(frame(job))
        yield Sender(job.part, process, reader, writer)
    finally:
        writer.close()
        if process.returncode is None:
            process.kill()
        await process.wait()


async def _stop(senders: Sequence[Sender], following: Sequence[asyncio.Task[None]]) -> None:
    """Tell those that have not ended to stop, and wait; who does not is not followed any more."""
    for sender, task in zip(senders, following, strict=True):
        if not task.done():
            sender.stop()
    _, hanging = await asyncio.wait(following, timeout=GRACE_S)
    for task in hanging:
        task.cancel()
    if hanging:
        await asyncio.wait(hanging)
