"""`sweep`: rates x servers x modes of speculation, interleaved."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Annotated

import aiohttp
import typer
from rich.console import Console

from draftgate.loadgen.cli.ending import INVALID, exit_status, refuse, worst, write_json
from draftgate.loadgen.cli.flags import HtmlOut, JsonOut, Questions, Server
from draftgate.loadgen.sending.loop import in_loop
from draftgate.loadgen.sweep.cells import contenders, in_order, numbers


def sweep(  # noqa: PLR0913, PLR0917 - flags
    servers: Annotated[
        list[str], typer.Argument(help="URL, or several with names: off=http://127.0.0.1:8001 ...")
    ],
    questions: Questions,
    server: Server,
    rates: Annotated[str, typer.Option(help="Requests per second, with commas: 0.5,1,2.")],
    arrival: Annotated[str | None, typer.Option(help="As of a run; default: poisson.")] = None,
    duration: Annotated[float, typer.Option(help="Seconds to send for, in each cell.")] = 30.0,
    rounds: Annotated[int, typer.Option(min=1, help="How often to run each cell.")] = 1,
    warm_up: Annotated[
        int, typer.Option(min=0, help="Requests to each server first, not counted.")
    ] = 8,
    events_out: Annotated[
        Path | None,
        typer.Option(
            "--events", help="Folder for each cell's events; valid ones are not run again."
        ),
    ] = None,
    json_out: JsonOut = None,
    html_out: HtmlOut = None,
) -> None:
    """Run every rate against every server and mode (`--speculation off,ngram:4`), in turns.

    Within a round the order is shuffled; at one rate all are asked the same at one time. Ctrl-C
    keeps what is done. Exit status as of a run, the worst of all cells'.
    """
    from draftgate.loadgen.report.sweep import finish
    from draftgate.loadgen.sweep.run import Sweep, run_sweep

    console = Console(stderr=True)
    try:
        modes = questions.speculation.split(",") if questions.speculation else []
        found, at = contenders(servers, modes), numbers(rates)
        asked = replace(questions, speculation=None)
        base = asked.load(rate_rps=at[0], arrival=arrival, duration_s=duration)
        cells = tuple(in_order(found, at, rounds, base.seed))
        planned = Sweep(cells, base, server.target(""), warm_up, events_out)
        done = in_loop(run_sweep(planned, console))
        if not done:
            raise ValueError("interrupted before the first cell was done")
        result = finish(planned, done, html_out)
        if json_out is not None:
            write_json(json_out, result)
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise refuse("cannot sweep", error) from None
    unfinished = INVALID if len(done) < len(cells) else 0
    ended = [exit_status(report.run, None) for _, report in done]
    raise typer.Exit(worst([unfinished, *ended]))
