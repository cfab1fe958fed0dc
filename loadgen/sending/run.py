"""A load from beginning to end: look at the server, plan, send, replay."""

from __future__ import annotations

import os
import platform
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import to_builtins
from rich.console import Console

from draftgate.loadgen.checking.lossless import LosslessCheck, check_lossless
from draftgate.loadgen.events import EventWriter
from draftgate.loadgen.planning.corpus import TextCorpus, open_corpus
from draftgate.loadgen.planning.plan import Load, Part, Plan, make_plan
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.report.live import LiveView, Progress
from draftgate.loadgen.sending.client import ClientTimeouts, open_session
from draftgate.loadgen.sending.driver import requests_of, run_plan
from draftgate.loadgen.sending.passage_index import retriever_of
from draftgate.loadgen.sending.processes.parent import run_in_processes
from draftgate.loadgen.sending.processes.wire import SenderJob
from draftgate.loadgen.sending.server_info import Server, look_at
from draftgate.loadgen.sending.stub_server import allow_many_connections
from draftgate.loadgen.types import LoadRun, Record
from draftgate.loadgen.workloads import Rag


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a load, and how.

    Attributes:
        model: if empty, the first that the server lists.
        verify: how many answers to ask again without speculation.
        events: where to write the run's events.
        processes: how many send. They change nothing of the plan, so they are not the load's: what
            is sent is the same by one and by many.
    """

    url: str
    model: str = ""
    api_key: str = ""
    timeout_s: float = 300.0
    verify: int = 0
    events: Path | None = None
    processes: int = 1

    @property
    def patience(self) -> ClientTimeouts:
        """How long to wait for an answer."""
        return ClientTimeouts(self.timeout_s, min(self.timeout_s, ClientTimeouts().stall_s))


async def run_load(
    load: Load, target: Target, console: Console
) -> tuple[LoadRun, LosslessCheck | None]:
    """Send a load, and show how it goes on the console.

    Raises:
        aiohttp.ClientError, TimeoutError: the server cannot be reached.
        OSError: a file cannot be read or written.
        ValueError: the plan cannot be made.
    """
    allow_many_connections()
    rows = () if load.trace is None else read_trace(load.trace)
    asks_corpus = load.workload is not None or load.trace is not None
    corpus = open_corpus(load.text_file) if asks_corpus else None
    async with open_session(target.api_key) as session:
        server = await look_at(session, target.url, target.model, corpus)
        job = job_of(load, target, server)
        retriever = None
        if target.processes == 1 and load.workload == Rag.name:
            with console.status("embedding passages"):
                retriever = await retriever_of(session, job)
        # Where several processes make their own questions, this part is for the plan's length.
        plan = make_plan(
            load,
            rows=rows,
            counter=server.counter,
            max_model_len=server.max_model_len,
            retriever=retriever,
            lazily=target.processes > 1,
            part=Part(0, target.processes),
        )
        settings = settings_of(load, target, server, corpus)
        with EventWriter(target.events, settings) if target.events else nullcontext() as events:
            run = await _send(session, target, job, plan, console, events)
            run.settings = settings
            if events is not None:
                events.end(run)
            if not target.verify or run.interrupted:
                return run, None
            check = await check_lossless(
                session,
                target.url,
                server.model,
                run.records,
                target.verify,
                seed=load.seed,
                patience=target.patience,
            )
            if events is not None:
                events.lossless(check)
    return run, check


async def _send(
    session: aiohttp.ClientSession,
    target: Target,
    job: SenderJob,
    plan: Plan,
    console: Console,
    events: EventWriter | None,
) -> LoadRun:
    progress = Progress(plan.total, plan.schedule_s or job.load.duration_s)

    def over(record: Record) -> None:
        progress.record(record)
        if events is not None:
            events.record(record)

    async with LiveView(console, progress):
        if target.processes > 1:
            run = await run_in_processes(
                job,
                target.processes,
                on_start=progress.start,
                on_record=over,
            )
        else:
            run = await run_plan(
                session,
                job.url,
                job.model,
                requests_of(plan, job.load),
                concurrency=plan.concurrency,
                patience=target.patience,
                on_start=lambda _: progress.start(),
                on_record=over,
            )
    if not run.interrupted:
        run.scheduled_duration_s = plan.schedule_s
    return run


def job_of(load: Load, target: Target, server: Server) -> SenderJob:
    """Return what processes need to know in order to send a load."""
    return SenderJob(
        load,
        target.url,
        server.model,
        target.api_key,
        target.patience,
        server.counter,
        server.max_model_len,
    )


def settings_of(
    load: Load, target: Target, server: Server, corpus: TextCorpus | None
) -> dict[str, Any]:
    """Return all that is needed to repeat a run, but for the API key: it is nobody's to read."""
    return {
        "url": target.url,
        "model": server.model,
        "server_version": server.version,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **{name: value for name, value in to_builtins(load, enc_hook=str).items() if value != {}},
        "timeout_s": target.timeout_s,
        "verify_lossless": target.verify,
        "processes": target.processes,
        "max_model_len": server.max_model_len,
        "corpus": None if corpus is None else corpus.source,
        "prompt_lengths": None if corpus is None else server.counter.source,
        "characters_per_token": None if corpus is None else server.counter.characters_per_token,
        "generator": {
            "python": platform.python_version(),
            "system": f"{platform.system()} {platform.machine()}",
            "cores": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else None,
        },
    }
