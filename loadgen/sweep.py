"""Runs many loads: rates x servers x modes of speculation, interleaved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final

from rich.console import Console

from draftgate.loadgen.events import read_events
from draftgate.loadgen.measuring.slo import attainment
from draftgate.loadgen.measuring.summary import summarize
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.report.formatting import percent
from draftgate.loadgen.report.goodput import estimate_goodputs
from draftgate.loadgen.report.runs import RunReport, points
from draftgate.loadgen.sending.driver import resume_after_cancel
from draftgate.loadgen.sending.health import invalid_reasons
from draftgate.loadgen.sending.run import load_settings, run_load
from draftgate.loadgen.sending.target import Target
from draftgate.loadgen.types import LoadRun

WARM_UP_SEED: Final = 1_000_003
"""Far from the seeds of rounds, so that no cell finds its own prompts cached."""

WARM_UP_CLIENTS: Final = 2


@dataclass(frozen=True, slots=True)
class SweepTarget:
    """What is compared: a server with one mode of speculation.

    Attributes:
        speculation: requested `MODE` or `MODE:K`; None leaves it to the server.
    """

    name: str
    url: str
    speculation: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    Attributes:
        round: from 1.
    """

    target: SweepTarget
    rate_rps: float
    round: int

    @property
    def stem(self) -> str:
        """The stem of its file: name, rate, round."""
        name = self.target.name.replace(":", "-").replace("/", "-")
        return f"{name}-{self.rate_rps:g}-{self.round}"

    def load(self, base: Load) -> Load:
        """Return its load.

        All targets get the same requests at one rate in one round. All other cells get different
        ones, so that no server has a prompt in its cache from an earlier cell.
        """
        return replace(
            base,
            rate_rps=self.rate_rps,
            speculation=self.target.speculation,
            seed=Random(f"{base.seed} {self.round} {self.rate_rps:g}").getrandbits(31),
        )


Done = list[tuple[Cell, RunReport]]


@dataclass(frozen=True, slots=True)
class Sweep:
    """What to run.

    Attributes:
        load: of all cells, except for rate, mode of speculation and seed.
        target: of all cells, except for the URL.
        warm_up: uncounted requests to each target before the first round.
        folder: for the events of each cell. Valid cells found there are not run again.
    """

    cells: tuple[Cell, ...]
    load: Load
    target: Target
    warm_up: int = 0
    folder: Path | None = None


def parse_targets(servers: Sequence[str], modes: Sequence[str] = ()) -> list[SweepTarget]:
    """Return each server (`URL` or `NAME=URL`) with each mode of speculation, by unique names.

    Raises:
        ValueError: two have the same name.
    """
    named = []
    for position, text in enumerate(servers, 1):
        name, given, url = text.partition("=")
        if not given or "://" in name:
            name, url = ("" if len(servers) == 1 else f"server-{position}"), text
        named.append((name, url.rstrip("/")))
    found = []
    for (name, url), mode in product(named, modes or [""]):
        parts = [name, mode if len(modes) > 1 or not name else ""]
        label = "-".join(filter(None, parts)) or "server"
        found.append(SweepTarget(label, url, mode or None))
    if len({target.name for target in found}) < len(found):
        raise ValueError(f"two servers or modes have the same name: {', '.join(servers)}")
    return found


def parse_rates(text: str) -> list[float]:
    """Return the positive numbers of a comma-separated list, ascending.

    Raises:
        ValueError: it is not such a list.
    """
    try:
        rates = sorted({float(part) for part in text.split(",")})
    except ValueError:
        rates = [0.0]
    if not 0 < rates[0] <= rates[-1] < float("inf"):
        raise ValueError(f"rates must be positive numbers separated by commas, not {text!r}")
    return rates


def shuffled_cells(
    targets: Sequence[SweepTarget], rates: Sequence[float], rounds: int, seed: int
) -> list[Cell]:
    """Return all cells, round by round, each round in its own order.

    Drift over time (the machine's heat, its neighbours) then affects all of them alike.
    """
    cells = list[Cell]()
    for number in range(1, rounds + 1):
        these = [Cell(target, rate, number) for target, rate in product(targets, rates)]
        Random(f"{seed} {number}").shuffle(these)
        cells += these
    return cells


async def run_sweep(sweep: Sweep, console: Console) -> Done:
    """Run the cells in their order, and return those that are done: all, or those before Ctrl-C.

    Prints a line per cell on the console.

    Raises:
        aiohttp.ClientError, TimeoutError: a server cannot be reached.
        OSError: a file cannot be read or written.
        ValueError: the plan cannot be built.
    """
    done: Done = []
    if sweep.folder is not None:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    kept = {cell: run for cell in sweep.cells if (run := _kept(sweep, cell)) is not None}
    missing = [cell.target for cell in sweep.cells if cell not in kept]
    try:
        await _warm_up(sweep, dict.fromkeys(missing), console)
        for cell in sweep.cells:
            run = kept.get(cell)
            if run is None:
                target = replace(sweep.target, url=cell.target.url, events=_path(sweep, cell))
                run, _ = await run_load(cell.load(sweep.load), target, console)
            if run.interrupted:
                break
            done.append((cell, RunReport(cell.target.name, run)))
            result = " ".join(invalid_reasons(run)) or percent(attainment(run.records).share)
            console.print(f"{len(done)}/{len(sweep.cells)} {cell.stem}: {result}", markup=False)
    except asyncio.CancelledError:
        resume_after_cancel()
    return done


def as_dict(sweep: Sweep, done: Done) -> dict[str, Any]:
    """Return the `sweep/1` of the cells that are done, in the order in which they were run."""
    cells = [
        {
            "name": cell.target.name,
            "rate_rps": cell.rate_rps,
            "round": cell.round,
            "summary": summarize(report.run),
        }
        for cell, report in done
    ]
    known = points([report for _, report in done])
    return {
        "format": "sweep/1",
        "cells_planned": len(sweep.cells),
        "load": load_settings(sweep.load) | {"rate_rps": None},
        "warm_up_requests": sweep.warm_up,
        "cells": cells,
        "goodput": [asdict(goodput) for goodput in estimate_goodputs(known)],
    }


async def _warm_up(sweep: Sweep, targets: Iterable[SweepTarget], console: Console) -> None:
    for target in targets if sweep.warm_up else ():
        load = replace(
            Cell(target, 1.0, 1).load(sweep.load),
            rate_rps=None,
            arrival=None,
            duration_s=None,
            concurrency=WARM_UP_CLIENTS,
            requests=sweep.warm_up,
            seed=sweep.load.seed + WARM_UP_SEED,
        )
        run, _ = await run_load(load, replace(sweep.target, url=target.url), console)
        if run.interrupted:
            raise asyncio.CancelledError


def _path(sweep: Sweep, cell: Cell) -> Path | None:
    return None if sweep.folder is None else sweep.folder / f"{cell.stem}.jsonl"


def _kept(sweep: Sweep, cell: Cell) -> LoadRun | None:
    """Return the run of a cell if the folder holds it, complete, valid and of the same load."""
    path = _path(sweep, cell)
    if path is None or not path.exists():
        return None
    run, _ = read_events(path)
    wanted = load_settings(cell.load(sweep.load))
    same = all(run.settings.get(name) == value for name, value in wanted.items())
    return run if same and not invalid_reasons(run) else None
