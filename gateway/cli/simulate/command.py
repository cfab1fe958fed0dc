"""`draftgate simulate`: simulate, show how far it is, print and write results."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from draftgate.gateway.cli.simulate.experiment import Results, Setup, Told, run_experiment
from draftgate.gateway.cli.simulate.report import page, render
from draftgate.gateway.cli.simulate.results import as_json


@dataclass(frozen=True, slots=True)
class Output:
    """Where results go beside the terminal."""

    json: Path | None
    html: Path | None


def run_simulate(setup: Setup, output: Output) -> None:
    """Simulate, print the table, and write what was asked for.

    Raises:
        OSError: a file cannot be used.
        ValueError: a setting is wrong.
    """
    errors = Console(stderr=True)
    with _shown(errors, setup) as told:
        results = run_experiment(setup, told)
    _write(setup, results, output)
    Console().print(render(results))
    rate = results.requests / max(results.cpu_s, 1e-9)
    effort = f"{results.requests} requests in {results.cpu_s:.1f} CPU s: {rate:.0f} per CPU second"
    errors.print(effort, highlight=False)


def _write(setup: Setup, results: Results, output: Output) -> None:
    if output.json is not None:
        text = json.dumps(as_json(setup, results), indent=1)
        output.json.write_text(text + "\n", encoding="utf-8")
    if output.html is not None:
        output.html.write_text(page(setup, results), encoding="utf-8")


@contextmanager
def _shown(console: Console, setup: Setup) -> Iterator[Told]:
    """Show how many requests have ended, on a terminal; nothing stays of it."""
    columns = (
        TextColumn("{task.description}", markup=False),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
    )
    with Progress(
        *columns, console=console, transient=True, disable=not console.is_terminal
    ) as bar:
        tasks: dict[tuple[str, int], Any] = {}

        def told(policy: str, seed: int, _record: object) -> None:
            key = (policy, seed)
            if key not in tasks:
                name = policy if setup.repeat == 1 else f"{policy}, seed {seed}"
                tasks[key] = bar.add_task(name, total=setup.load.longest)
            bar.advance(tasks[key])

        yield told
