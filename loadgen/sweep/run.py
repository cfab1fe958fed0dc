"""A sweep from beginning to end: warm up, run each cell, keep what is done."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Final

from msgspec import to_builtins
from rich.console import Console

from draftgate.loadgen.events import read_events
from draftgate.loadgen.measuring.slo import attainment
from draftgate.loadgen.measuring.summary import invalid_reasons
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.report.formatting import percent
from draftgate.loadgen.report.runs import RunReport
from draftgate.loadgen.sending.run import Target, run_load
from draftgate.loadgen.sweep.cells import Cell, Contender
from draftgate.loadgen.types import LoadRun

WARM_UP_SEED: Final = 1_000_003
"""Far from the seeds of rounds, so that no cell finds its own prompts cached."""

WARM_UP_CLIENTS: Final = 2

Done = list[tuple[Cell, RunReport]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run.

    Attributes:
        load: of all cells, but for rate, mode of speculation and round.
        target: of all cells, but for the URL.
        warm_up: requests to each contender before the first round, which are not counted.
        folder: for the events of each cell; valid cells that lie there are not run again.
    """

    cells: tuple[Cell, ...]
    load: Load
    target: Target
    warm_up: int = 0
    folder: Path | None = None


async def run_sweep(sweep: Sweep, console: Console) -> Done:
    """Run the cells in their order, and return those that are done: all, or those before Ctrl-C.

    Reports have the names of the contenders. The console is told how each cell went.

    Raises:
        aiohttp.ClientError, TimeoutError: a server cannot be reached.
        OSError: a file cannot be read or written.
        ValueError: the plan cannot be made.
    """
    done: Done = []
    if sweep.folder is not None:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    kept = {cell: run for cell in sweep.cells if (run := _kept(sweep, cell)) is not None}
    missing = [cell.contender for cell in sweep.cells if cell not in kept]
    try:
        await _warm_up(sweep, dict.fromkeys(missing), console)
        for cell in sweep.cells:
            run = kept.get(cell) or await _run(sweep, cell, console)
            if run.interrupted:
                break
            done.append((cell, RunReport(cell.contender.name, run)))
            how = " ".join(invalid_reasons(run)) or percent(attainment(run.records).share)
            console.print(f"{len(done)}/{len(sweep.cells)} {cell.stem}: {how}", markup=False)
    except asyncio.CancelledError:
        if (this := asyncio.current_task()) is not None:
            this.uncancel()
    return done


async def _warm_up(sweep: Sweep, whom: Iterable[Contender], console: Console) -> None:
    for contender in whom if sweep.warm_up else ():
        load = replace(
            Cell(contender, 1.0, 1).load(sweep.load),
            rate_rps=None,
            arrival=None,
            duration_s=None,
            concurrency=WARM_UP_CLIENTS,
            requests=sweep.warm_up,
            seed=sweep.load.seed + WARM_UP_SEED,
        )
        run, _ = await run_load(load, replace(sweep.target, url=contender.url), console)
        if run.interrupted:
            raise asyncio.CancelledError


async def _run(sweep: Sweep, cell: Cell, console: Console) -> LoadRun:
    path = None if sweep.folder is None else _path(sweep.folder, cell)
    target = replace(sweep.target, url=cell.contender.url, events=path)
    run, _ = await run_load(cell.load(sweep.load), target, console)
    return run


def _path(folder: Path, cell: Cell) -> Path:
    return folder / f"{cell.stem}.jsonl"


def _kept(sweep: Sweep, cell: Cell) -> LoadRun | None:
    """Return a cell's run if it lies in the folder whole and valid, and was asked the same."""
    if sweep.folder is None or not (path := _path(sweep.folder, cell)).exists():
        return None
    run, _ = read_events(path)
    wanted = told(cell.load(sweep.load))
    same = all(run.settings.get(name) == value for name, value in wanted.items())
    return run if same and not invalid_reasons(run) else None


def told(load: Load) -> dict[str, Any]:
    """Return a load as its run's settings tell it."""
    builtins: dict[str, Any] = to_builtins(load, enc_hook=str)
    return {name: value for name, value in builtins.items() if value != {}}
