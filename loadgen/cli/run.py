"""`run`: send load and check every stream. `report`: the same tables from a run's events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console

from draftgate.loadgen.cli.ending import exit_status, refuse, tell, worst
from draftgate.loadgen.cli.flags import Output, Questions, Sending, Server, Url
from draftgate.loadgen.events import read_events
from draftgate.loadgen.report.runs import RunReport, name_of
from draftgate.loadgen.sending.loop import in_loop
from draftgate.loadgen.sending.run import run_load


def run(
    url: Url,
    questions: Questions,
    sending: Sending,
    server: Server,
    output: Output,
    verify_lossless: Annotated[
        int,
        typer.Option(
            min=0,
            help="Send this many requests again without speculation, and compare the texts.",
            rich_help_panel="Results",
        ),
    ] = 0,
    events_out: Annotated[
        Path | None,
        typer.Option(
            "--events",
            help="Write the run's events to this JSON lines file.",
            rich_help_panel="Results",
        ),
    ] = None,
) -> None:
    """Send load and check every stream.

    Exit status: 0; 1 if a stream was not intact or a replay differed; 2 if the server cannot be
    reached or the flags make no sense; 3 if the run is INVALID, because this generator did not
    keep up or was interrupted; 4 if the server refused some (429, 503), and nothing worse.
    """
    target = server.target(
        url, verify=verify_lossless, events=events_out, processes=sending.processes
    )
    try:
        load = sending.load(questions)
        ran, check = in_loop(run_load(load, target, Console(stderr=True)))
        tell([RunReport(url, ran, check)], output)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise refuse(f"cannot load {url}", error) from None
    raise typer.Exit(exit_status(ran, check))


def report(
    events: Annotated[
        list[str], typer.Argument(help="What `--events` wrote; several are shown side by side.")
    ],
    output: Output,
) -> None:
    """Report on the events of a run, as after it; the exit status, too.

    Of several runs, those named alike are points of one curve over the rate. A run's name is its
    file's without rate and round (`auto` for `auto-1.5-2.jsonl`), or say it: NAME=FILE.
    """
    try:
        reports = [_read(named) for named in events]
        tell(reports, output)
    except (OSError, ValueError) as error:
        raise refuse("cannot report", error) from None
    raise typer.Exit(worst(exit_status(one.run, one.lossless) for one in reports))


def _read(named: str) -> RunReport:
    name, said, file = named.rpartition("=")
    path = Path(named if Path(named).exists() else file)
    ran, check = read_events(path)
    return RunReport(name if said and path == Path(file) else name_of(path, ran), ran, check)
