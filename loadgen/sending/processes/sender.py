"""One of several processes that send a load: makes its part of the plan, sends it, reports.

`python -m loadgen.sending.processes.sender FD` is started by `loadgen.sending.processes.parent` and
speaks `loadgen.sending.processes.wire` over the inherited socket. It stops when the socket's other
end is closed, the parent's death included: none is left behind.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from typing import Final

import aiohttp

from draftgate.loadgen.events import End
from draftgate.loadgen.planning.plan import Plan, make_plan
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.sending.client import open_session
from draftgate.loadgen.sending.clock import Clock, clock_from
from draftgate.loadgen.sending.driver import TIMER_S, requests_of, run_plan
from draftgate.loadgen.sending.loop import in_loop
from draftgate.loadgen.sending.passage_index import retriever_of
from draftgate.loadgen.sending.processes.wire import (
    JOB,
    START,
    SenderJob,
    SenderReport,
    frame,
    receive,
)
from draftgate.loadgen.types import LoadRun, PlannedRequest, Record

REPORT_S: Final = 0.05
"""How long a report gathers. The live view is drawn twice a second and needs none sooner; one write
for each of 3,000 requests a second, and the parent's waking up for it, would take CPU from those
who measure."""


class Outbox:
    """Gathers what happens into reports."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._next = SenderReport()
        self._flushing: asyncio.TimerHandle | None = None

    def start(self, _: PlannedRequest) -> None:
        """Tell of a request that is being sent."""
        self._next.started += 1
        self._flush_soon()

    def record(self, record: Record) -> None:
        """Tell of a request that is over."""
        self._next.records.append(record)
        self._flush_soon()

    def flush(self, end: End | None = None) -> None:
        """Report now."""
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing, self._next.end = None, end
        self._writer.write(frame(self._next))
        self._next = SenderReport()

    def _flush_soon(self) -> None:
        if self._flushing is None:
            self._flushing = self._loop.call_later(REPORT_S, self.flush)


async def send(channel: socket.socket) -> None:
    """Do what the parent at the other end asks for; return early if it is gone."""
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        job = await receive(reader, JOB)
        outbox = Outbox(writer)
        async with open_session(job.api_key) as session:
            plan = await plan_of(session, job)
            outbox.flush()
            clock = clock_from((await receive(reader, START)).at_s)
            run = await _send(session, job, plan, clock, outbox, reader)
        outbox.flush(End.of(run))
        writer.close()
        await writer.wait_closed()


async def plan_of(session: aiohttp.ClientSession, job: SenderJob) -> Plan:
    """Return the part of the plan that a process is to send, its questions made.

    Raises:
        ValueError: the workload needs embeddings, and the server gives none.
    """
    load = job.load
    return make_plan(
        load,
        rows=() if load.trace is None else read_trace(load.trace),
        counter=job.counter,
        max_model_len=job.max_model_len,
        retriever=await retriever_of(session, job),
        part=job.part,
    )


async def _send(
    session: aiohttp.ClientSession,
    job: SenderJob,
    plan: Plan,
    clock: Clock,
    outbox: Outbox,
    reader: asyncio.StreamReader,
) -> LoadRun:
    """Send from the clock's start on, until all is answered or the parent says no more."""
    await asyncio.sleep(max(0.0, TIMER_S - clock()))  # no timer is more than that early
    running = asyncio.create_task(
        run_plan(
            session,
            job.url,
            job.model,
            requests_of(plan, job.load),
            concurrency=plan.concurrency,
            patience=job.patience,
            on_start=outbox.start,
            on_record=outbox.record,
            start_clock=lambda: clock,
        )
    )
    stopped = asyncio.create_task(reader.read())
    await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
    running.cancel()
    stopped.cancel()
    return await running


if __name__ == "__main__":
    in_loop(send(socket.socket(fileno=int(sys.argv[1]))))
