"""The runner of batches, whose process or storage fails at any point."""

from __future__ import annotations

import asyncio
import json
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from itertools import count
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftgate.gateway.batches.batch import Batch, Line, Status
from draftgate.gateway.batches.blobs import Blobs, LocalBlobs, RemoteBlobs, open_blobs
from draftgate.gateway.batches.files import Files, new_batch_id
from draftgate.gateway.batches.run import Answer, Limits
from draftgate.gateway.batches.runner import BatchRunner
from draftgate.gateway.state.commands import HoldSlots
from draftgate.gateway.state.memory.store import MemoryStore
from tests.gateway.harness import eventually

URL = "/v1/completions"
LINES = 6
LIMITS = Limits(concurrency=2, most_lines=100, flush_s=0.0, scan_s=0.005, lease_s=30.0)
FAILING = "line-3"


class KilledBlobs(LocalBlobs):
    """A folder whose process is killed before or after one of its changes."""

    def __init__(self, root: Path, at: int | None, *, after: bool) -> None:
        super().__init__(root)
        self._changes = count()
        self._at, self._after = at, after
        self.dead = False

    def put(self, name, chunks):
        self._change(lambda: super(KilledBlobs, self).put(name, chunks))

    def delete(self, name):
        self._change(lambda: super(KilledBlobs, self).delete(name))

    def open(self, name):
        if self.dead:
            raise OSError("killed")
        return super().open(name)

    def _change(self, change: Callable[[], None]) -> None:
        dies = not self.dead and next(self._changes) == self._at
        if self.dead or (dies and not self._after):
            self.dead = True
            raise OSError("killed")
        change()
        if dies:
            self.dead = True
            raise OSError("killed")


async def answer(tenant: str, batch_id: str, line: Line) -> Answer:
    """Respond to a line, or refuse it if it is the failing one."""
    await asyncio.sleep(0.001 * (int(line.custom_id[-1]) % 3))
    failed = line.custom_id == FAILING
    return Answer(400 if failed else 200, b'{"of":"%b"}' % line.custom_id.encode(), "r")


def new_batch(files: Files, *, lines: int = LINES, window_s: int = 3600) -> Batch:
    """Store a file and a batch of the tenant `t`."""
    rows = [
        {"custom_id": f"line-{number}", "method": "POST", "url": URL, "body": {"prompt": "a"}}
        for number in range(lines)
    ]
    data = "\n".join(map(json.dumps, rows)).encode()
    file = files.add("t", "in.jsonl", "batch", [data])
    now_s = files.clock()
    batch = Batch(
        id=new_batch_id(now_s),
        endpoint=URL,
        input_file_id=file.id,
        completion_window="1h",
        created_at=int(now_s),
        expires_at=int(now_s) + window_s,
    )
    files.add_batch("t", batch)
    return batch


@asynccontextmanager
async def running(
    blobs: Blobs,
    store: MemoryStore | None = None,
    send: Callable[[str, str, Line], Awaitable[Answer]] = answer,
    limits: Limits = LIMITS,
) -> AsyncIterator[BatchRunner]:
    """Run the batches in some blobs."""
    runner = BatchRunner(Files(blobs, time.time), store or MemoryStore(), send, limits)
    task = asyncio.create_task(runner.run())
    try:
        yield runner
    finally:
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)


async def ended(files: Files, batch: Batch) -> bool:
    """Return whether a batch has ended, and its gateway has removed its parts."""
    return files.record("t", batch.id).has_ended and not files.open_batches()


def results(files: Files, file_id: str | None) -> list[dict]:
    """Return the lines of a file of results."""
    if file_id is None:
        return []
    with files.content("t", file_id) as file:
        return [json.loads(line) for line in file]


def check_results(files: Files, batch: Batch) -> None:
    """Check that each line has its own result exactly once."""
    found = files.batch("t", batch.id)
    assert found.status is Status.COMPLETED
    output, errors = results(files, found.output_file_id), results(files, found.error_file_id)
    ids = Counter(row["custom_id"] for row in (*output, *errors))
    assert ids == Counter(f"line-{number}" for number in range(LINES))
    assert [row["custom_id"] for row in errors] == [FAILING]
    assert all(row["response"]["body"] == {"of": row["custom_id"]} for row in (*output, *errors))
    counts = found.request_counts
    assert (counts.total, counts.completed, counts.failed) == (LINES, LINES - 1, 1)
    assert not files.blobs.names(f"{tenant_folder(files)}/results/{batch.id}")


