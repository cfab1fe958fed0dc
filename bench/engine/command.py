"""Compare the engine with the limits of the device and with `transformers`.

    draftgate bench engine --json OUT [--profile OUT]

A run has four parts (`--parts`) for each model and dtype:

- `steps` measures decode, verify and prefill steps over batch, context and draft slots. Times are
  shares of the bandwidth and matrix rate of the same run, and ratios to `--exact` and
  `transformers`.
- `replay` measures decode speed with drafts of a fixed acceptance rate, relative to no drafts.
- `idle` measures the share of time in which a GPU is idle during decode steps (skipped on a CPU).
- `generation` compares times and outputs of whole generations between all proposers.

Weights may be random, because the cost of a step does not depend on them. The command refuses to
run on a busy machine, because other processes reduce the available memory bandwidth.
"""

from __future__ import annotations

import argparse
import tempfile
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

import torch

from bench.engine.bench_engine import BenchEngine, most_kv_tokens
from bench.engine.cases import GRIDS, Grid
from bench.engine.device import Rates, measure_rates, release
from bench.engine.exact import add_exact, measure_exact
from bench.engine.generation import generation_worker, measure_generation
from bench.engine.idle import measure_idle
from bench.engine.models import FILED_SHAPE, MODELS, SHIPPED, Model, make_model
from bench.engine.profile import draft_costs, profile_of
from bench.engine.random_model import MOST_PROMPT, SHAPES
from bench.engine.serving import BATCHES
from bench.engine.speedup import Replayed, measure_speedups
from bench.engine.steps import measure_steps
from bench.harness.provenance import bench_parser, provenance, require_quiet, write_results
from draftgate.backends.engine.numerics import DEVICES, DTYPES, choose_device, fix_sums

PARTS: Final = ("steps", "replay", "idle", "generation")
DRAFT_LENGTHS: Final = (1, 2, 3, 4, 6, 8)
DTYPES_MEASURED: Final = {"cpu": ("float32", "bfloat16"), "cuda": ("bfloat16",)}


@dataclass
class Run:
    """A run and its results.

    Attributes:
        rows: results by part.
        rates: measured maximum rates of the device, by dtype.
        profile: a `profile/1` of the first model and dtype.
    """

    facts: dict[str, Any]
    device: torch.device
    grid: Grid
    args: argparse.Namespace
    rows: dict[str, list[dict[str, Any]]] = field(
        default_factory=lambda: {part: [] for part in PARTS}
    )
    rates: dict[str, Rates] = field(default_factory=dict)
    profile: dict[str, Any] | None = None

    def measure(self, name: str, dtype: str) -> None:
        """Measure a model in a dtype."""
        with tempfile.TemporaryDirectory() as folder:
            model = make_model(name, Path(folder), DTYPES[dtype], self.device)
            rates, bench_engine = self._rates(dtype), self._load(model)
            for part in self.args.parts:
                rows = self._measure_part(part, bench_engine, rates)
                self.rows[part] += [{"model": name, "dtype": dtype, **row} for row in rows]
            if self.args.profile is not None and self.profile is None:
                self.profile = profile_of(self.facts, model, bench_engine.cost, self._drafts(model))

    def _measure_part(
        self, part: str, bench_engine: BenchEngine, rates: Rates
    ) -> list[dict[str, Any]]:
        args = self.args
        if part == "steps":
            cases = list(self.grid.cases())
            return measure_steps(bench_engine, cases, rates, args.rounds, alone=args.exact)
        if part == "replay":
            replayed = Replayed(args.acceptance, args.lengths, args.new_tokens, args.runs)
            return measure_speedups(bench_engine, replayed, rates)
        if part == "generation":
            return measure_generation(bench_engine, args.new_tokens, args.runs)
        return measure_idle(bench_engine, args.new_tokens) if self.device.type == "cuda" else []

    def _load(self, model: Model) -> BenchEngine:
        """Return the engine with memory for the largest step and the largest batch of prompts."""
        text_tokens = MOST_PROMPT + self.args.new_tokens + max(self.args.lengths)
        return BenchEngine.load(
            model,
            max(most_kv_tokens(list(self.grid.cases())), max(BATCHES) * text_tokens),
            max(self.grid.longest, text_tokens),
            exact=self.args.exact,
        )

    def result(self) -> dict[str, Any]:
        """Return all results as JSON values."""
        return {
            **self.facts,
            "rates": {
                dtype: {
                    "gb_per_s": round(1e-9 * rates.bytes_per_s, 1),
                    "tflop_per_s": round(1e-12 * rates.flops_per_s, 3),
                }
                for dtype, rates in self.rates.items()
            },
            "goals": judged(self.device.type, self.rows),
            **self.rows,
        }

    def compare_exact(self, name: str, dtype: str) -> None:
        """Measure the cost of `--exact` on a GPU, after earlier parts have freed their memory."""
        args = self.args
        if self.device.type == "cuda" and "steps" in args.parts and not args.exact:
            exact = measure_exact(args, self.grid, name, dtype, self.device.type)
            plain = [r for r in self.rows["steps"] if (r["model"], r["dtype"]) == (name, dtype)]
            add_exact(plain, exact)

    def write(self) -> None:
        """Write the results that are complete."""
        write_results(self.args.json, self.result())
        if self.profile is not None:
            write_results(self.args.profile, self.profile)

    def _rates(self, dtype: str) -> Rates:
        if dtype not in self.rates:
            self.rates[dtype] = measure_rates(self.device, DTYPES[dtype])
        return self.rates[dtype]

    def _drafts(self, model: Model) -> dict[str, Any]:
        if model.directory is None:
            return {}
        return draft_costs(generation_worker(model, self.args.new_tokens).proposers)


