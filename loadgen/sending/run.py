"""Runs a load from beginning to end: inspect the server, plan, send and replay."""

from __future__ import annotations

import asyncio
import os
import platform
from collections.abc import Callable
from contextlib import closing, nullcontext
from datetime import UTC, datetime
from typing import Any

from msgspec import to_builtins
from rich.console import Console

from draftgate.addresses import mask_url
from draftgate.loadgen.checking.lossless import LosslessCheck, check_lossless
from draftgate.loadgen.events import EventWriter
from draftgate.loadgen.planning.corpus import TextCorpus
from draftgate.loadgen.planning.plan import Load, Plan, PlanPart, make_plan
from draftgate.loadgen.planning.traces import read_trace
from draftgate.loadgen.report.live import Progress, live_view
from draftgate.loadgen.sending.client import (
    OpenAIClient,
    allow_many_connections,
    open_session,
)
from draftgate.loadgen.sending.driver import resume_after_cancel, run_plan, timed_requests
from draftgate.loadgen.sending.passage_index import build_retriever
from draftgate.loadgen.sending.processes import run_in_processes
from draftgate.loadgen.sending.sender import SenderJob
from draftgate.loadgen.sending.target import ServerInfo, Target, inspect_server
from draftgate.loadgen.types import LoadRun, Record
from draftgate.loadgen.workloads.rag import Rag


async def run_load(
    load: Load, target: Target, console: Console
) -> tuple[LoadRun, LosslessCheck | None]:
    """Send a load, and show its progress on the console.

    Cancelling (Ctrl-C) ends the run, whose records so far are kept.

    Raises:
        aiohttp.ClientError, TimeoutError: the server cannot be reached.
        OSError: a file cannot be read or written.
        ValueError: the plan cannot be built.
    """
    allow_many_connections()
    rows = () if load.trace is None else read_trace(load.trace)
    corpus = load.open_corpus()
    async with open_session(target.api_key) as session:
        server = await inspect_server(session, target.url, target.model, corpus)
        client = target.client(session, server.model)
        retriever = None
        if target.processes == 1:
            with console.status("preparing"):
                retriever = await build_retriever(client, load, server.counter)
        # Several processes build their own requests, so the parent only needs the plan's length.
        plan = make_plan(
            load,
            rows=rows,
            counter=server.counter,
            max_model_len=server.max_model_len,
            retriever=retriever,
            lazily=target.processes > 1,
            part=PlanPart(0, target.processes),
        )
        settings = describe_settings(load, target, server, corpus)
        writer = closing(EventWriter(target.events, settings)) if target.events else nullcontext()
        with writer as events:
            on_record = (lambda _: None) if events is None else events.record
            job = SenderJob(load, target, server)
            run = await _send(client, job, plan, console, on_record)
            run.settings = settings
            if events is not None:
                events.end(run)
            if not target.verify or run.interrupted:
                return run, None
            try:
                check = await check_lossless(client, run.records, target.verify, seed=load.seed)
            except asyncio.CancelledError:  # the run itself is kept
                run.interrupted = True
                resume_after_cancel()
                return run, None
            if events is not None:
                events.lossless(check)
    return run, check


async def _send(
    client: OpenAIClient,
    job: SenderJob,
    plan: Plan,
    console: Console,
    on_record: Callable[[Record], None],
) -> LoadRun:
    progress = Progress(plan.total, plan.schedule_s or job.load.duration_s)

    def over(record: Record) -> None:
        progress.record(record)
        on_record(record)

    async with live_view(console, progress):
        if job.target.processes > 1:
            run = await run_in_processes(job, on_start=progress.start, on_record=over)
        else:
            run = await run_plan(
                client,
                timed_requests(plan, job.load),
                concurrency=plan.concurrency,
                on_start=lambda _: progress.start(),
                on_record=over,
            )
    if not run.interrupted:
        run.scheduled_duration_s = plan.schedule_s
    return run


def load_settings(load: Load) -> dict[str, Any]:
    """Return the settings of a load for the settings of its run."""
    builtins: dict[str, Any] = to_builtins(load, enc_hook=str)
    unused = {"rag"} if load.workload != Rag.name else set()
    return {name: value for name, value in builtins.items() if value != {} and name not in unused}


def describe_settings(
    load: Load, target: Target, server: ServerInfo, corpus: TextCorpus | None
) -> dict[str, Any]:
    """Return all settings needed to repeat a run, without the API key, which must not be stored."""
    return {
        "url": mask_url(target.url),
        "model": server.model,
        "server_version": server.version,
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        **load_settings(load),
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
