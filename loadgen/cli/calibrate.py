"""`calibrate`: how much load this machine's generator holds honestly."""

from __future__ import annotations

from typing import Annotated

import aiohttp
import typer
from rich.console import Console

from draftgate.loadgen.cli.ending import refuse
from draftgate.loadgen.cli.flags import Processes
from draftgate.loadgen.sending.calibrate import Probe, render
from draftgate.loadgen.sending.calibrate import calibrate as find_ceilings
from draftgate.loadgen.sending.loop import in_loop


def calibrate(
    processes: Processes = 1,
    probe_s: Annotated[float, typer.Option(help="Seconds of each of some twenty probes.")] = 4.0,
) -> None:
    """Measure how much load this machine's generator holds honestly, against a null server."""
    errors, console = Console(stderr=True), Console()

    def told(probe: Probe) -> None:
        verdict = f"not held: {probe.reasons[0]}" if probe.reasons else "held"
        errors.print(f"{probe.rate_rps:.0f}/s, {probe.open_streams:.0f} open: {verdict}")

    try:
        result = in_loop(find_ceilings(processes=processes, probe_s=probe_s, on_probe=told))
    except (aiohttp.ClientError, OSError) as error:
        raise refuse("cannot calibrate", error) from None
    console.print(render(result))