def measure(args: argparse.Namespace) -> Run:
    """Measure all requested models and dtypes, and write the results.

    Raises:
        SystemExit: the machine is busy, or a model is unknown.
        ValueError: the device does not exist.
    """
    device = choose_device(args.device)
    if args.exact and device.type == "cuda":
        fix_sums()
    facts = provenance(device)
    require_quiet(facts, allow_busy=args.allow_busy)
    default = GRIDS[device.type]
    grid = Grid(
        args.batches or default.batches,
        args.contexts or default.contexts,
        args.drafts or default.drafts,
        args.prefill or default.prefill_tokens,
    )
    run = Run(facts, device, grid, args)
    for name in args.models or MODELS[device.type]:
        for dtype in args.dtypes or DTYPES_MEASURED[device.type]:
            run.measure(name, dtype)
            release(device)
            run.write()  # keep earlier results if a later part fails
            run.compare_exact(name, dtype)
            run.write()
    return run


def _parser() -> argparse.ArgumentParser:
    parser = bench_parser("engine", __doc__)
    add = parser.add_argument
    add("--profile", type=Path, help="also write a profile/1 of the first model and dtype")
    add("--parts", nargs="+", choices=PARTS, default=PARTS)
    add("--device", choices=DEVICES, default="auto")
    add("--threads", type=int, help="number of threads (default: all cores)")
    add("--models", nargs="+", help=f"{SHIPPED}, {FILED_SHAPE}, {', '.join(SHAPES)} or directories")
    add("--dtypes", nargs="+", choices=DTYPES)
    add("--batches", nargs="+", type=int, help="batch sizes of steps")
    add("--contexts", nargs="+", type=int, help="context lengths of steps, in tokens")
    add("--drafts", nargs="+", type=int, help="draft slots of a step")
    add("--prefill", type=int, help="length of the prefill, in tokens")
    add("--rounds", type=int, default=15, help="number of rounds of steps (default: 15)")
    add("--acceptance", type=float, default=0.8, help="acceptance rate of replay drafts")
    add("--lengths", nargs="+", type=int, default=DRAFT_LENGTHS, help="draft lengths of replay")
    add("--new-tokens", type=int, default=64, help="output tokens per prompt (default: 64)")
    add("--runs", type=int, default=3, help="rounds of replay and generation (default: 3)")
    add("--exact", action="store_true", help="use exact mode, without steps of transformers")
    add("--allow-busy", action="store_true", help="measure even on a busy machine")
    return parser


def main(arguments: list[str] | None = None) -> None:
    """Run `draftgate bench engine`."""
    args = _parser().parse_args(arguments)
    if args.threads:
        torch.set_num_threads(args.threads)
    run = measure(args)
    for goal in run.result()["goals"]:
        print(goal)


# --- Goals and the metrics that they bound. A missed goal is a finding, not an error --------------


Row = dict[str, Any]
Rows = list[Row]


class Goal(NamedTuple):
    """A bound on a metric.

    Attributes:
        figure: description of the metric.
        measured: function that reads the metric from the rows of a result, by part. It returns None
            if the metric was not measured.
        bound: the limit, a minimum if `at_least` is set and a maximum otherwise.
    """

    figure: str
    measured: Callable[[dict[str, Rows]], float | None]
    bound: float
    at_least: bool = True


