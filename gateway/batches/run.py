"""The run of a batch by one gateway, from its input file to the files of its results.

Results are appended to parts that are never changed (`files.Files.add_results`). After a crash, the
next run reads the parts, and sends only the lines without a result. A result that was not stored is
computed again, so no line is lost, and the first stored result of a line counts, so none is
answered twice.

A part is written `flush_s` after its first result, or when its results reach `PART_BYTES`.
"""

from __future__ import annotations

import asyncio
import logging
import math
import secrets
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Iterator
from contextlib import closing
from dataclasses import dataclass
from typing import Any, BinaryIO, Final, NamedTuple, Protocol

from msgspec import Raw

from draftgate.gateway.batches.batch import (
    Batch,
    BatchErrors,
    BatchWait,
    Checker,
    Failure,
    Line,
    LineError,
    LineResponse,
    Result,
    Status,
    distinct_results,
    encode_result,
    read_line,
)
from draftgate.gateway.batches.files import OUTPUT_PURPOSE, Files, NotFound, result_file_id
from draftgate.gateway.dispatch.upstreams.error_bodies import read_error
from draftgate.gateway.logs import log

PART_BYTES: Final = 8 << 20
"""Size of results at which a part is written at once. It bounds the memory of a batch."""

READ_BYTES: Final = 1 << 20
"""Bytes of an input file that are read at a time, as far as its lines are shorter."""

MOST_FAILURES: Final = 5
"""Attempts of a line that may fail because of the server, after which the failure is its result. A
line that makes workers fail must not do so for a day."""

FIRST_DELAY_S: Final = 1.0
LONGEST_DELAY_S: Final = 60.0
"""Delays between the attempts of a line, which double each time. (Chosen, not tuned.)"""

LONGEST_WAIT_S: Final = 300.0
"""Maximum delay, also if the server asks for a longer one. (Chosen, not tuned.)"""

ORPHAN_S: Final = 600.0
"""Time after which an open batch without a record is forgotten, because its gateway has crashed
before it has responded to the client."""

_BUSY: Final = frozenset({429, 503})
_RETRIED: Final = _BUSY | {500, 502, 504}
_NOT_BUSY: Final = "worker_failed"
"""The code of an error with status 503 that counts as a failure."""


class Answer(NamedTuple):
    """The response to a line.

    Attributes:
        body: JSON.
        code: the code of an error, or None.
        retry_after_s: seconds after which a retry may succeed, or None.
    """

    status: int
    body: bytes
    request_id: str
    code: str | None = None
    retry_after_s: float | None = None


Send = Callable[[str, str, Line], Awaitable[Answer]]
"""A function that sends the line of a tenant and a batch as a request, and returns the response or
an error."""


@dataclass(frozen=True, slots=True)
class Limits:
    """The limits and intervals of a runner.

    Attributes:
        concurrency: maximum number of lines that run at a time.
        most_lines: maximum number of lines of a batch.
        flush_s: time after which results are stored, and after which a cancellation is noticed.
        scan_s: interval of the search for batches of other gateways.
        lease_s: time after which another gateway continues the batches of a gateway that has
            crashed.
    """

    concurrency: int
    most_lines: int
    flush_s: float = 1.0
    scan_s: float = 5.0
    lease_s: float = 30.0


class LostSlot(Exception):
    """The store has not renewed the slot of a batch, so another gateway may run the batch."""


class Stopped(Exception):
    """The gateway accepts no requests any more, so its batches stop."""


class Host(Protocol):
    """The runner of a gateway, as its runs see it.

    Attributes:
        places: the places of lines that run at a time, of all batches.
        holder: an id of the gateway.
    """

    files: Files
    send: Send
    limits: Limits
    places: asyncio.Semaphore
    holder: str
    accepts: Callable[[], bool]

    async def hold(self, batch_id: str) -> bool:
        """Renew the slot of a batch, and return whether this gateway has it."""
        ...

    async def pause(self, seconds: float) -> bool:
        """Wait, and return whether a changed key has ended the wait early."""
        ...


