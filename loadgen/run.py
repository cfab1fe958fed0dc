"""A load from beginning to end: look at the server, plan, send, replay."""

from __future__ import annotations

import os
import platform
from collections.abc import Iterable, Iterator
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp
from msgspec import to_builtins
from rich.console import Console

from loadgen.client import Patience, open_session
from loadgen.clock import start_clock
from loadgen.corpus import Corpus, open_corpus
from loadgen.driver import run_plan
from loadgen.events import EventWriter
from loadgen.null_server import allow_many_connections
from loadgen.plan import Load, Plan, make_plan
from loadgen.report.live import LiveView, Progress
from loadgen.retrieval import open_index
from loadgen.server import Server, look_at
from loadgen.traces import read_trace
from loadgen.types import Planned, Record, Run
from loadgen.verify import LosslessCheck, verify_lossless
from loadgen.workloads import Rag, Retriever, indexed_passages


@dataclass(frozen=True, slots=True)
class Target:
    """Where to send a load, and how.

    Attributes:
        model: if empty, the first that the server lists.
        verify: how many answers to ask again without speculation.
        events: where to write the run's events.
    """

    url: str
    model: str = ""
    api_key: str = ""
    timeout_s: float = 300.0
    verify: int = 0
    events: Path | None = None

    @property
    def patience(self) -> Patience:
        """How long to wait for an answer."""
        return Patience(self.timeout_s, min(self.timeout_s, Patience().stall_s))


async def run_load(
    load: Load, target: Target, console: Console
) -> tuple[Run, LosslessCheck | None]:
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
        limit = server.max_model_len
        retriever = await _retriever(session, target, server, load, console)
        plan = make_plan(
            load, rows=rows, counter=server.counter, max_model_len=limit, retriever=retriever
        )
        settings = settings_of(load, target, server, corpus)
        with EventWriter(target.events, settings) if target.events else nullcontext() as events:
            run = await _send(session, target, server, plan, load, console, events)
            run.settings = settings
            if events is not None:
                events.end(run)
            if not target.verify or run.interrupted:
                return run, None
            check = await verify_lossless(
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


async def _retriever(
    session: aiohttp.ClientSession, target: Target, server: Server, load: Load, console: Console
) -> Retriever | None:
    """Return what finds passages, if the load asks for any: an index by the server's embeddings.

    Raises:
        ValueError: the server gives none.
    """
    if load.workload != Rag.name:
        return None
    passages = indexed_passages(server.counter, load.text_file)
    with console.status(f"embedding {len(passages)} passages"):
        return await open_index(session, target.url, server.model, passages, target.patience)


async def _send(
    session: aiohttp.ClientSession,
    target: Target,
    server: Server,
    plan: Plan,
    load: Load,
    console: Console,
    events: EventWriter | None,
) -> Run:
    requests = plan.requests
    if plan.concurrency is not None and load.duration_s is not None:
        requests = until(requests, load.duration_s)
    progress = Progress(plan.total, plan.schedule_s or load.duration_s)

    def over(record: Record) -> None:
        progress.record(record)
        if events is not None:
            events.record(record)

    async with LiveView(console, progress):
        run = await run_plan(
            session,
            target.url,
            server.model,
            requests,
            concurrency=plan.concurrency,
            patience=target.patience,
            on_start=progress.start,
            on_record=over,
        )
    if not run.interrupted:
        run.scheduled_duration_s = plan.schedule_s
    return run


def until(requests: Iterable[Planned], duration_s: float) -> Iterator[Planned]:
    """Yield requests until so much time has passed since the first was taken."""
    clock = start_clock()
    for planned in requests:
        if clock() >= duration_s:
            return
        yield planned


def settings_of(
    load: Load, target: Target, server: Server, corpus: Corpus | None
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
