"""Runs loads at every combination of rate, server and speculation mode, interleaved."""

from __future__ import annotations

import asyncio
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass, replace
from itertools import product
from pathlib import Path
from random import Random
from typing import Any, Final

from rich.console import Console

from draftgate.addresses import mask_url, read_server_url
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
"""An offset far from the seeds of rounds, so that no cell finds its own prompts in the cache."""

WARM_UP_CLIENTS: Final = 2


@dataclass(frozen=True, slots=True)
class SweepTarget:
    """A server with one mode of speculation, which a sweep compares with others.

    Attributes:
        speculation: the requested `MODE` or `MODE:K`, or None for the server's default.
    """

    name: str
    url: str
    speculation: str | None = None


@dataclass(frozen=True, slots=True)
class Cell:
    """One run of a sweep.

    Attributes:
        round: the number of the round, from 1.
    """

    target: SweepTarget
    rate_rps: float
    round: int

    @property
    def stem(self) -> str:
        """The stem of the cell's file name: target name, rate and round."""
        name = self.target.name.replace(":", "-").replace("/", "-")
        return f"{name}-{self.rate_rps:g}-{self.round}"

    def load(self, base: Load) -> Load:
        """Return the load of this cell.

        All targets receive the same requests at one rate in one round. Different rates and rounds
        have different requests, so that no server has a prompt in its cache from an earlier cell.
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
    """The cells to run, and what they have in common.

    Attributes:
        load: the load of all cells, except for rate, mode of speculation and seed.
        target: the target of all cells, except for the URL.
        warm_up: uncounted requests to each target before the first round.
        folder: the folder for the events of each cell. A valid cell found in it is not run again.
    """

    cells: tuple[Cell, ...]
    load: Load
    target: Target
    warm_up: int = 0
    folder: Path | None = None


def parse_targets(servers: Sequence[str], modes: Sequence[str] = ()) -> list[SweepTarget]:
    """Return each server (`URL` or `NAME=URL`) with each mode of speculation, by unique names.

    Raises:
        ValueError: two targets have the same name, or a text is not the address of a server.
    """
    named = []
    for position, text in enumerate(servers, 1):
        name, given, url = text.partition("=")
        if not given or "://" in name:
            name, url = ("" if len(servers) == 1 else f"server-{position}"), text
        named.append((name, read_server_url(url)))
    found = []
    for (name, url), mode in product(named, modes or [""]):
        parts = [name, mode if len(modes) > 1 or not name else ""]
        label = "-".join(filter(None, parts)) or "server"
        found.append(SweepTarget(label, url, mode or None))
    if len({target.name for target in found}) < len(found):
        raise ValueError(
            f"two servers or modes have the same name: {', '.join(map(mask_url, servers))}"
        )
    return found


def parse_rates(text: str) -> list[float]:
    """Return the positive numbers of a comma-separated list, in ascending order.

    Raises:
        ValueError: the text is not a list of positive numbers.
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
    """Return all cells, round by round, each round in its own random order.

    Drift over time (the machine's temperature, other processes) then affects all targets alike.
    """
    cells = list[Cell]()
    for number in range(1, rounds + 1):
        these = [Cell(target, rate, number) for target, rate in product(targets, rates)]
        Random(f"{seed} {number}").shuffle(these)
        cells += these
    return cells


async def run_sweep(sweep: Sweep, console: Console) -> Done:
    """Run the cells in order, and return all completed cells, also after Ctrl-C.

    Prints a line per cell on the console.

    Raises:
        aiohttp.ClientError, TimeoutError: a server cannot be reached.
        OSError: a file cannot be read or written.
        ValueError: the plan cannot be built.
    """
    done: Done = []
    if sweep.folder is not None:
        sweep.folder.mkdir(parents=True, exist_ok=True)
    kept = {cell: run for cell in sweep.cells if (run := _stored_run(sweep, cell)) is not None}
    missing = [cell.target for cell in sweep.cells if cell not in kept]
    try:
        await _warm_up(sweep, dict.fromkeys(missing), console)
        for cell in sweep.cells:
            run = kept.get(cell)
            if run is None:
                target = replace(sweep.target, url=cell.target.url, events=_path(sweep, cell))
                run, _ = await run_load(cell.load(sweep.load), target, console)
            if run.interrupted and not run.lost:  # the loss of a process makes one cell INVALID
                break
            done.append((cell, RunReport(cell.target.name, run)))
            result = " ".join(invalid_reasons(run)) or percent(attainment(run.records).share)
            console.print(f"{len(done)}/{len(sweep.cells)} {cell.stem}: {result}", markup=False)
    except asyncio.CancelledError:
        resume_after_cancel()
    return done


def sweep_as_dict(sweep: Sweep, done: Done) -> dict[str, Any]:
    """Return the `sweep/1` result of the completed cells, in the order in which they ran."""
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


def _stored_run(sweep: Sweep, cell: Cell) -> LoadRun | None:
    """Return the stored run of a cell if it is complete, valid and of the same load."""
    path = _path(sweep, cell)
    if path is None or not path.exists():
        return None
    run, _ = read_events(path)
    wanted = load_settings(cell.load(sweep.load))
    same = all(run.settings.get(name) == value for name, value in wanted.items())
    return run if same and not invalid_reasons(run) else None
