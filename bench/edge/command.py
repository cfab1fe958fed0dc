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
import math
import os
import sys
import tempfile
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from statistics import median
from typing import Any, Final, NamedTuple

import msgspec
from rich.console import Console
from rich.table import Table

from bench.edge.hold import PARTS as HOLD_PARTS
from bench.edge.hold import longest_holds
from bench.edge.rounds import WORKER, Row, open_bench, questions, rounds
from bench.edge.targets import Kind, in_process, proxies, rivals
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


# --- Summary metrics of the edge benchmark, as medians over rounds, and its goals -----------------


_WHOLE_1, _WHOLE_16 = "whole, 1 client", "whole, 16 clients"
_SHORT_1, _SHORT_16 = "short stream, 1 client", "short stream, 16 clients"
_LONG_1, _LONG_16 = "long stream, 1 client", "long stream, 16 clients"
_PACED_16: Final = "paced stream, 16 clients"

REQUEST_GOAL_US: Final = 200.0
CHUNK_GOAL_US: Final = 12.0
LITELLM_GOAL: Final = 20.0
BARE_PROXY_GOAL: Final = 1.5
RUST_GOAL: Final = 2.0
RUST: Final = ("vllm-router", "sglang-router")
PROCESSES_GOAL: Final = 1.1
"""CPU per request with several processes, relative to a single process."""


class MetricRange(NamedTuple):
    """The median, the minimum and the maximum of a metric over rounds."""

    median: float
    least: float
    most: float

    @classmethod
    def of(cls, values: Iterable[float]) -> MetricRange:
        """Summarise values, and return NaN if all values are missing."""
        kept = [value for value in values if math.isfinite(value)]
        if not kept:
            return cls(math.nan, math.nan, math.nan)
        return cls(median(kept), min(kept), max(kept))


class Round:
    """The rows of a single target in a single round, by question."""

    def __init__(self, rows: Iterable[Row], before: Round | None = None) -> None:
        """Store the rows.

        Args:
            rows: rows of the target, by question.
            before: the same round of the server that is the baseline of added latency.
        """
        self._rows = {row.question: row for row in rows}
        self._before = before

    def cpu_us(self, question: str) -> float:
        """Return CPU microseconds per request, or NaN if the server's CPU time is unknown."""
        row = self._rows.get(question)
        if row is None or not row.requests or not row.server_cpu_s:
            return math.nan
        return row.server_cpu_s / row.requests * 1e6

    def chunk_us(self, long: str) -> float:
        """Return CPU microseconds per additional chunk, as the slope from short to long streams."""
        row, short = self._rows.get(long), self._rows.get(_SHORT_16)
        if row is None or short is None or not row.requests or not short.requests:
            return math.nan
        more = row.chunks / row.requests - short.chunks / short.requests
        return (self.cpu_us(long) - self.cpu_us(_SHORT_16)) / more if more else math.nan

    def value_of(self, question: str, value: Callable[[Row], float]) -> float:
        """Return a value of the row of a question."""
        row = self._rows.get(question)
        return math.nan if row is None else value(row)

    def added_ms(self, question: str, value: Callable[[Row], float]) -> float:
        """Return the latency above the baseline server, in milliseconds."""
        if self._before is None:
            return math.nan
        return (self.value_of(question, value) - self._before.value_of(question, value)) * 1e3


def _rate(row: Row) -> float:
    return row.requests / row.wall_s


COLUMNS: Final[tuple[tuple[str, Callable[[Round], float]], ...]] = (
    ("cpu_request_us", lambda r: r.cpu_us(_WHOLE_16)),
    ("cpu_stream_us", lambda r: r.cpu_us(_SHORT_16)),
    ("cpu_chunk_us", lambda r: r.chunk_us(_LONG_16)),
    ("cpu_paced_chunk_us", lambda r: r.chunk_us(_PACED_16)),
    ("added_p50_ms_1", lambda r: r.added_ms(_WHOLE_1, lambda row: row.latency_p50_s)),
    ("added_p99_ms_1", lambda r: r.added_ms(_WHOLE_1, lambda row: row.latency_p99_s)),
    ("added_p50_ms_16", lambda r: r.added_ms(_WHOLE_16, lambda row: row.latency_p50_s)),
    ("added_p99_ms_16", lambda r: r.added_ms(_WHOLE_16, lambda row: row.latency_p99_s)),
    ("ttft_p50_ms_1", lambda r: r.value_of(_LONG_1, lambda row: row.ttft_p50_s) * 1e3),
    ("short_ttft_p50_ms_1", lambda r: r.value_of(_SHORT_1, lambda row: row.ttft_p50_s) * 1e3),
    ("ttft_p50_ms_16", lambda r: r.value_of(_PACED_16, lambda row: row.ttft_p50_s) * 1e3),
    ("requests_per_s_16", lambda r: r.value_of(_WHOLE_16, _rate)),
    ("streams_per_s_16", lambda r: r.value_of(_LONG_16, _rate)),
)
"""Name and value of each metric. `ttft_p50_ms_16` uses paced streams, because the first chunk of an
unpaced stream waits for chunks of other streams. Unpaced TTFT would favour a server that sends
only a single stream at a time."""


