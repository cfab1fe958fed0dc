"""Sends one part of a plan as one of several processes, and reports to the parent.

The module `sending.processes` starts `python -m draftgate.loadgen.sending.sender FD` and exchanges
messages over the inherited socket. The process stops when the other end of the socket closes, also
by the parent's death, so that no orphan process remains.

    parent -- SenderJob, SenderStart --> sender      the end of the stream requests a stop
    parent <------ SenderReport -------- sender      the first report means that the plan is built

A message is MessagePack after its length in four bytes.
"""

from __future__ import annotations

import asyncio
import socket
import sys
from contextlib import suppress
from struct import Struct as Layout
from typing import Final, TypeVar

import uvloop
from msgspec import Struct
from msgspec.msgpack import Decoder, Encoder

from draftgate.loadgen.events import End
from draftgate.loadgen.planning.plan import WHOLE, Load, PlanPart, make_plan
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.sending.client import open_session, start_clock
from draftgate.loadgen.sending.driver import TIMER_S, run_plan, timed_requests
from draftgate.loadgen.sending.passage_index import build_retriever
from draftgate.loadgen.sending.target import ServerInfo, Target
from draftgate.loadgen.types import SINGLE, PlannedRequest, Record

T = TypeVar("T")

_REPORT_S: Final = 0.05
"""How long to collect events for a report. The live view is drawn twice a second and needs no
faster reports. Reporting each of 3,000 requests per second would take CPU from the processes that
measure."""


class SenderJob(Struct, frozen=True):
    """The input of a process for its part of a load.

    Attributes:
        server: the values that the server reported, so that all parts belong to the same plan.
    """

    load: Load
    target: Target
    server: ServerInfo
    part: PlanPart = WHOLE


class SenderStart(Struct):
    """The start time, in seconds of the monotonic clock, which all processes share."""

    at_s: float


class SenderReport(Struct, omit_defaults=True):
    """The events since the last report.

    Attributes:
        started: the number of started requests.
        records: the records of the requests that ended, with their texts.
        end: the end of the run, in the last report only.
    """

    started: int = 0
    records: list[Record] = []
    end: End | None = None


JOB: Final = Decoder(SenderJob, dec_hook=lambda kind, value: kind(value))
_START: Final = Decoder(SenderStart)
REPORT: Final = Decoder(SenderReport, dec_hook=lambda _kind, _value: SINGLE)  # Flows are not sent.

_encoder: Final = Encoder(enc_hook=str)  # This encodes paths, and flows, which no receiver reads.
_LENGTH: Final = Layout(">I")


def frame(message: SenderJob | SenderStart | SenderReport) -> bytes:
    """Return a message with its length in front."""
    content = _encoder.encode(message)
    return _LENGTH.pack(len(content)) + content


async def receive(reader: asyncio.StreamReader, decoder: Decoder[T]) -> T:
    """Return the next message.

    Raises:
        asyncio.IncompleteReadError, ConnectionError: the peer closed the connection.
    """
    (length,) = _LENGTH.unpack(await reader.readexactly(_LENGTH.size))
    return decoder.decode(await reader.readexactly(length))


class ReportBuffer:
    """Collects events of the run into reports."""

    def __init__(self, writer: asyncio.StreamWriter) -> None:
        self._writer = writer
        self._loop = asyncio.get_running_loop()
        self._next = SenderReport()
        self._flushing: asyncio.TimerHandle | None = None

    def start(self, _: PlannedRequest) -> None:
        """Report a request that is being sent."""
        self._next.started += 1
        self._flush_soon()

    def record(self, record: Record) -> None:
        """Report a request that has ended."""
        self._next.records.append(record)
        self._flush_soon()

    def flush(self, end: End | None = None) -> None:
        """Write the report now."""
        if self._flushing is not None:
            self._flushing.cancel()
        self._flushing, self._next.end = None, end
        self._writer.write(frame(self._next))
        self._next = SenderReport()

    def _flush_soon(self) -> None:
        if self._flushing is None:
            self._flushing = self._loop.call_later(_REPORT_S, self.flush)


async def send(channel: socket.socket) -> None:
    """Execute the job that the parent sends. Return early if the parent is gone.

    Raises:
        OSError, ValueError: the plan cannot be built.
    """
    reader, writer = await asyncio.open_unix_connection(sock=channel)
    with suppress(asyncio.IncompleteReadError, ConnectionError):
        job = await receive(reader, JOB)
        load, server, buffer = job.load, job.server, ReportBuffer(writer)
        async with open_session(job.target.api_key) as session:
            client = job.target.client(session, server.model)
            plan = make_plan(
                load,
                rows=() if load.trace is None else read_trace(load.trace),
                counter=server.counter,
                max_model_len=server.max_model_len,
                retriever=await build_retriever(client, load, server.counter),
                part=job.part,
            )
            buffer.flush()
            clock = start_clock((await receive(reader, _START)).at_s)
            await asyncio.sleep(max(0.0, TIMER_S - clock()))  # Timers may fire up to TIMER_S early.
            running = asyncio.create_task(
                run_plan(
                    client,
                    timed_requests(plan, load),
                    concurrency=plan.concurrency,
                    on_start=buffer.start,
                    on_record=buffer.record,
                    start_clock=lambda: clock,
                )
            )
            stopped = asyncio.create_task(reader.read())
            await asyncio.wait((running, stopped), return_when=asyncio.FIRST_COMPLETED)
            running.cancel()
            stopped.cancel()
            run = await running
        buffer.flush(End.from_run(run))
        writer.close()
        await writer.wait_closed()


if __name__ == "__main__":
    uvloop.run(send(socket.socket(fileno=int(sys.argv[1]))))
