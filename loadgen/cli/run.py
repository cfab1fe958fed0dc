"""`run`: send load and check every stream. `report`: the same tables from a run's events."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console

from loadgen.cli.ending import exit_status, in_loop, refuse, tell
from loadgen.cli.flags import Questions, Reports, Sending, Server, Url
from loadgen.events import read_events
from loadgen.run import run_load


def run(
    url: Url,
    questions: Questions,
    sending: Sending,
    server: Server,
    reports: Reports,
    verify_lossless: Annotated[
        int, typer.Option(min=0, help="Ask so many again without speculation, and compare.")
    ] = 0,
    events_out: Annotated[
        Path | None, typer.Option("--events", help="Write the run's events (JSON lines) here.")
    ] = None,
) -> None:
    """Send load and check every stream.

    Exit status: 0; 1 if a stream was not intact or a replay differed; 2 if the server cannot be
    reached or the flags make no sense; 3 if the run is INVALID, because this generator did not
    keep up or was interrupted.
    """
    target = server.target(url, verify=verify_lossless, events=events_out)
    try:
        load = sending.load(questions)
        ran, check = in_loop(run_load(load, target, Console(stderr=True)))
        tell(ran, check, reports)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise refuse(f"cannot load {url}", error) from None
    raise typer.Exit(exit_status(ran, check))


def report(
    events: Annotated[Path, typer.Argument(help="What `--events` wrote.")],
    reports: Reports,
) -> None:
    """Report on the events of a run, as after it; the exit status, too."""
    try:
        ran, check = read_events(events)
        tell(ran, check, reports)
    except (OSError, ValueError) as error:
        raise refuse("cannot report", error) from None
    raise typer.Exit(exit_status(ran, check))
