"""`search`: the highest rate at which enough requests meet their SLO."""

from __future__ import annotations

from dataclasses import dataclass
from math import inf
from typing import Annotated, Any, ClassVar, Final

import aiohttp
import typer
from rich.console import Console

from draftgate.loadgen.cli.ending import INVALID, refuse, write_json
from draftgate.loadgen.cli.flags import JsonOut, Questions, Server, Url
from draftgate.loadgen.search.report import as_dict, probe_in_words, render
from draftgate.loadgen.search.runner import search_load
from draftgate.loadgen.search.types import SHARES, Found, Measured, Stop
from draftgate.loadgen.sending.loop import in_loop

ONLY_A_BOUND: Final = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Wanted:
    """What is looked for, and from where."""

    panel: ClassVar[str] = "Search"

    share: Annotated[
        float, typer.Option(help=f"Of requests in time: {', '.join(map(str, SHARES))}.")
    ] = 0.95
    rate: Annotated[float, typer.Option(help="Requests per second to begin with.")] = 1.0
    max_rate: Annotated[float, typer.Option(help="Try no more than this.")] = inf
    max_requests: Annotated[int, typer.Option(min=1, help="Of all probes together.")] = 100_000
    precision: Annotated[
        float, typer.Option(help="Half the 95 % interval over the rate, at which it ends.")
    ] = 0.05
    arrival: Annotated[str | None, typer.Option(help="As of `run`.")] = None

    def aim(self) -> dict[str, Any]:
        """Return fields of `Aim`."""
        return {
            "share": self.share,
            "precision": self.precision,
            "max_rate_rps": self.max_rate,
            "most_requests": self.max_requests,
        }


def search(
    url: Url,
    questions: Questions,
    wanted: Wanted,
    server: Server,
    json_out: JsonOut = None,
) -> None:
    """Find the highest rate at which enough requests meet their SLO.

    Exit status: 0; 1 if the interval is wider than wanted, or only a bound was found; 2 if the
    server cannot be reached or the flags make no sense; 3 if this generator could not send faster.
    """
    errors = Console(stderr=True)

    def told(measured: Measured, found: Found) -> None:
        errors.print(probe_in_words(measured, found), markup=False, highlight=False)

    try:
        load = questions.load(rate_rps=wanted.rate, arrival=wanted.arrival)
        report = in_loop(search_load(load, server.target(url), told, **wanted.aim()))
        Console().print(render(report))
        if json_out is not None:
            write_json(json_out, as_dict(report))
    except (aiohttp.ClientError, TimeoutError, OSError, ValueError) as error:
        raise refuse(f"cannot search {url}", error) from None
    stop = report.found.stop
    if stop is Stop.GENERATOR:
        raise typer.Exit(INVALID)
    raise typer.Exit(0 if stop is Stop.PRECISE else ONLY_A_BOUND)
