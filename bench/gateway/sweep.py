"""Compare the goodput of speculation policies on the shipped model with real servers.

    draftgate bench sweep --json OUT --html OUT --events FOLDER

Each policy has a server with one torch thread. All servers run on one core, and the generator runs
on a second core. Only one server is under load at a time, and idle servers take no CPU time.

First, a closed loop finds the capacity of each server and warms the server up. Then every server
runs at fractions of the capacity of `off` (`--shares`) in shuffled rounds, as in `draftgate load
sweep`. The questions are held-out code that the shipped model was not trained on.
"""

from __future__ import annotations

import asyncio
import os
import tempfile
from argparse import ArgumentParser, Namespace
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, chdir, contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any, Final

import uvloop
from rich.console import Console

from bench.harness.processes import on_core, two_cores
from bench.harness.provenance import bench_parser, simulated_provenance
from bench.harness.servers import fresh_cache, run_server
from draftgate.gateway.cli.environment import collect_environment
from draftgate.loadgen.cli.commands import report_sweep, write_json
from draftgate.loadgen.measuring.metrics import intact
from draftgate.loadgen.planning.plan import Load
from draftgate.loadgen.sending.run import run_load
from draftgate.loadgen.sending.target import Target
from draftgate.loadgen.sweep import (
    Done,
    Sweep,
    SweepTarget,
    parse_rates,
    run_sweep,
    shuffled_cells,
)
from draftgate.loadgen.types import Slo
from training.corpus import held_out_files

POLICIES: Final = "off,fixed:4,smartspec,auto"
SHARES: Final = "0.4,0.6,0.8,1.0,1.25"
"""Fractions of the rate that `off` completes in a closed loop, from light load to overload. The
policies differ between 0.75 and 1 on an AMD EPYC Zen 4 with 2 cores (2026-11-21, "Goodput on
real servers" in bench/results/speculation.md)."""

TTFT_MS, TPOT_MS = 1000.0, 25.0
ANSWER_TOKENS, TEMPERATURE = 128, 0.8
"""Settings of the first recorded curve, kept so that the curves can be compared."""

CLIENTS: Final = 8
"""Number of clients of the closed loop. `off` still meets its TPOT target at this batch size."""

ROUND_S: Final = 520.0
"""Seconds of sending per round, which gives 26 s for each of 20 cells. Two rounds take less than 25
minutes, with four starts, four closed loops, and the draining after each cell."""

TEXT: Final = Path("held_out.txt")
FLAGS: Final = (
    *("--device", "cpu", "--threads", "1"),
    *("--max-model-len", "2048", "--kv-bytes", "256MiB"),
)


@contextmanager
def contending(policies: Sequence[str], scratch: Path) -> Iterator[list[SweepTarget]]:
    """Run a server for each policy while the context lasts.

    Raises:
        RuntimeError: a server does not start.
    """
    core = two_cores().servers
    with ExitStack() as stack:
        found = []
        for policy in policies:
            folder = scratch / policy.replace(":", "-")
            folder.mkdir()
            flags = [*FLAGS, "--speculation", policy]
            cache = fresh_cache(scratch)
            server = stack.enter_context(
                run_server(flags, folder, core, backend="engine", variables=cache)
            )
            found.append(SweepTarget(policy, server.url))
        yield found


def load_of(args: Namespace, cells: int) -> Load:
    """Return the load of a single cell out of `cells`, without its rate."""
    return Load(
        workload="code",
        text_file=TEXT,
        max_tokens=ANSWER_TOKENS,
        temperature=TEMPERATURE,
        slo=Slo.of_ms(TTFT_MS, TPOT_MS),
        duration_s=args.round_s / cells,
        seed=args.seed,
    )


async def capacity_rps(url: str, load: Load, console: Console) -> float:
    """Return the requests per second that a server completes in a closed loop.

    Raises:
        ValueError: the server completed no request, or the run was interrupted.
    """
    closed = replace(load, concurrency=CLIENTS, slo=Slo())
    run, _ = await run_load(closed, Target(url), console)
    if run.interrupted or not intact(run.records):
        raise ValueError(
            f"{url} completed no request in the closed loop, or the run was interrupted"
        )
    return len(intact(run.records)) / run.duration_s


def planned_sweep(
    contenders: Sequence[SweepTarget], args: Namespace, capacities: Mapping[str, float]
) -> Sweep:
    """Return the sweep of the given rates, or of shares of the first policy's capacity.

    Args:
        capacities: requests per second by policy.
    """
    most_rps = capacities[contenders[0].name]
    rates = args.rates or [float(f"{share * most_rps:.2g}") for share in args.shares]
    cells = tuple(shuffled_cells(contenders, rates, args.rounds, args.seed))
    events = None if args.events is None else args.events.absolute()
    load = load_of(args, len(rates) * len(contenders))
    return Sweep(cells, replace(load, rate_rps=rates[0]), Target(""), folder=events)


async def measure(
    contenders: Sequence[SweepTarget], args: Namespace, console: Console
) -> tuple[Sweep, Done, dict[str, float]]:
    """Measure the capacities, choose the rates if none are given, and run the sweep.

    The returned capacities are in requests per second, by policy.
    """
    load = load_of(args, len(args.rates or args.shares) * len(contenders))
    capacities = {c.name: await capacity_rps(c.url, load, console) for c in contenders}
    console.print(f"capacity in requests/s (closed loop): {capacities}")
    sweep = planned_sweep(contenders, args, capacities)
    return sweep, await run_sweep(sweep, console), capacities


def _parser() -> ArgumentParser:
    parser = bench_parser("sweep", __doc__)
    parser.add_argument(
        "--policies",
        default=POLICIES,
        help="comma-separated policies, of which the first sets the rates",
    )
    parser.add_argument(
        "--rates", type=parse_rates, help="requests per second, instead of --shares"
    )
    parser.add_argument(
        "--shares",
        type=parse_rates,
        default=parse_rates(SHARES),
        help="fractions of the capacity of the first policy",
    )
    parser.add_argument("--rounds", type=int, default=2, help="number of shuffled rounds")
    parser.add_argument(
        "--round-s", type=float, default=ROUND_S, help="seconds of sending per round"
    )
    parser.add_argument("--events", type=Path, help="folder for the raw data of each cell")
    parser.add_argument("--seed", type=int, default=0)
    return parser


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench sweep`."""
    args = _parser().parse_args(arguments)
    settings: dict[str, Any] = {
        **simulated_provenance("sweep", arguments),
        "device": collect_environment()["cpu"],
        "load_before": os.getloadavg()[0],
    }
    for name in ("json", "html", "events"):
        path = getattr(args, name)
        setattr(args, name, None if path is None else path.absolute())
    policies = args.policies.split(",")
    with tempfile.TemporaryDirectory() as scratch, contending(policies, Path(scratch)) as found:
        text = "\n".join(p.read_text(encoding="utf-8", errors="ignore") for p in held_out_files())
        (Path(scratch) / TEXT).write_text(text, encoding="utf-8")
        with (
            chdir(scratch),  # runs then name their text file without a folder
            on_core(two_cores().clients),
            asyncio.Runner(loop_factory=uvloop.new_event_loop) as runner,
        ):
            sweep, done, capacities = runner.run(measure(found, args, Console(stderr=True)))
    result = report_sweep(sweep, done, args.html)
    write_json(args.json, result | settings | {"closed_loop_rps": capacities})


if __name__ == "__main__":
    main()