def _steps(result: dict[str, Rows], key: str, **wanted: Any) -> list[float]:
    rows = _where(result["steps"], **wanted)
    return [row[key] for row in rows if key in row]


def _where(rows: Rows, **wanted: Any) -> Iterator[Row]:
    for row in rows:
        if all(row.get(name) == value for name, value in wanted.items()):
            yield row


def _least(figures: list[float]) -> float | None:
    return min(figures, default=None)


def _most(figures: list[float]) -> float | None:
    return max(figures, default=None)


def _batched_speedup(result: dict[str, Rows]) -> float | None:
    rows = _where(result["steps"], name="decode")
    return _least([row["speedup"] for row in rows if row["batch"] >= 8 and "speedup" in row])


def _verify_over_decode(result: dict[str, Rows]) -> float | None:
    """Return the largest ratio of a verify step of 5 tokens to a decode step (batch 1, 82M)."""
    ratios = []
    for row in _where(result["steps"], name="verify", model="random-82m", batch=1, tokens=5):
        place = {name: row[name] for name in ("model", "dtype", "batch", "context_tokens")}
        ratios += [row["ms"] / one for one in _steps(result, "ms", name="decode", **place)]
    return _most(ratios)


def _replay_speedup(result: dict[str, Rows]) -> float | None:
    rows = [row for row in _where(result["replay"], batch=1) if row["policy"] != "off"]
    return _most([row["speedup"] for row in rows if row["speedup"] is not None])


def _of_8b(result: dict[str, Rows], key: str, **wanted: Any) -> list[float]:
    return _steps(result, key, model="random-8b", **wanted)


GOALS: Final[dict[str, tuple[Goal, ...]]] = {
    "cpu": (
        Goal("decode over transformers, batch 8 and above", _batched_speedup, 1.5),
        Goal(
            "verify of 5 over decode, 82M, batch 1, the worse dtype",
            _verify_over_decode,
            1.06,
            at_least=False,
        ),
        Goal(
            "share of read bandwidth, 82M, decode, batch 1, the worse dtype",
            lambda r: _least(
                _steps(r, "share_of_bandwidth", name="decode", model="random-82m", batch=1)
            ),
            0.75,
        ),
        Goal(
            "prefill, 82M, tokens/s, the faster dtype",
            lambda r: _most(_steps(r, "tokens_per_s", name="prefill", model="random-82m")),
            5000.0,
        ),
    ),
    "cuda": (
        Goal(
            "share of copy bandwidth, 8B, batch 1, end to end",
            lambda r: _least(
                [
                    row["share_of_bandwidth"]
                    for row in _where(r["replay"], model="random-8b", policy="off", batch=1)
                ]
            ),
            0.85,
        ),
        Goal(
            "step over roofline, 8B, decode, batch 64 after 2,048",
            lambda r: _most(
                _of_8b(r, "over_roofline", name="decode", batch=64, context_tokens=2048)
            ),
            1.25,
            at_least=False,
        ),
        Goal(
            "GPU idle, 8B, batch 8 and above",
            lambda r: _most(
                [row["gpu_idle_share"] for row in _where(r["idle"], model="random-8b")]
            ),
            0.03,
            at_least=False,
        ),
        Goal(
            "replay speed-up, 8B, batch 1, the best length",
            lambda r: _replay_speedup({"replay": list(_where(r["replay"], model="random-8b"))}),
            2.5,
        ),
        Goal(
            "share of matrix rate, 8B, prefill",
            lambda r: _least(_of_8b(r, "share_of_matrix_rate", name="prefill")),
            0.55,
        ),
        Goal(
            "--exact over plain, 8B, the dearest step",
            lambda r: _most(_of_8b(r, "exact_over_plain")),
            1.10,
            at_least=False,
        ),
        Goal("steps over transformers, the least", lambda r: _least(_steps(r, "speedup")), 1.0),
    ),
}
"""Goals by type of device. `bench kernels` has the goals of single kernels."""


def judged(device_type: str, result: dict[str, Rows]) -> Rows:
    """Return each goal with its result, if the metric was measured."""
    return [_judge(goal, goal.measured(result)) for goal in GOALS[device_type]]


def _judge(goal: Goal, figure: float | None) -> Row:
    row: Row = {
        "figure": goal.figure,
        "goal": f"{'at least' if goal.at_least else 'at most'} {goal.bound:g}",
        "measured": None if figure is None else round(figure, 3),
    }
    if figure is not None:
        row["met"] = figure >= goal.bound if goal.at_least else figure <= goal.bound
    return row


if __name__ == "__main__":
    main()
