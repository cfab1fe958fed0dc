"""Measure CPU time, added latency and TTFT of Draftgate, minimal servers and other gateways.

    draftgate bench edge --json OUT [--rivals DIR]

Every target is a separate server, and all targets have the same client. `draftgate sim` generates
its tokens in its own process. Its simulated device takes no time per step (5 ms for paced streams).
The scheduler and the detokeniser therefore run, but no model does. `worker alone` is the cost of
these parts without HTTP. `bare handler` is an aiohttp handler that parses JSON and sends prepared
chunks. The proxies are Draftgate, a bare aiohttp proxy and the other gateways. All proxies use the
same mock upstream.

On a machine with two cores, targets run on the first core, and the client and the mock run on the
second. A row is marked `saturated` if client and mock took more than 85% of their core. Latencies
and rates of a saturated row show the limit of the client, but its CPU time is still valid. Rounds
are interleaved in shuffled order. The command refuses to run on a busy machine.
"""

from __future__ import annotations

import argparse
import os
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final

import msgspec
from rich.console import Console
from rich.table import Table

from bench.edge.hold import PARTS as HOLD_PARTS
from bench.edge.hold import longest_holds
from bench.edge.metrics import Goal, goals, summary
from bench.edge.rounds import WORKER, Row, open_bench, questions, rounds
from bench.edge.targets import in_process, proxies, rivals
from bench.harness.processes import two_cores
from bench.harness.provenance import bench_parser, simulated_provenance
from draftgate.gateway.cli.environment import collect_environment

IDLE_LOAD: Final = 0.5
"""Maximum load average of an idle machine, over one minute."""

PARTS: Final = ("targets", "hold")
_SHOWN: Final = (
    ("cpu_request_us", "CPU/request, us"),
    ("cpu_stream_us", "CPU/stream, us"),
    ("cpu_chunk_us", "CPU/chunk, us"),
    ("cpu_paced_chunk_us", "paced, us"),
    ("added_p50_ms_1", "added p50, ms"),
    ("added_p99_ms_1", "p99"),
    ("added_p50_ms_16", "p50 of 16"),
    ("added_p99_ms_16", "p99 of 16"),
    ("ttft_p50_ms_1", "TTFT p50, ms"),
    ("ttft_p50_ms_16", "of 16"),
    ("requests_per_s_16", "requests/s"),
    ("streams_per_s_16", "streams/s"),
)


def main(arguments: Sequence[str] | None = None) -> None:
    """Run `draftgate bench edge`."""
    args = _parser().parse_args(arguments)
    if os.getloadavg()[0] > IDLE_LOAD and not args.busy:
        sys.stderr.write(
            f"draftgate: the machine is busy (load {os.getloadavg()[0]:.2f}). "
            "Use --busy to measure anyway\n"
        )
        sys.exit(1)
    results: dict[str, Any] = {
        "format": "edge/1",
        **simulated_provenance("edge", arguments),
        "device": collect_environment()["cpu"],
        "load_before": os.getloadavg()[0],
    }
    if "targets" in args.parts:
        results |= _targets(args)
    if "hold" in args.parts:
        results["hold"] = longest_holds(args.rounds)
        for row in results["hold"]:
            parts = (f"{part.removesuffix('_ms')} {max(row[part]):.1f}" for part in HOLD_PARTS)
            print(f"{row['beside']:32} longest in ms: {', '.join(parts)}")
    if args.json is not None:
        args.json.write_bytes(msgspec.json.format(msgspec.json.encode(results), indent=1) + b"\n")


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("edge", __doc__)
    parser.add_argument(
        "--rivals", type=Path, help="folder with the environments of `python -m bench.edge.rivals`"
    )
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--seconds", type=float, default=2.0, help="seconds per question")
    parser.add_argument("--chunks", type=int, default=200, help="number of chunks of a long stream")
    parser.add_argument(
        "--only", action="append", default=[], help="measure only this target; repeatable"
    )
    parser.add_argument("--parts", default=",".join(PARTS), type=lambda text: text.split(","))
    parser.add_argument("--seed", type=int, default=0, help="seed of the shuffled order")
    parser.add_argument("--busy", action="store_true", help="measure even on a busy machine")
    return parser


def _targets(args: argparse.Namespace) -> dict[str, Any]:
    console = Console(stderr=True)
    with tempfile.TemporaryDirectory() as scratch, console.status("starting") as status:
        folder = Path(scratch)
        with open_bench(folder, two_cores()) as bench:
            wanted = [*in_process(folder, bench.upstream), *proxies(folder, bench.upstream)]
            if args.rivals is not None:
                wanted += rivals(args.rivals, bench.upstream, folder)
            for target in wanted:
                if not args.only or target.name in args.only:
                    status.update(f"starting {target.name}")
                    bench.start_target(target)
            question_list = questions(args.chunks)
            rows = list(
                rounds(
                    bench,
                    question_list,
                    number=args.rounds,
                    for_s=args.seconds,
                    seed=args.seed,
                    show_status=status.update,
                )
            )
            missing = bench.missing
    found = summary(_in_order(rows, [*(target.name for target in wanted), WORKER]))
    reached = goals(found)
    _show(found, reached, missing)
    return {
        "cores": two_cores(),
        "missing": missing,
        "figures": found,
        "goals": [goal._asdict() for goal in reached],
        "rows": rows,
    }


def _in_order(rows: Sequence[Row], names: Sequence[str]) -> list[Row]:
    return sorted(rows, key=lambda row: (names.index(row.target), row.round))


def _show(
    found: dict[str, dict[str, Any]], reached: Sequence[Goal], missing: dict[str, str]
) -> None:
    table = Table(title="Edge benchmark: medians over rounds (minimum to maximum)")
    table.add_column("target")
    for _, title in _SHOWN:
        table.add_column(title, justify="right")
    for target, figures in found.items():
        table.add_row(target, *(_cell(figures[name]) for name, _ in _SHOWN))
    console = Console(width=200)
    console.print(table)
    for target, figures in found.items():
        if figures["saturated"] or figures["failed"]:
            saturated = ", ".join(figures["saturated"]) or "no row"
            console.print(f"{target}: saturated in {saturated}; {figures['failed']} failed")
    for name, reason in missing.items():
        console.print(f"{name} is missing: {reason}")
    for goal in reached:
        met = {None: "not measured", True: "met", False: "MISSED"}[goal.met]
        console.print(f"{met:12} {goal.text}: {goal.reached}")


def _cell(figure: dict[str, float]) -> str:
    return f"{_short(figure['median'])} ({_short(figure['least'])}-{_short(figure['most'])})"


def _short(value: float) -> str:
    return f"{value:.0f}" if abs(value) >= 100 else f"{value:.3g}"


if __name__ == "__main__":
    main()
