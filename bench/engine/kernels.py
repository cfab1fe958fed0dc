"""Compare the Triton kernels with the memory bandwidth and the matrix rate of a GPU.

    draftgate bench kernels --json OUT

Each round also measures the bandwidth of a copy and the rate of a matrix product, so the limits are
from the same run. Before timing, the benchmark compares each kernel with its reference in torch.

Kernels are timed as graphs, with events around a replay. A write before each replay flushes the
second-level cache and keeps the GPU busy while the host enqueues work. References are timed as
plain calls, including their waits. Results are medians and quartiles of many rounds.

Without a GPU the exit status is 2. The command refuses to run on a busy machine.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from statistics import quantiles
from typing import TYPE_CHECKING, Any, Final, NamedTuple, TypeAlias

import torch

from bench.harness.provenance import bench_parser, provenance, require_quiet, write_results

if TYPE_CHECKING:
    # Requires Triton, which is not always installed.
    from bench.engine.kernel_cases import KernelCase

ROUNDS: Final = 100
WARM_ROUNDS: Final = 5
REFERENCE_ROUNDS: Final = 3

FLUSHED_BYTES: Final = 256 << 20
"""Bytes written before each kernel, several times the second-level cache (50 MiB, H200)."""
COPIED_BYTES: Final = 1 << 30
MATRIX: Final = 8192
"""Rows and columns of the matrices whose product gives the matrix rate."""

NO_GPU: Final = 2
"""Exit status without a GPU."""

Taken: TypeAlias = Mapping[str, list[float]]
"""Microseconds of every round, by name."""


class Limit(StrEnum):
    """The metric that a goal bounds."""

    SHARE = "share of the floor, at least"
    MICROSECONDS = "microseconds, at most"
    RATIO = "times as long, at most, as"


class Goal(NamedTuple):
    """A goal for a kernel case."""

    case: str
    limit: Limit
    value: float
    of: str = ""
    """Name of the case that a ratio refers to."""

    def judge(self, rows: Mapping[str, Mapping[str, Any]]) -> dict[str, Any]:
        """Return the goal with its result."""
        row = rows[self.case]
        if self.limit is Limit.SHARE:
            figure = row["share_of_floor"]
        elif self.limit is Limit.MICROSECONDS:
            figure = row["us"]
        else:
            figure = row["us"] / rows[self.of]["us"]
        met = figure >= self.value if self.limit is Limit.SHARE else figure <= self.value
        words = f"{self.limit.value} {self.of}".strip()
        return {
            "case": self.case,
            "goal": f"{words}: {self.value}",
            "figure": round(figure, 3),
            "met": bool(met),
        }


GOALS: Final = (
    Goal("attention, decode", Limit.SHARE, 0.8),
    Goal("attention, verify", Limit.RATIO, 1.15, "attention, decode"),
    Goal("attention, verify of trees", Limit.RATIO, 1.15, "attention, decode, trees compiled in"),
    Goal("sample and verify", Limit.MICROSECONDS, 80),
    Goal("sample and verify, top-p", Limit.MICROSECONDS, 160),
)
"""Goals on an H200."""


@dataclass(frozen=True)
class Ceilings:
    """The maximum rates of the device, from the medians of the same run."""

    bytes_per_us: float
    operations_per_us: float

    @classmethod
    def of(cls, copy_us: float, product_us: float) -> Ceilings:
        """Return the rates from the times of the copy and of the product, in microseconds."""
        return cls(2 * COPIED_BYTES / copy_us, 2 * MATRIX**3 / product_us)

    def floor_us(self, case: KernelCase) -> float:
        """Return the minimum microseconds of a case, from its bytes or its operations."""
        return max(case.bytes_moved / self.bytes_per_us, case.operations / self.operations_per_us)


def summary(
    cases: list[KernelCase], taken: Taken, reference_us: Mapping[str, float], ceilings: Ceilings
) -> list[dict[str, Any]]:
    """Return a row for each case."""
    rows = []
    for case in cases:
        first, middle, third = quantiles(taken[case.name], n=4, method="inclusive")
        floor_us = ceilings.floor_us(case)
        rows.append(
            {
                "name": case.name,
                "us": round(middle, 2),
                "quartiles_us": [round(first, 2), round(third, 2)],
                "floor_us": round(floor_us, 2),
                "share_of_floor": round(floor_us / middle, 3),
                "megabytes": round(case.bytes_moved / 1e6, 3),
                "gigaflop": round(case.operations / 1e9, 3),
                "reference_us": round(reference_us[case.name], 1),
            }
        )
    return rows


class Stopwatch:
    """A timer of GPU work that uses events and a cold cache."""

    def __init__(self) -> None:
        """Allocate the buffer that flushes the cache."""
        self._flush = torch.empty(FLUSHED_BYTES, dtype=torch.int8, device="cuda")

    def start(self, work: Callable[[], object]) -> tuple[torch.cuda.Event, torch.cuda.Event]:
        """Flush the cache, and enqueue work between two events."""
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        self._flush.zero_()
        begin.record()
        work()
        end.record()
        return begin, end

    def time_us(self, work: Callable[[], object]) -> float:
        """Return the microseconds of work, including its waits for the host."""
        begin, end = self.start(work)
        end.synchronize()
        return 1e3 * float(begin.elapsed_time(end))


def captured(work: Callable[[], object]) -> Callable[[], None]:
    """Return a function that replays work as a graph, after the work has run before."""
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    return graph.replay


def time_all(cases: list[KernelCase]) -> tuple[Taken, Mapping[str, float]]:
    """Return the microseconds of each interleaved round by name, and those of the references.

    The names include `copy` and `product`, which give the limits.
    """
    stopwatch = Stopwatch()
    source, target = (torch.empty(COPIED_BYTES, dtype=torch.int8, device="cuda") for _ in range(2))
    left, right = (torch.randn(MATRIX, MATRIX, device="cuda").bfloat16() for _ in range(2))
    product = torch.empty_like(left)
    work: dict[str, tuple[Callable[[], None], Callable[[], object]]] = {
        "copy": (lambda: None, lambda: target.copy_(source)),
        "product": (lambda: None, lambda: torch.mm(left, right, out=product)),
    }
    for case in cases:
        case.reset()
        work[case.name] = (case.reset, captured(case.run))
    taken: dict[str, list[float]] = {name: [] for name in work}
    for _ in range(WARM_ROUNDS + ROUNDS):
        for name, (reset, run) in work.items():
            reset()
            taken[name].append(stopwatch.time_us(run))
    references = {case.name: _reference_us(stopwatch, case) for case in cases}
    return {name: times[WARM_ROUNDS:] for name, times in taken.items()}, references


def _reference_us(stopwatch: Stopwatch, case: KernelCase) -> float:
    """Return the minimum of a few times, because the first calls fill torch's allocator."""
    return min(stopwatch.time_us(case.reference) for _ in range(REFERENCE_ROUNDS))