class BatchRun:
    """A run of a batch by one gateway."""

    def __init__(self, runner: Host, tenant: str, batch_id: str) -> None:
        self._runner, self._files, self._limits = runner, runner.files, runner.limits
        self._tenant, self._id = tenant, batch_id
        self._answered: set[str] = set()  # the custom ids of stored results
        self._new: list[tuple[str, bool, bytes]] = []  # results that are not stored yet
        self._new_bytes = self._parts = 0
        self._storing = asyncio.Lock()
        self._held_s = _now_s()
        self._shown_wait: BatchWait | None = None
        self._batch: Batch

    async def run(self) -> None:
        """Bring the batch to its end.

        Raises:
            LostSlot: another gateway may run the batch.
            Stopped: the gateway accepts no requests any more.
            OSError: the storage failed.
        """
        try:
            batch = self._batch = await self._call(self._files.record, self._tenant, self._id)
        except NotFound:
            if self._files.clock() - int(self._id[6:19], 16) / 1e6 > ORPHAN_S:
                await self._call(self._files.close_batch, self._tenant, self._id)
            return
        if batch.status is Status.VALIDATING:
            await self._validate()
        await self._call(self._read_results)
        if batch.status is Status.IN_PROGRESS:
            await self._process()
        if batch.status is Status.FINALIZING:
            if not await self._runner.hold(self._id):  # the parts may be those of another gateway
                raise LostSlot
            await self._call(self._finalize)
        if batch.has_ended:
            await self._call(self._files.close_batch, self._tenant, self._id)
            counts = batch.request_counts
            log(
                logging.INFO,
                "a batch has ended",
                batch=self._id,
                status=batch.status.value,
                completed=counts.completed,
                failed=counts.failed,
            )

    @staticmethod
    async def _call(work: Callable[..., Any], *arguments: Any) -> Any:
        return await asyncio.to_thread(work, *arguments)

    def _save(self) -> None:
        self._files.save_batch(self._tenant, self._batch)

    def _now(self) -> int:
        return int(self._files.clock())

    # --- input ------------------------------------------------------------------------------------

    async def _validate(self) -> None:
        """Check the input file, after which the batch is in progress or has failed."""
        batch = self._batch
        checker = Checker(batch.endpoint, self._limits.most_lines)
        try:
            with closing(await self._call(self._content)) as file:
                await self._call(checker.check, file)
        except NotFound:
            text = f"the file {batch.input_file_id!r} does not exist any more"
            checker.errors = [LineError("file_not_found", text, param="input_file_id")]
        if checker.errors:
            batch.status, batch.failed_at = Status.FAILED, self._now()
            batch.errors = BatchErrors(checker.errors)
        else:
            batch.status, batch.in_progress_at = Status.IN_PROGRESS, self._now()
            batch.request_counts.total = checker.total
        await self._call(self._save)

    def _content(self) -> BinaryIO:
        return self._files.content(self._tenant, self._batch.input_file_id)

    async def _lines(self) -> AsyncIterator[Line]:
        """Yield the lines of the input file that have no result."""
        with closing(await self._call(self._content)) as file:
            while some := await self._call(file.readlines, READ_BYTES):
                for line in _requests(some):
                    if line.custom_id not in self._answered:
                        yield line

    # --- results ----------------------------------------------------------------------------------

    def _read_results(self) -> None:
        """Read the results of earlier runs."""
        counts = self._batch.request_counts
        counts.completed = counts.failed = 0
        for result, _ in distinct_results(self._files.results(self._tenant, self._id)):
            self._answered.add(result.custom_id)
            self._count(succeeded=result.succeeded)

    def _count(self, *, succeeded: bool) -> None:
        counts = self._batch.request_counts
        counts.completed += succeeded
        counts.failed += not succeeded

    async def _store(self) -> None:
        """Store the new results, and then the counts."""
        # A part that is being written is written even if this task is cancelled. It must be counted
        # before the end of the batch.
        storing = asyncio.create_task(self._store_now())
        storing.add_done_callback(lambda task: task.cancelled() or task.exception())
        await asyncio.shield(storing)

    async def _store_now(self) -> None:
        async with self._storing:
            some, self._new, self._new_bytes = self._new, [], 0
            if not some:
                return
            part = f"{round(self._files.clock() * 1e6):013x}-{self._runner.holder}-{self._parts:06}"
            lines = [line for _, _, line in some]
            self._parts += 1
            try:
                await self._call(self._files.add_results, self._tenant, self._id, part, lines)
            except OSError:
                self._new = some + self._new
                raise
            for custom_id, succeeded, _ in some:
                self._answered.add(custom_id)
                self._count(succeeded=succeeded)
            await self._call(self._save)

    # --- progress ---------------------------------------------------------------------------------

    async def _process(self) -> None:
        """Send all lines, until the last result, the end of the window or a cancellation."""
        sending = asyncio.create_task(self._send_all())
        watching = asyncio.create_task(self._watch())
        try:
            await asyncio.wait({sending, watching}, return_when=asyncio.FIRST_COMPLETED)
        finally:
            watching.cancel()
            sending.cancel()
            ended = await asyncio.gather(watching, sending, return_exceptions=True)
            if not isinstance(ended[0], LostSlot):
                await self._store()
        for error in ended:
            if isinstance(error, ExceptionGroup):
                raise error.exceptions[0]
            if isinstance(error, Exception):
                raise error
        self._batch.status, self._batch.finalizing_at = Status.FINALIZING, self._now()
        self._batch.waits = None
        await self._call(self._save)

    async def _watch(self) -> None:
        """Store results regularly. Return after a cancellation, or at the end of the window.

        Raises:
            LostSlot: another gateway may run the batch.
            Stopped: the gateway accepts no requests any more.
        """
        while self._runner.accepts():
            await self._renew()
            try:
                await self._store()
                await self._show_wait()
                cancelled_at = await self._call(self._files.cancelled_at, self._tenant, self._id)
            except OSError as error:  # the results are kept, and written later
                reason = str(error)
                log(logging.WARNING, "results cannot be stored", batch=self._id, reason=reason)
                cancelled_at = None
            if cancelled_at is not None:
                self._batch.cancelling_at = cancelled_at
                return
            if self._files.clock() >= self._batch.expires_at:
                return
            await asyncio.sleep(self._limits.flush_s)
        raise Stopped

    async def _show_wait(self) -> None:
        """Store why lines wait, if that has changed."""
        if self._batch.waits != self._shown_wait:
            self._shown_wait = self._batch.waits
            await self._call(self._save)

    async def _renew(self) -> None:
        """Renew the slot of the batch, if a third of its time has passed."""
        lease_s = self._limits.lease_s
        if _now_s() - self._held_s < lease_s / 3:
            return
        # Without a response of the store, the slot is still held until its end.
        begin_s = _now_s()
        if await self._runner.hold(self._id):
            self._held_s = begin_s
        elif _now_s() - self._held_s > lease_s:
            raise LostSlot

    async def _send_all(self) -> None:
        """Send all lines without a result, and wait for the results."""
        async with asyncio.TaskGroup() as tasks:
            async for line in self._lines():
                await self._runner.places.acquire()
                # A task that is cancelled before it begins must give back its place, too.
                task = tasks.create_task(self._send(line))
                task.add_done_callback(lambda _: self._runner.places.release())
                if self._new_bytes >= PART_BYTES:
                    await self._store()

    async def _send(self, line: Line) -> None:
        """Send a line until it has a result."""
        answer = await self._answer(line)
        response = LineResponse(answer.status, answer.request_id, Raw(answer.body))
        result = Result(f"batch_req_{secrets.token_hex(12)}", line.custom_id, response)
        data = encode_result(result)
        self._new.append((line.custom_id, result.succeeded, data))
        self._new_bytes += len(data)

    async def _answer(self, line: Line) -> Answer:
        """Return the response to a line, or the error after the last attempt."""
        failures, delay_s = 0, FIRST_DELAY_S
        while True:
            answer = await self._runner.send(self._tenant, self._id, line)
            if answer.status not in _RETRIED:
                self._batch.waits = None
                return answer
            failures += answer.status not in _BUSY or answer.code == _NOT_BUSY
            if failures >= MOST_FAILURES:
                return answer
            wait_s = min(max(answer.retry_after_s or 0.0, delay_s), LONGEST_WAIT_S)
            if answer.status in _BUSY:
                error = read_error(answer.body)
                until = self._now() + math.ceil(wait_s)
                self._batch.waits = BatchWait(error.code or "", error.message, until)
            early = await self._runner.pause(wait_s)
            delay_s = FIRST_DELAY_S if early else min(2 * delay_s, LONGEST_DELAY_S)

    # --- end --------------------------------------------------------------------------------------

    def _finalize(self) -> None:
        """Write the files of results. A repeated call writes the same files."""
        batch, counts = self._batch, self._batch.request_counts
        missing = counts.total - len(self._answered)
        if batch.cancelling_at is not None:
            batch.status, batch.cancelled_at = Status.CANCELLED, self._now()
        elif missing:
            batch.status, batch.expired_at = Status.EXPIRED, self._now()
            counts.failed += missing
        else:
            batch.status, batch.completed_at = Status.COMPLETED, self._now()
        if counts.completed:
            batch.output_file_id = self._write("output", self._stored(succeeded=True))
        if counts.failed:
            batch.error_file_id = self._write("error", self._errors())
        self._save()

    def _write(self, kind: str, lines: Iterable[bytes]) -> str:
        """Write a file of results, and return its id."""
        file_id, name = result_file_id(self._id, kind), f"{self._id}_{kind}.jsonl"
        self._files.write(self._tenant, file_id, name, OUTPUT_PURPOSE, lines)
        return file_id

    def _stored(self, *, succeeded: bool) -> Iterator[bytes]:
        for result, data in distinct_results(self._files.results(self._tenant, self._id)):
            if result.succeeded is succeeded:
                yield data

    def _errors(self) -> Iterator[bytes]:
        """Yield the results that are errors, and those of the lines that have expired."""
        yield from self._stored(succeeded=False)
        if self._batch.status is not Status.EXPIRED:
            return
        text = "This request could not be executed before the completion window expired."
        with closing(self._content()) as file:
            for line in _requests(file):
                if line.custom_id not in self._answered:
                    result_id = f"batch_req_{secrets.token_hex(12)}"
                    error = Failure("batch_expired", text)
                    yield encode_result(Result(result_id, line.custom_id, error=error))


def _requests(lines: Iterable[bytes]) -> Iterator[Line]:
    """Yield the lines of a checked file that have a request."""
    return (read_line(data) for data in lines if data.strip())


def _now_s() -> float:
    return asyncio.get_running_loop().time()
