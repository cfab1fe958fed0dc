"""Measure decode steps and prompts with and without LoRA adapters on a CPU.

    draftgate bench adapters --json OUT

Random adapters of rank `RANK` change all products of a model. The streams of a step use 0, 1 or 4
of them in turn. `none` is a model that was loaded without adapters. All contenders share one pool
and run in alternating order. Times are CPU times of the one thread, which other processes disturb
less than wall times.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from statistics import median
from tempfile import TemporaryDirectory
from typing import Any, Final

import torch

from bench.engine.bench_engine import BenchEngine, step_plan
from bench.engine.cases import Case
from bench.engine.models import FILED_SHAPE, SHIPPED, Model, make_model
from bench.harness.provenance import provenance, require_quiet
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.lora.products import CpuAdapters
from draftgate.backends.engine.lora.weights import LayerPairs, LowRank, adapted_products
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.numerics import CPU
from draftgate.backends.engine.runner import Runner

RANK: Final = 16
ADAPTERS: Final = (0, 1, 4)
CONTEXT_TOKENS: Final = 512
CASES: Final = (
    *(Case("decode", streams, 1, CONTEXT_TOKENS) for streams in (1, 4, 16, 32)),
    Case("prefill", 1, 256, 0),
)
MODELS: Final = ((SHIPPED, torch.float32), (SHIPPED, torch.bfloat16), (FILED_SHAPE, torch.bfloat16))


def main(args: list[str] | None = None) -> None:
    """Run the benchmark."""
    parser = argparse.ArgumentParser(prog="draftgate bench adapters", description=__doc__)
    parser.add_argument("--json", type=Path, help="the file for the results")
    parser.add_argument("--rounds", type=int, default=40, help="rounds of each case")
    parser.add_argument("--allow-busy", action="store_true", help="measure on a busy machine")
    given = parser.parse_args(args)
    torch.set_num_threads(1)
    facts = provenance()
    require_quiet(facts, allow_busy=given.allow_busy)
    results: dict[str, Any] = {**facts, "rank": RANK, "rows": []}
    for name, dtype in MODELS:
        with TemporaryDirectory() as folder:
            model = make_model(name, Path(folder), dtype, CPU)
            for row in measure(model, given.rounds):
                results["rows"].append(row)
                print(row, flush=True)
    if given.json is not None:
        given.json.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def measure(model: Model, rounds: int) -> Iterator[dict[str, Any]]:
    """Yield the CPU milliseconds of each case by the number of adapters."""
    most_tokens = max(case.batch for case in CASES) * (CONTEXT_TOKENS + 16)
    plain = BenchEngine.load(model, most_tokens, CONTEXT_TOKENS + 16)
    adapted = replace(plain, runner=_adapted_runner(plain))
    for case in CASES:
        plan = step_plan([case], model.config.vocab_size)
        taken: dict[str, list[float]] = {"none": [], **{str(count): [] for count in ADAPTERS}}
        for turn in range(rounds + 1):  # the first round warms up
            for name in taken if turn % 2 else reversed(taken):
                if name != "none":
                    _use_adapters(plan, int(name))
                engine = plain if name == "none" else adapted
                taken[name].append(_cpu_ms(engine, plan))
        none = taken["none"][1:]
        yield {
            "model": model.name,
            "dtype": str(model.dtype).removeprefix("torch."),
            "case": case.name,
            "streams": case.batch,
            "tokens": case.tokens,
            "cpu_ms": {name: round(median(times[1:]), 3) for name, times in taken.items()},
            "ratio_to_none": {
                name: round(median(t / n for t, n in zip(times[1:], none, strict=True)), 3)
                for name, times in taken.items()
            },
        }


def _adapted_runner(engine: BenchEngine) -> Runner:
    model = engine.model
    memory = CpuAdapters(model.weights(exact=False), exact=False)
    for slot in range(1, max(ADAPTERS) + 1):
        memory.install(slot, memory.prepare(_random_layers(model.config, model.dtype)))
    return Runner(Decoder(model.config, memory.weights, engine.max_model_len, memory), engine.pool)


def _random_layers(config: ModelConfig, dtype: torch.dtype) -> Iterator[LayerPairs]:
    for layer in range(config.num_layers):
        yield tuple(
            LowRank(
                torch.randn(RANK * len(product.names), product.inputs).to(dtype) * 0.01,
                torch.randn(sum(product.outputs), RANK * len(product.names)).to(dtype) * 0.01,
            )
            for product in adapted_products(config, layer)
        )


def _use_adapters(plan: StepPlan, count: int) -> None:
    """Give the sequences of a step some adapters in turn."""
    for index, work in enumerate(plan.work):
        work.sequence.adapter_slot = 1 + index % count if count else 0


def _cpu_ms(engine: BenchEngine, plan: StepPlan) -> float:
    began_s = time.process_time()
    engine.runner.execute(plan)
    return 1e3 * (time.process_time() - began_s)


if __name__ == "__main__":
    main()
