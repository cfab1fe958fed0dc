"""`draftgate plan mix`, the cheapest mix of machines for a workload."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.gateway.cli.plan.options import JsonFile, Limits, limits, write_plan
from draftgate.gateway.cli.plan.solver import require_solver, silent_solver
from draftgate.gateway.cli.plan.throughputs import Throughputs
from draftgate.policies.planning.mix import Mix, cheapest_mix


def mix(
    tputs: Annotated[
        Path,
        typer.Option(
            help="JSON file with the throughput and price of each GPU, and the workload.",
            metavar="FILE",
        ),
    ],
    limit: Limits = None,
    json_out: JsonFile = None,
) -> None:
    """Find the cheapest mix of GPUs that serves a workload within its latency targets.

    The file has the format of Mélange. If no mix is feasible, the plan names the buckets that
    cannot be served.
    """
    require_solver()
    try:
        given = msgspec.json.decode(tputs.read_bytes(), type=Throughputs)
        with silent_solver():
            found = cheapest_mix(given.workload(), given.types(limits(limit or [])))
        plan = _as_json(given, found)
        write_plan(plan, json_out)
    except (OSError, ValueError) as error:
        fail(error, BAD_USAGE)
    if found.feasible:
        _print(given, found)
    else:
        names = ", ".join(map(str, plan["infeasible_buckets"]))
        typer.echo(f"no mix serves the buckets {names} (row and column, from 0)")


def _as_json(given: Throughputs, found: Mix) -> dict[str, Any]:
    return {
        "format": "plan/1",
        "question": "mix",
        "feasible": found.feasible,
        "cost_per_hour": found.cost_per_hour if found.feasible else None,
        "counts": dict(found.counts),
        "infeasible_buckets": [list(given.buckets[one]) for one in found.infeasible_buckets],
    }


def _print(given: Throughputs, found: Mix) -> None:
    from rich.console import Console
    from rich.table import Table

    table = Table("GPU", "number", "cost per hour")
    for name, count in found.counts.items():
        table.add_row(name, str(count), f"{count * given.gpu_info[name].cost:.2f}")
    table.add_section()
    table.add_row("all", str(sum(found.counts.values())), f"{found.cost_per_hour:.2f}")
    Console().print(table)
