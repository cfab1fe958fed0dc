"""Compare the operators in C with the operators in torch and with `transformers` on a CPU.

    draftgate bench operators --json OUT

The shipped model prefills prompts without a prefix, and decodes streams of `CONTEXT_TOKENS` tokens.
A process for each instruction set runs all contenders in alternating order, each round once. The
operators in torch are those of a machine without a compiler. `transformers` runs a prompt in one
pass.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.engine.bench_engine import BenchEngine
from bench.engine.cases import Case
from bench.engine.models import SHIPPED, Model, make_model
from bench.engine.transformers import TransformersSteps
from bench.harness.provenance import provenance, require_quiet
from draftgate.backends.engine.cpu_isa import ISAS, VARIABLE
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.numerics import CPU, check_cpu_isa
from draftgate.backends.engine.operators.base import rotary_tables
from draftgate.backends.engine.operators.reference import TorchOperators
from draftgate.backends.engine.runner import Runner
from draftgate.backends.worker_config import WorkerConfig

PROMPTS: Final = (256, 1024, 2048, 4096, 8000)
STREAMS: Final = (1, 4, 16, 64)
CONTEXT_TOKENS: Final = 512
LONGEST: Final = 8192
PREFILL_TOKENS: Final = WorkerConfig().step_limits("cpu").tokens
"""Maximum tokens of a step, the default of a worker."""

ROUND_TOKENS: Final = 8192
"""Prompt tokens per round of each case, so that short prompts have more rounds."""

DECODE_ROUNDS: Final = 40


def main(args: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="draftgate bench operators", description=__doc__)
    parser.add_argument("--json", type=Path, help="the file for the results")
    parser.add_argument("--isas", nargs="+", default=[*ISAS, "native"], choices=[*ISAS, "native"])
    parser.add_argument("--rounds", type=int, default=3, help="rounds of the longest prompt")
    parser.add_argument("--allow-busy", action="store_true", help="measure on a busy machine")
    parser.add_argument("--child", action="store_true", help=argparse.SUPPRESS)
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    if given.child:
        print(json.dumps(measure(given.rounds)))
        return
    facts = provenance()
    require_quiet(facts, allow_busy=given.allow_busy)
    results = {**facts, "rows": []}
    for isa in given.isas:
        for row in _measure_isa(isa, given.rounds):
            results["rows"].append({"isa": isa, **row})
            print(_line(results["rows"][-1]), flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def _measure_isa(isa: str, rounds: int) -> list[dict[str, Any]]:
    """Measure in a new process, because libraries read their limits once. Skip what is missing."""
    environment = {**os.environ, VARIABLE: "" if isa == "native" else isa}
    command = [sys.executable, "-m", "draftgate", "bench", "operators", "--child"]
    command += ["--rounds", str(rounds)]
    # The command runs this file.
    done = subprocess.run(  # noqa: S603
        command, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        print(f"{isa}: {done.stderr.strip().splitlines()[-1]}", flush=True)
        return []
    rows: list[dict[str, Any]] = json.loads(done.stdout)
    return rows


def measure(rounds: int) -> list[dict[str, Any]]:
    """Return the times of every case and contender in this process's instruction set."""
    check_cpu_isa()
    model = make_model(SHIPPED, Path(), torch.float32, CPU)
    native = BenchEngine.load(model, LONGEST + 64 * (CONTEXT_TOKENS + 16), LONGEST)
    theirs = TransformersSteps(model)
    contenders: dict[str, Callable[[Case], float]] = {
        "c": native.step_s,
        "torch": with_torch_operators(native, model).step_s,
    }
    rows = []
    for streams in STREAMS:
        case = Case("decode", streams, 1, CONTEXT_TOKENS)
        all_ways = {**contenders, "transformers": theirs.step_s}
        rows.append({"decode_streams": streams, **_compare(all_ways, case, DECODE_ROUNDS)})
    for tokens in PROMPTS:
        case = Case("prefill", 1, tokens, 0)
        ways = {name: in_steps(step_s) for name, step_s in contenders.items()}
        times = max(rounds, rounds * ROUND_TOKENS // tokens // 2)
        rows.append(
            {
                "prompt_tokens": tokens,
                **_compare({**ways, "transformers": theirs.step_s}, case, times),
            }
        )
    return rows


def with_torch_operators(engine: BenchEngine, model: Model) -> BenchEngine:
    """Return the engine with the operators in torch and the same pool."""
    config = model.config
    decoder = Decoder(config, model.weights(exact=False), LONGEST)
    decoder.operators = TorchOperators(config, rotary_tables(config, LONGEST, model.dtype))
    return replace(engine, runner=Runner(decoder, engine.pool))


def in_steps(step_s: Callable[[Case], float]) -> Callable[[Case], float]:
    """Return a function that runs a prompt in steps of `PREFILL_TOKENS`."""

    def prefill_s(case: Case) -> float:
        starts = range(0, case.tokens, PREFILL_TOKENS)
        return sum(
            step_s(Case("prefill", 1, min(PREFILL_TOKENS, case.tokens - start), start))
            for start in starts
        )

    return prefill_s


def _compare(ways: dict[str, Callable[[Case], float]], case: Case, rounds: int) -> dict[str, Any]:
    """Return the median milliseconds of each way, and of the ratios to C within a round."""
    taken: dict[str, list[float]] = {name: [] for name in ways}
    for turn in range(rounds + 1):  # the first round warms up
        for name in ways if turn % 2 else reversed(ways):
            taken[name].append(ways[name](case))
    kept = {name: times[1:] for name, times in taken.items()}
    row: dict[str, Any] = {
        "rounds": rounds,
        "ms": {name: round(1e3 * median(times), 3) for name, times in kept.items()},
    }
    for name in ways:
        ratios = [their / our for their, our in zip(kept[name], kept["c"], strict=True)]
        row[f"{name}_over_c"] = round(median(ratios), 3)
    del row["c_over_c"]
    return row


def _line(row: dict[str, Any]) -> str:
    what = (
        f"{row['decode_streams']} streams"
        if "decode_streams" in row
        else f"{row['prompt_tokens']} tokens"
    )
    ratios = f"torch {row['torch_over_c']:.2f}x, transformers {row['transformers_over_c']:.2f}x"
    return f"{row['isa']:<7} {what:<12} {row['ms']['c']:10.2f} ms in C; {ratios}"


if __name__ == "__main__":
    main()
