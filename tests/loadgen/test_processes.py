"""Several processes send one plan by a common clock, and their reports make one run."""

from __future__ import annotations

import asyncio
import io
import json
import os
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Iterator
from dataclasses import replace

import pytest
from msgspec import structs
from rich.console import Console

from draftgate.loadgen.checking.audit import Verdict
from draftgate.loadgen.checking.lossless import choose, replay_of
from draftgate.loadgen.events import End, read_events
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.planning.plan import Load, PlanPart
from draftgate.loadgen.sending import processes as parent
from draftgate.loadgen.sending import sender
from draftgate.loadgen.sending.health import invalid_reasons, merge_health
from draftgate.loadgen.sending.processes import RunMerger, run_in_processes
from draftgate.loadgen.sending.run import run_load
from draftgate.loadgen.sending.sender import (
    JOB,
    REPORT,
    SenderJob,
    SenderReport,
    SenderStart,
    frame,
    receive,
)
from draftgate.loadgen.sending.target import ServerInfo, Target
from draftgate.loadgen.types import LoadRun, Slo
from tests.loadgen.known_records import HEALTHY, a_run, record
from tests.loadgen.mock_server import Mock, Script, serving, serving_in_a_thread
from tests.loadgen.test_cli import command, respond_with

FOUR = Load(requests=4, concurrency=4, max_tokens=8)


def job_of(url: str, load: Load = FOUR) -> SenderJob:
    """Return a job of two processes."""
    return SenderJob(load, Target(url, processes=2), ServerInfo("mock"))


@pytest.fixture
def spawned(monkeypatch) -> list[asyncio.subprocess.Process]:
    """Return the started processes in order."""
    started, spawn = [], asyncio.create_subprocess_exec

    async def spy(*arguments, **options):
        started.append(await spawn(*arguments, **options))
        return started[-1]

    monkeypatch.setattr(parent.asyncio, "create_subprocess_exec", spy)
    return started


def respond_by_seed(monkeypatch, script_of) -> None:
    """Make the server respond to each seed by its own script."""
    original = Mock._stream

    async def stream(self, request, _, body):
        return await original(self, request, script_of(body["seed"]), body)

    monkeypatch.setattr(Mock, "_stream", stream)


async def send_load(url: str, load: Load, processes: int, **target) -> LoadRun:
    """Send a load as the command does."""
    console = Console(file=io.StringIO())
    run, _ = await run_load(load, Target(url, processes=processes, **target), console)
    return run


@pytest.mark.parametrize(
    "load",
    [
        Load(workload="mixed", requests=9, concurrency=3, max_tokens=4, seed=2),
        Load(workload="code", requests=9, rate_rps=300.0, max_tokens=4, slo=Slo(5.0, 1.0)),
    ],
    ids=["closed", "open"],
)
async def test_several_processes_make_the_run_of_one(tmp_path, load: Load) -> None:
    """Plan, texts, verdicts and events equal those of a single process."""
    events, mock = tmp_path / "e.jsonl", Mock()
    async with serving(mock) as url:
        one = await send_load(url, load, 1)
        seeds = sorted(body["seed"] for body in mock.bodies)
        many = await send_load(url, load, 3, events=events)
    assert sorted(body["seed"] for body in mock.bodies[len(seeds) :]) == seeds

    def outcomes(run: LoadRun):
        ordered = sorted(run.records, key=lambda r: r.planned.index)
        return [(r.planned, r.verdict, r.texts, r.finish_reasons, r.usage) for r in ordered]

    assert outcomes(many) == outcomes(one)
    assert many.scheduled_duration_s == one.scheduled_duration_s
    ends = [r.end_s for r in many.records]
    assert ends == sorted(ends)
    assert many.duration_s >= ends[-1]
    assert (many.interrupted, many.lost) == (False, ())
    assert len(many.health.processes) == 3
    assert many.settings | {"processes": 1, "started": ""} == one.settings | {"started": ""}
    again, _ = read_events(events)
    assert summarize(again) == summarize(many)


async def test_all_processes_start_at_the_same_time(monkeypatch) -> None:
    """Every process sends after the common start and receives chunks after the server sent them."""
    starts, mock = [], Mock()

    def spy(message):
        if isinstance(message, SenderStart):
            starts.append(message.at_s)
        return frame(message)

    monkeypatch.setattr(parent, "frame", spy)
    async with serving(mock) as url:
        run = await run_in_processes(job_of(url))
    (start_s,) = set(starts)
    for one in run.records:
        first_s = mock.sent_s[one.planned.request.seed][0]
        assert one.scheduled_s >= 0
        assert start_s + one.sent_s < first_s < start_s + one.chunks[0].at_s


async def test_no_process_starts_before_all_are_ready(monkeypatch) -> None:
    """The parent sets the start when every process has built its requests."""
    calls, ready = [], parent.SenderProcess.wait_until_ready

    async def spy_ready(self):
        await ready(self)
        calls.append("ready")

    def spy_frame(message):
        calls.append(type(message).__name__)
        return frame(message)

    monkeypatch.setattr(parent.SenderProcess, "wait_until_ready", spy_ready)
    monkeypatch.setattr(parent, "frame", spy_frame)
    async with serving(Mock()) as url:
        await run_in_processes(job_of(url))
    assert calls == ["SenderJob", "SenderJob", "ready", "ready", "SenderStart", "SenderStart"]