def summary(rows: Sequence[Row]) -> dict[str, dict[str, Any]]:
    """Return the metrics of each target, in the order of the rows.

    Added latency is relative to a server with prepared responses. This server runs on the client's
    core for proxies, as their upstream does. It has its own core for all other targets.
    """
    kinds = {row.target: row.kind for row in rows}
    numbers = sorted({row.round for row in rows})

    def of(target: str, number: int, before: str | None) -> Round:
        base = None if before is None else of(before, number, None)
        target_rows = (row for row in rows if (row.target, row.round) == (target, number))
        return Round(target_rows, base)

    found: dict[str, dict[str, Any]] = {}
    for target, kind in kinds.items():
        before = {Kind.PROXY: "mock", Kind.IN_PROCESS: "bare handler"}.get(kind)
        turns = [of(target, number, before) for number in numbers]
        found[target] = {
            "kind": kind.value,
            **{name: MetricRange.of(map(value, turns))._asdict() for name, value in COLUMNS},
            "failed": sum(row.failed for row in rows if row.target == target),
            "saturated": sorted({r.question for r in rows if r.target == target and r.saturated}),
        }
    return found


class Goal(NamedTuple):
    """A goal and its result, with `met` as None if a part of the goal was not measured."""

    text: str
    reached: str
    met: bool | None


def goals(found: dict[str, dict[str, Any]]) -> list[Goal]:
    """Return the goals of the edge benchmark with their results."""

    def value(target: str, name: str) -> float:
        return float(found[target][name]["median"]) if target in found else math.nan

    server, proxy = "draftgate sim", "draftgate proxy"
    result = [
        _below("CPU per request in process, us", value(server, "cpu_request_us"), REQUEST_GOAL_US),
        _below("CPU per chunk in process, us", value(server, "cpu_chunk_us"), CHUNK_GOAL_US),
    ]
    for name, limit in (("cpu_request_us", REQUEST_GOAL_US), ("cpu_chunk_us", CHUNK_GOAL_US)):
        edge = value(server, name) - value(WORKER, name)
        result.append(_below(f"{name} without the simulated worker's", edge, limit))
    for name, text in (("cpu_request_us", "request"), ("cpu_chunk_us", "chunk")):
        for target in (server, proxy):
            times = value("litellm", name) / value(target, name)
            result.append(_above(f"litellm's CPU per {text} over {target}'s", times, LITELLM_GOAL))
        for rival, limit in (("bare proxy", BARE_PROXY_GOAL), *((r, RUST_GOAL) for r in RUST)):
            times = value(proxy, name) / value(rival, name)
            result.append(_below(f"{proxy}'s CPU per {text} over {rival}'s", times, limit))
    for target in (name for name in found if name.endswith(" processes")):
        single = target.partition(",")[0]
        times = value(target, "cpu_request_us") / value(single, "cpu_request_us")
        text = f"CPU per request of {target} over {single}'s"
        result.append(_below(text, times, PROCESSES_GOAL))
    firsts = [
        value(name, "ttft_p50_ms_1") for name in found if found[name]["kind"] == Kind.PROXY.value
    ]
    first = min((ttft_ms for ttft_ms in firsts if math.isfinite(ttft_ms)), default=math.nan)
    text = "TTFT p50 in process over the quickest proxy's"
    result.append(_below(text, value(server, "ttft_p50_ms_1") / first, 1.0))
    return result


def _below(text: str, reached: float, limit: float) -> Goal:
    met = None if math.isnan(reached) else reached < limit
    return Goal(f"{text} < {limit:g}", f"{reached:.2f}", met)


def _above(text: str, reached: float, limit: float) -> Goal:
    met = None if math.isnan(reached) else reached >= limit
    return Goal(f"{text} >= {limit:g}", f"{reached:.2f}", met)


if __name__ == "__main__":
    main()