def measure(*, allow_busy: bool) -> dict[str, Any]:
    """Measure all kernels, print each row, and return all results.

    Raises:
        SystemExit: the machine is busy.
        AssertionError: a kernel differs from its reference.
    """
    import triton

    from bench.engine.kernel_cases import FULL, Inputs, cases

    facts = provenance(torch.device("cuda"))
    require_quiet(facts, allow_busy=allow_busy)
    every = list(cases(Inputs(FULL, "cuda", torch.bfloat16)))
    for case in every:
        case.check()
    taken, references = time_all(every)
    middles = {name: quantiles(times, n=2)[0] for name, times in taken.items()}
    ceilings = Ceilings.of(middles["copy"], middles["product"])
    rows = summary(every, taken, references, ceilings)
    goals = [goal.judge({row["name"]: row for row in rows}) for goal in GOALS]
    for line in (*rows, *goals):
        print(line, flush=True)
    return {
        **facts,
        "triton": triton.__version__,
        "cuda": torch.version.cuda,
        "rounds": ROUNDS,
        "copy_gb_per_s": round(ceilings.bytes_per_us / 1e3, 1),
        "matrix_tflop_per_s": round(ceilings.operations_per_us / 1e6, 1),
        "shapes": FULL._asdict(),
        "results": rows,
        "goals": goals,
    }


def main(arguments: list[str] | None = None) -> None:
    """Measure the kernels, and write the JSON.

    Raises:
        SystemExit: status 2 without a GPU.
    """
    parser = bench_parser("kernels", __doc__)
    parser.add_argument("--allow-busy", action="store_true")
    args = parser.parse_args(arguments)
    if not torch.cuda.is_available():
        print("draftgate: bench kernels needs an NVIDIA GPU, and none was found", file=sys.stderr)
        raise SystemExit(NO_GPU)
    write_results(args.json, measure(allow_busy=args.allow_busy))


if __name__ == "__main__":
    main()