def tenant_folder(files: Files) -> str:
    (name,) = files.blobs.names("tenants")
    return f"tenants/{name}"


async def crash(folder: Path, batch: Batch, at: int, *, after: bool) -> bool:
    """Run a batch until the process is killed, and return whether it ended before."""
    blobs, files = KilledBlobs(folder, at, after=after), Files(LocalBlobs(folder), time.time)
    async with running(blobs):

        async def stopped() -> bool:
            return blobs.dead or await ended(files, batch)

        await eventually(stopped)
        return not blobs.dead


async def complete(folder: Path, batch: Batch) -> None:
    """Run a batch to its end."""
    async with running(LocalBlobs(folder)) as runner:
        await eventually(lambda: ended(runner.files, batch))


@pytest.mark.parametrize("after", [False, True])
async def test_a_crash_at_any_change_of_the_storage_loses_and_doubles_nothing(
    after: bool, tmp_path: Path
) -> None:
    """Whichever file the process was about to change or has just changed when it was killed, the
    next process completes the batch with one result for each line."""
    for at in count():
        folder = tmp_path / str(at)
        files = Files(LocalBlobs(folder), time.time)
        batch = new_batch(files)
        done = await crash(folder, batch, at, after=after)
        await complete(folder, batch)
        check_results(files, batch)
        if done:
            break
    assert at > 8  # the changes of a run


@given(st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=4))
def test_several_crashes_lose_and_double_nothing(
    tmp_path_factory: pytest.TempPathFactory, crashes: list[tuple[int, bool]]
) -> None:
    """A batch whose process is killed several times has one result for each line in the end."""

    async def scenario() -> None:
        folder = tmp_path_factory.mktemp("files")
        files = Files(LocalBlobs(folder), time.time)
        batch = new_batch(files)
        for at, after in crashes:
            await crash(folder, batch, at, after=after)
        await complete(folder, batch)
        check_results(files, batch)

    asyncio.run(scenario())


async def test_only_one_of_two_gateways_runs_a_batch(tmp_path: Path) -> None:
    """While the gateway of a batch renews its slot, another gateway sends none of the lines."""
    store, files = MemoryStore(), Files(LocalBlobs(tmp_path), time.time)
    batch, sent = new_batch(files), Counter[str]()

    async def counted(tenant: str, batch_id: str, line: Line) -> Answer:
        sent[line.custom_id] += 1
        await asyncio.sleep(0.02)
        return await answer(tenant, batch_id, line)

    first = running(LocalBlobs(tmp_path), store, counted)
    second = running(LocalBlobs(tmp_path), store, counted)
    async with first, second:
        await eventually(lambda: ended(files, batch))
    check_results(files, batch)
    assert set(sent.values()) == {1}


async def test_another_gateway_continues_a_batch_whose_slot_is_not_renewed(tmp_path: Path) -> None:
    """A gateway that cannot renew its slot stops, and another one completes the batch. Results of
    the first gateway that arrive later do not count twice."""
    clock = time.monotonic
    store, files = MemoryStore(clock), Files(LocalBlobs(tmp_path), time.time)
    batch, first = new_batch(files), asyncio.Event()
    limits = Limits(concurrency=2, most_lines=100, flush_s=0.01, scan_s=0.01, lease_s=0.2)

    class Partitioned(MemoryStore):
        """The same store, which does not respond after the first command."""

        def __init__(self) -> None:
            super().__init__(clock)
            self.held = False

        def apply(self, command):
            if isinstance(command, HoldSlots):
                if self.held:
                    return False
                self.held = store.apply(command)
                return self.held
            return None

    async def never(tenant: str, batch_id: str, line: Line) -> Answer:
        if line.custom_id == "line-0":
            return await answer(tenant, batch_id, line)
        first.set()
        await asyncio.Event().wait()
        raise AssertionError

    async with running(LocalBlobs(tmp_path), Partitioned(), never, limits):
        await first.wait()
        async with running(LocalBlobs(tmp_path), store, answer, limits):
            await eventually(lambda: ended(files, batch))
    check_results(files, batch)


