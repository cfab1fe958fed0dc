"""Where the time of a decode step goes on a CPU: Python, torch's dispatch, arithmetic.

    python -m bench.engine.step_profile --json bench/results/NAME.json

Time in torch's operators is read from its profiler; what is left of the step is Python. A model
of the same depth whose matrices are tiny runs the same operators with next to no arithmetic: its
operator time is dispatch, and the difference to the real model's is arithmetic.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections import Counter
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from safetensors.torch import save_file
from torch.profiler import ProfilerActivity, profile

from bench.engine.record import provenance
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.inputs import build_inputs, feed_of
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.sampler import draw, walk
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.shipped import SHIPPED_MODEL
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.speculation import Off
from draftgate.policies.types import RequestView, WorkerLoad

BATCHES = (1, 8, 32)
CONTEXT_TOKENS = 512
RUNS = 30


def tiny_copy(directory: Path, into: Path) -> Path:
    """Write a checkpoint of the same depth and head counts whose matrices are tiny."""
    config = json.loads((directory / "config.json").read_text(encoding="utf-8"))
    config.update(vocab_size=64, hidden_size=16, intermediate_size=16, head_dim=16)
    config["tie_word_embeddings"] = True
    (into / "config.json").write_text(json.dumps(config), encoding="utf-8")
    queries = config["num_attention_heads"] * 16
    keys = config["num_key_value_heads"] * 16
    shapes = {"model.embed_tokens": (64, 16), "model.norm": (16,)}
    for layer in range(config["num_hidden_layers"]):
        prefix = f"model.layers.{layer}"
        shapes |= {
            f"{prefix}.input_layernorm": (16,),
            f"{prefix}.post_attention_layernorm": (16,),
            f"{prefix}.self_attn.q_proj": (queries, 16),
            f"{prefix}.self_attn.k_proj": (keys, 16),
            f"{prefix}.self_attn.v_proj": (keys, 16),
            f"{prefix}.self_attn.o_proj": (16, queries),
            f"{prefix}.mlp.gate_proj": (16, 16),
            f"{prefix}.mlp.up_proj": (16, 16),
            f"{prefix}.mlp.down_proj": (16, 16),
        }
    weights = {f"{name}.weight": torch.ones(shape) for name, shape in shapes.items()}
    save_file(weights, into / "model.safetensors")
    return into


class Bench:
    """One model with decode steps of any batch ready to run."""

    def __init__(self, directory: Path, context_tokens: int = CONTEXT_TOKENS) -> None:
        """Load it in float32."""
        self.config: ModelConfig = read_model_config(directory)
        self.context_tokens = context_tokens
        blocks = max(BATCHES) * -(-(context_tokens + 1) // BLOCK_TOKENS)
        self.pool = KvPool(self.config, blocks, torch.float32)
        weights = load_weights(directory, self.config, torch.float32)
        self.decoder = Decoder(self.config, weights, context_tokens + 1)
        self.runner = Runner(self.decoder, self.pool)

    def decode_plan(self, batch: int) -> StepPlan:
        """Return a step that decodes one token of each of `batch` sequences."""
        blocks = KvBlocks(self.pool.num_blocks, BLOCK_TOKENS)
        return StepPlan(tuple(self._decode(index, blocks) for index in range(batch)))

    def _decode(self, index: int, blocks: KvBlocks) -> SequenceWork:
        sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
        plan = Off().decide(RequestView(1, 1, 0.0), WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ()))
        request = GenerationRequest(str(index), compact((1,)), sampling, plan)
        sequence = Sequence.of(index, request, ResumedChoice(0, ()))
        blocks.extend(sequence.block_table, self.context_tokens + 1)
        return SequenceWork(sequence, self.context_tokens, (1,), samples=True)


def phases_ms(bench: Bench, batch: int) -> dict[str, float]:
    """Return the median milliseconds of each phase of a step."""
    plan = bench.decode_plan(batch)
    taken: dict[str, list[float]] = {"inputs": [], "forward": [], "sample": []}
    with torch.inference_mode():
        for _ in range(RUNS):
            times = [time.perf_counter()]
            inputs = build_inputs(map(feed_of, plan.work), bench.pool.dump_slot)
            times.append(time.perf_counter())
            logits = bench.decoder.forward(inputs, bench.pool.layers)
            times.append(time.perf_counter())
            walk(plan, draw(plan, logits, "coupled").tolist())
            times.append(time.perf_counter())
            for name, (a, b) in zip(taken, pairwise(times), strict=True):
                taken[name].append(b - a)
    return {name: round(median(values) * 1e3, 3) for name, values in taken.items()}


def operator_ms(bench: Bench, batch: int) -> tuple[float, float, Counter[str], int]:
    """Return step wall time, time in operators, that by operator, and the number of calls.

    Both times in milliseconds per step, under the profiler, which makes calls dearer.
    """
    plan = bench.decode_plan(batch)
    bench.runner.execute(plan)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        started_s = time.perf_counter()
        for _ in range(RUNS):
            bench.runner.execute(plan)
        wall_ms = (time.perf_counter() - started_s) / RUNS * 1e3
    by_name: Counter[str] = Counter()
    calls = 0
    for event in profiler.key_averages():
        by_name[event.key] += event.self_cpu_time_total / RUNS / 1e3
        calls += event.count
    return wall_ms, sum(by_name.values()), by_name, calls // RUNS


def step_ms(bench: Bench, batch: int) -> float:
    """Return the median milliseconds of a step, without a profiler."""
    plan = bench.decode_plan(batch)
    return median(bench.runner.execute(plan).step_s for _ in range(RUNS)) * 1e3


def split(real: Bench, tiny: Bench, batch: int) -> dict[str, Any]:
    """Return the parts of a step of the real model, in milliseconds."""
    total_ms, dispatch_and_python_ms = step_ms(real, batch), step_ms(tiny, batch)
    tiny_wall_ms, tiny_operators_ms, _, _ = operator_ms(tiny, batch)
    _, _, by_name, calls = operator_ms(real, batch)
    # The profiler stretches calls; the share of operators in the tiny step is what is used of it.
    share = min(tiny_operators_ms / tiny_wall_ms, 1.0)
    return {
        "batch": batch,
        "context_tokens": real.context_tokens,
        "step_ms": round(total_ms, 3),
        "python_ms": round(dispatch_and_python_ms * (1 - share), 3),
        "dispatch_ms": round(dispatch_and_python_ms * share, 3),
        "arithmetic_ms": round(max(total_ms - dispatch_and_python_ms, 0.0), 3),
        "phases_ms": phases_ms(real, batch),
        "operator_calls": calls,
        "top_operators_ms_under_profiler": {
            name: round(ms, 3) for name, ms in by_name.most_common(10)
        },
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, default=SHIPPED_MODEL)
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    facts = provenance()
    with tempfile.TemporaryDirectory() as directory:
        tiny = Bench(tiny_copy(args.model, Path(directory)))
    real = Bench(args.model)
    rows = [split(real, tiny, batch) for batch in BATCHES]
    for row in rows:
        print(row)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps({**facts, "results": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
