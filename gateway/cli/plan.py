"""`draftgate plan`, which computes the machines that a workload needs.

The command requires the extra `plan`.
"""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Any

import msgspec
import typer

from draftgate.gateway.cli.options import BAD_USAGE, fail
from draftgate.loadgen.command_line import PlainTyper
from draftgate.policies.planning.mix import MachineType, Mix, Workload, cheapest_mix

app = PlainTyper("Compute the machines that a workload needs.")

Matrix = tuple[tuple[float, ...], ...]
"""A number for each range of input lengths (row) and output lengths (column)."""


class Gpu(msgspec.Struct, frozen=True):
    """A type of machine in the file of throughputs.

    Attributes:
        cost: price of an hour.
        tputs: requests per second by bucket, 0 for a bucket that the machine cannot serve.
    """

    cost: float
    tputs: Matrix


class Throughputs(msgspec.Struct, frozen=True):
    """A file of throughputs, in the format of Mélange.

    Attributes:
        workload_distribution: share of each bucket. The shares need not add up to 1.
        total_request_rate: requests per second of all buckets.
        slice_factor: number of parts of a bucket that different types may serve.
    """

    gpu_info: dict[str, Gpu]
    workload_distribution: Matrix
    total_request_rate: float
    slice_factor: int = 1

    @property
    def buckets(self) -> list[tuple[int, int]]:
        """Row and column of each bucket."""
        rows = enumerate(self.workload_distribution)
        return [(row, column) for row, shares in rows for column in range(len(shares))]

    def workload(self) -> Workload:
        """Return the rates of all buckets.

        Raises:
            ValueError: the shares do not have a positive sum.
        """
        shares = _flat(self.workload_distribution)
        total = math.fsum(shares)
        if not total > 0.0:
            raise ValueError("workload_distribution must have a positive sum")
        rates = tuple(self.total_request_rate * share / total for share in shares)
        return Workload(rates, self.slice_factor)

    def types(self, limits: dict[str, int]) -> dict[str, MachineType]:
        """Return the types of machines.

        Args:
            limits: number of available machines, by type.

        Raises:
            ValueError: a matrix has another shape than the distribution, or a limit is for an
                unknown type.
        """
        if unknown := limits.keys() - self.gpu_info.keys():
            raise ValueError(f"--limit {min(unknown)}: the file has no such GPU")
        widths = _widths(self.workload_distribution)
        for name, gpu in self.gpu_info.items():
            if _widths(gpu.tputs) != widths:
                raise ValueError(f"tputs of {name} and workload_distribution differ in shape")
        return {
            name: MachineType(gpu.cost, _flat(gpu.tputs), limits.get(name))
            for name, gpu in self.gpu_info.items()
        }


@app.callback()
def _plan() -> None:
    """Make the questions subcommands even while there is only one."""


@app.command()
def mix(
    tputs: Annotated[
        Path,
        typer.Option(
            help="JSON file with the throughput and price of each GPU, and the workload.",
            metavar="FILE",
        ),
    ],
    limit: Annotated[
        list[str] | None,
        typer.Option(help="Number of GPUs that can be rented. Repeatable.", metavar="GPU=NUMBER"),
    ] = None,
    json_out: Annotated[
        Path | None, typer.Option("--json", help="Write the plan to this file.")
    ] = None,
) -> None:
    """Find the cheapest mix of GPUs that serves a workload within its latency targets.

    The file has the format of Mélange. If no mix is feasible, the plan names the buckets that
    cannot be served.
    """
    if find_spec("scipy") is None:
        fail("scipy is not installed: pip install 'draftgate[plan]'", BAD_USAGE)
    try:
        given = msgspec.json.decode(tputs.read_bytes(), type=Throughputs)
        with _silent_solver():
            found = cheapest_mix(given.workload(), given.types(_limits(limit or [])))
        plan = _as_json(given, found)
        if json_out is not None:
            json_out.write_text(json.dumps(plan, indent=1) + "\n", encoding="utf-8")
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


def _limits(texts: Sequence[str]) -> dict[str, int]:
    """Return the limits of `--limit GPU=NUMBER`.

    Raises:
        ValueError: a text has another form.
    """
    limits = {}
    for text in texts:
        name, _, number = text.rpartition("=")
        if not name or not number.isdecimal():
            raise ValueError(f"--limit {text}: expected GPU=NUMBER")
        limits[name] = int(number)
    return limits


def _flat(matrix: Matrix) -> tuple[float, ...]:
    return tuple(number for row in matrix for number in row)


def _widths(matrix: Matrix) -> list[int]:
    return [len(row) for row in matrix]


@contextmanager
def _silent_solver() -> Iterator[None]:
    """Discard what is written to stdout, because HiGHS writes a line there in rare cases."""
    sys.stdout.flush()
    stdout, nowhere = os.dup(1), os.open(os.devnull, os.O_WRONLY)
    try:
        os.dup2(nowhere, 1)
        yield
    finally:
        os.dup2(stdout, 1)
        os.close(stdout)
        os.close(nowhere)