async def test_a_refusal_is_retried_and_a_failure_is_not_retried_for_ever(tmp_path: Path) -> None:
    """Lines wait for capacity without limit. A line that makes workers fail gets the error."""
    files = Files(LocalBlobs(tmp_path), time.time)
    batch, sent = new_batch(files), Counter[str]()

    async def refusing(tenant: str, batch_id: str, line: Line) -> Answer:
        sent[line.custom_id] += 1
        if line.custom_id == FAILING:
            return Answer(503, b'{"of":"line-3"}', "r", "worker_failed", 0.0)
        if line.custom_id == "line-1" and sent["line-1"] <= 8:
            return Answer(429, b"{}", "r", "overloaded", 0.0)
        return await answer(tenant, batch_id, line)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("draftgate.gateway.batches.run.FIRST_DELAY_S", 0.0)
        async with running(LocalBlobs(tmp_path), send=refusing):
            await eventually(lambda: ended(files, batch))
    check_results(files, batch)
    assert sent == {**{f"line-{n}": 1 for n in range(LINES)}, "line-1": 9, FAILING: 5}


async def test_results_wait_for_a_full_disk(tmp_path: Path) -> None:
    """If the storage fails for a while, the results are stored afterwards, without a second
    request."""
    files, sent = Files(LocalBlobs(tmp_path), time.time), Counter[str]()
    batch = new_batch(files)

    class Full(LocalBlobs):
        left = 0.3

        def put(self, name, chunks):
            if "/results/" in name and time.monotonic() < until_s:
                raise OSError("no space left on device")
            super().put(name, chunks)

    async def counted(tenant: str, batch_id: str, line: Line) -> Answer:
        sent[line.custom_id] += 1
        await asyncio.sleep(0.1)
        return await answer(tenant, batch_id, line)

    until_s = time.monotonic() + 0.2
    limits = Limits(concurrency=2, most_lines=100, flush_s=0.01, scan_s=0.01)
    async with running(Full(tmp_path), send=counted, limits=limits):
        await eventually(lambda: ended(files, batch))
    check_results(files, batch)
    assert set(sent.values()) == {1}


async def test_a_batch_expires_with_an_error_for_each_line_that_did_not_run(tmp_path: Path) -> None:
    """At the end of its window, a batch has the results so far, and errors for all other lines."""
    now_s = time.time()
    files = Files(LocalBlobs(tmp_path), lambda: now_s)
    batch = new_batch(files, window_s=3600)

    async def two_are_stored() -> bool:
        return files.batch("t", batch.id).request_counts.completed == 2

    async def some(tenant: str, batch_id: str, line: Line) -> Answer:
        nonlocal now_s
        if line.custom_id not in {"line-0", "line-1"}:
            await eventually(two_are_stored)
            now_s += 3601
            await asyncio.Event().wait()
        return await answer(tenant, batch_id, line)

    runner = BatchRunner(files, MemoryStore(), some, LIMITS)
    task = asyncio.create_task(runner.run())
    await eventually(lambda: ended(files, batch))
    task.cancel()
    found = files.batch("t", batch.id)
    assert found.status is Status.EXPIRED
    output, errors = results(files, found.output_file_id), results(files, found.error_file_id)
    assert sorted(row["custom_id"] for row in output) == ["line-0", "line-1"]
    assert sorted(row["custom_id"] for row in errors) == [f"line-{n}" for n in range(2, LINES)]
    assert {row["error"]["code"] for row in errors} == {"batch_expired"}


async def test_a_batch_runs_at_a_url_of_fsspec(tmp_path: Path) -> None:
    """The same batch runs in the file system of a URL."""
    blobs = open_blobs(f"memory://{tmp_path.name}")
    assert isinstance(blobs, RemoteBlobs)
    files = Files(blobs, time.time)
    batch = new_batch(files)
    async with running(blobs):
        await eventually(lambda: ended(files, batch))
    check_results(files, batch)
