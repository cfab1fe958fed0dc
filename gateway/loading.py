"""The progress of loading workers, as a bar on a terminal or as log lines elsewhere."""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Coroutine
from contextlib import asynccontextmanager
from typing import Final, Protocol

from rich.console import Console
from rich.progress import BarColumn, Progress, TaskProgressColumn, TextColumn, TimeElapsedColumn

from draftgate.backends.engine.served import loading_phase
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.config.models import plan_models
from draftgate.gateway.logs import log

BAR_DELAY_S: Final = 0.5
"""Delay before the bar appears, in seconds. A bar for a shorter load would only flicker."""

REFRESH_S: Final = 0.1


class HasProgress(Protocol):
    """A node or a fleet."""

    @property
    def progress(self) -> float:
        """The progress of loading, between 0 and 1."""


@asynccontextmanager
async def loading_shown(
    node: HasProgress, config: ServeConfig, console: Console | None = None
) -> AsyncIterator[None]:
    """Show the progress of loading until the block ends.

    Args:
        console: the terminal for the bar, or None for stderr. Stdout holds the command's output.
    """
    console = console or Console(stderr=True)
    own = not config.only_forwards
    what = ", ".join(
        [
            *([config.model or "the shipped model"] if own else []),
            *config.models,
            *config.embedders,
            *(one.shown for one in config.upstream),
        ]
    )
    if config.no_worker:
        what = f"a worker of the pool {config.pool}"
    single = not (config.models or config.embedders)  # several models are in different phases
    phase = loading_phase if config.backend == "engine" and single else _no_phase
    if console.is_terminal:
        async with _in_background(_bar(lambda: node.progress, phase, what, console)):
            yield
        return
    begin_s = time.perf_counter()
    workers = sum(len(plan.worker_configs()) for plan in plan_models(config))
    if config.no_worker:
        log(logging.INFO, "waiting for a worker", pool=config.pool)
    else:
        log(logging.INFO, "loading", backend=config.backend, model=what, workers=workers)
    async with _in_background(_log_phases(lambda: node.progress, phase)):
        yield
    if node.progress >= 1.0:  # a signal may have interrupted loading
        log(logging.INFO, "loaded", seconds=time.perf_counter() - begin_s)


def _no_phase(_progress: float) -> str:
    return ""


@asynccontextmanager
async def _in_background(coroutine: Coroutine[None, None, None]) -> AsyncIterator[None]:
    """Run a coroutine until the block ends."""
    task = asyncio.create_task(coroutine)
    try:
        yield
    finally:
        task.cancel()
        await asyncio.wait({task})


async def _log_phases(progress: Callable[[], float], phase: Callable[[float], str]) -> None:
    """Log each phase when it begins, until cancelled."""
    logged = ""
    while True:
        await asyncio.sleep(REFRESH_S)
        current = phase(progress())
        if current not in {"", logged}:
            log(logging.INFO, current)
            logged = current


async def _bar(
    progress: Callable[[], float], phase: Callable[[float], str], what: str, console: Console
) -> None:
    """Draw the bar until cancelled, then erase it."""
    await asyncio.sleep(BAR_DELAY_S)
    columns = (
        TextColumn("loading {task.description}", markup=False),
        TextColumn("{task.fields[phase]}", markup=False),
        BarColumn(),
        TaskProgressColumn(),
        TimeElapsedColumn(),
    )
    with Progress(*columns, console=console, transient=True, auto_refresh=False) as shown:
        task = shown.add_task(what, total=1.0, phase="")
        while True:
            share = progress()
            shown.update(task, completed=share, phase=phase(share), refresh=True)
            await asyncio.sleep(REFRESH_S)