async def test_crossed_streams_of_two_processes_are_found(monkeypatch) -> None:
    """The parent marks one of two streams with the same id as crossed."""
    respond_with(monkeypatch, fault="same_id")
    async with serving(Mock()) as url:
        run = await run_in_processes(job_of(url, replace(FOUR, requests=2)))
    details = {r.verdict: r.detail for r in run.records}
    assert set(details) == {"ok", "crossed"}
    assert "'same'" in details["crossed"]


def test_merging_keeps_the_first_fault() -> None:
    """The merger adds a fault only to intact records whose id another process had."""
    merger = RunMerger(2, lambda: None, lambda _: None)
    ids = ["a", "a", "", "b"]
    for index in (0, 1):
        records = [
            replace(record(2 * i + index), stream_id=stream_id) for i, stream_id in enumerate(ids)
        ]
        records[3] = replace(records[3], verdict="cut")
        merger.take(index, SenderReport(4, records, End.from_run(a_run())))
    verdicts = [r.verdict for r in sorted(merger.run.records, key=lambda r: r.planned.index)]
    assert verdicts == ["ok", "crossed", "ok", "crossed", "ok", "ok", "cut", "cut"]


async def test_a_process_that_dies_makes_the_run_invalid(monkeypatch, spawned) -> None:
    """The run names the killed process and its open requests.

    The other process stops and keeps its records.
    """
    respond_with(monkeypatch, fault="silent")
    started = []

    def start() -> None:
        started.append(1)
        if len(started) == 4:
            spawned[0].kill()

    async with serving(Mock()) as url:
        run = await run_in_processes(job_of(url), on_start=start)
    (lost,) = run.lost
    assert lost.startswith("process 1 of 2 of the generator died: by SIGKILL")
    assert "2 open requests" in lost
    assert {r.planned.index: r.verdict for r in run.records} == {1: "interrupted", 3: "interrupted"}
    assert run.health.processes[0] is None
    assert run.health.processes[1] is not None
    assert lost in invalid_reasons(run)
    assert [process.returncode for process in spawned] == [-signal.SIGKILL, 0]


async def test_a_run_survives_the_death_of_all_processes(monkeypatch, spawned) -> None:
    """The run of dead processes has no health and names the cause."""
    respond_with(monkeypatch, fault="silent")

    def start() -> None:
        for process in spawned:
            if process.returncode is None:
                process.kill()

    async with serving(Mock()) as url:
        run = await run_in_processes(job_of(url), on_start=start)
    assert (len(run.lost), run.health, run.interrupted) == (2, None, True)
    assert invalid_reasons(run)[:2] == list(run.lost)


async def test_an_interrupted_run_keeps_its_records(monkeypatch, spawned) -> None:
    """A cancelled run ends all processes, and keeps complete and interrupted records."""
    respond_by_seed(monkeypatch, lambda seed: Script() if seed < 2 else Script(fault="stall"))
    done, enough = [], asyncio.Event()

    def over(one) -> None:
        done.append(one)
        if len(done) == 2:
            enough.set()

    async with serving(Mock()) as url:
        running = asyncio.create_task(run_in_processes(job_of(url), on_record=over))
        async with asyncio.timeout(60):
            await enough.wait()
        running.cancel()
        run = await running
    verdicts = {r.planned.index: r.verdict for r in run.records}
    assert verdicts == {0: "ok", 1: "ok", 2: "interrupted", 3: "interrupted"}
    assert all(r.texts[0] for r in run.records if r.verdict == "ok")
    assert sorted(done, key=id) == sorted(run.records, key=id)
    assert run.interrupted
    assert not run.lost
    assert all(run.health.processes)
    assert [process.returncode for process in spawned] == [0, 0]


@pytest.fixture
def _sigint_not_ignored() -> Iterator[None]:
    """Let commands handle SIGINT.

    Shells without job control start background jobs, such as a test run, with SIGINT ignored. All
    programs that such a job starts then ignore SIGINT, too.
    """
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    yield
    signal.signal(signal.SIGINT, before)


@pytest.mark.usefixtures("_sigint_not_ignored")
@pytest.mark.parametrize(
    ("number", "processes"), [(signal.SIGINT, "2"), (signal.SIGTERM, "2"), (signal.SIGINT, "1")]
)
def test_a_signal_ends_the_command_with_its_report(
    tmp_path, monkeypatch, number: int, processes: str
) -> None:
    """A signal to the whole process group leaves all files, and gives its own status."""
    events, received = tmp_path / "e.jsonl", threading.Semaphore(0)
    summary = tmp_path / "run.json"
    original = Mock._stream

    async def stream(self, request, _, body):
        received.release()
        return await original(self, request, Script(fault="stall"), body)

    monkeypatch.setattr(Mock, "_stream", stream)
    with serving_in_a_thread(Mock()) as url:
        flags = ["--requests", "4", "--concurrency", "4", "--processes", processes]
        flags += ["--events", str(events), "--json", str(summary)]
        with subprocess.Popen(
            [sys.executable, "-m", "loadgen", url, *flags],
            start_new_session=True,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        ) as running:
            try:
                assert all(received.acquire(timeout=30) for _ in range(4))
                os.killpg(running.pid, number)
                out, err = running.communicate(timeout=60)
            finally:
                running.kill()
    assert running.returncode == 128 + number, err
    assert "INVALID" in out
    assert not json.loads(summary.read_text())["valid"]
    assert "Traceback" not in err
    run, _ = read_events(events)
    assert [r.verdict for r in run.records] == ["interrupted"] * 4
    assert run.interrupted


async def test_no_process_outlives_its_parent(monkeypatch) -> None:
    """A process exits when the parent's end of the socket is gone during the run."""
    respond_with(monkeypatch, fault="silent")
    ours, theirs = socket.socketpair()
    reader, writer = await asyncio.open_unix_connection(sock=ours)
    async with serving(Mock()) as url, asyncio.timeout(60):
        with theirs:
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", sender.__name__, str(theirs.fileno())),
                pass_fds=[theirs.fileno()],
            )
        writer.write(frame(job_of(url)))
        assert await receive(reader, REPORT) == SenderReport()
        writer.write(frame(SenderStart(0.0)))
        started = 0
        while started < 4:
            started += (await receive(reader, REPORT)).started
        writer.transport.abort()
        assert await process.wait() == 0


async def test_a_process_that_cannot_start_is_an_error(tmp_path, capfd, spawned) -> None:
    """The command fails with the reason if a part of the plan cannot be built."""
    job = job_of("http://127.0.0.1:9", Load(trace=tmp_path / "gone.csv"))
    with pytest.raises(OSError, match=r"process 1 of 2 .* did not start: exit status 1"):
        await run_in_processes(job)
    assert "FileNotFoundError" in capfd.readouterr().err
    assert all(process.returncode is not None for process in spawned)


async def test_an_exception_of_a_callback_ends_the_run(spawned) -> None:
    """A full disk fails the command and leaves no process."""

    def full(_) -> None:
        raise OSError("no space")

    async with serving(Mock()) as url:
        with pytest.raises(OSError, match="no space"):
            await run_in_processes(job_of(url), on_record=full)
    assert all(process.returncode is not None for process in spawned)


def test_a_lossy_speculation_is_found_after_many_processes(monkeypatch) -> None:
    """The parent replays records of its processes and compares the texts."""
    respond_with(monkeypatch, lossy=True)
    with serving_in_a_thread(Mock()) as url:
        flags = ["--requests", 4, "--processes", 2, "--verify-lossless", 3]
        result = command(url, *flags)
    assert result.exit_code == 1
    assert "3 responses compared (3 with drafts), 3 differ" in result.output
    assert "process 2" in result.output


def test_each_process_needs_a_client() -> None:
    """The command rejects fewer clients than processes."""
    with serving_in_a_thread(Mock()) as url:
        result = command(url, "--concurrency", 2, "--processes", 3)
    assert result.exit_code == 2
    assert "2 clients cannot be divided" in result.output


@pytest.mark.parametrize(
    "change",
    [{"max_lag_s": 0.2}, {"p99_lag_s": 0.02}, {"loop_stall_s": 0.3}, {"cpu_share": 0.95}],
)
def test_health_is_that_of_the_worst_process(change: dict) -> None:
    """A single process beyond a limit makes the run INVALID."""
    assert invalid_reasons(LoadRun({}, health=merge_health([HEALTHY, HEALTHY]))) == []
    worst = merge_health([HEALTHY, replace(HEALTHY, **change), None])
    assert len(invalid_reasons(LoadRun({}, health=worst))) == 1
    assert worst.processes[2] is None
    assert merge_health([None]) is None


def test_jobs_and_reports_survive_serialisation(tmp_path) -> None:
    """Paths, 64-bit seeds, extra fields, texts and ids arrive unchanged."""
    load = Load(workload="code", text_file=tmp_path, seed=2**63, rate_rps=1.0, slo=Slo(0.5))
    target = Target("http://server", api_key="sk", events=tmp_path / "e.jsonl")
    job = SenderJob(load, target, ServerInfo("m", max_model_len=7), PlanPart(1, 3))
    assert JOB.decode(frame(job)[4:]) == job
    one = replace(
        record(chunk_tokens=[1, None, 2, 3]), texts=("é\n",), stream_id="s", metrics={"a": 1.5}
    )
    request = replace(one.planned.request, extra=(("speculation", {"mode": "off"}),))
    one = replace(one, planned=replace(one.planned, request=request))
    decoded = REPORT.decode(frame(SenderReport(1, [one]))[4:])
    assert decoded.records == [replace(one, chunks=list(one.chunks))]
    assert choose(decoded.records, 1, 0) == decoded.records
    assert replay_of(decoded.records[0]) == replay_of(one)
    assert one.verdict == Verdict.OK
    assert structs.asdict(decoded)["end"] is None
