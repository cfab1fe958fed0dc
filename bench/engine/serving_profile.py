"""Measure a `profile/2` of the shipped model: its steps, its host and its proposers.

    python -m bench.engine.serving_profile --json FILE

A worker measures only the device's part of a step when it starts. Between two steps the worker also
plans, accounts for tokens and produces text. `draftgate bench simulator` predicts whole requests,
so it needs this time too. The benchmark decodes batches on a bare worker. It fits the time beyond
the device's part by a constant and a term per sequence, and does the same for lookups and for calls
of the draft model. The time of a draft token is the difference between drafts of different depths.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterable
from itertools import accumulate, pairwise
from pathlib import Path
from statistics import median
from typing import Any, Final, cast

from bench.engine.profile import without_pairs
from bench.harness.prompts import held_out_prompts
from bench.harness.provenance import provenance
from draftgate.backends.checkpoints import SHIPPED_MODEL, SHIPPED_MODEL_ID
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.warmup import measure_step_cost
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import SpeculationMode, SpeculationPlan

BATCHES: Final = (1, 2, 4, 8, 16)
NEW_TOKENS: Final = 64
PROMPT_TOKENS: Final = 64
MOST_TOKENS: Final = 4096
"""Length in tokens of the sequence whose steps are timed."""

DRAFT_TOKENS: Final = 8
DEPTHS: Final = (1, 4)
"""Depths in tokens at which the draft model is timed."""

PLAIN: Final = SpeculationPlan("bench", SpeculationMode.OFF, None, 0, "a benchmark")


def served_steps(engine: LoadedEngine, cost: StepCost) -> list[tuple[int, float]]:
    """Return the median seconds of a decode step beyond the device's part, by batch size."""
    prompts = held_out_prompts(
        engine.worker.tokenizer, max(BATCHES), least=PROMPT_TOKENS, most=PROMPT_TOKENS
    )
    found = []
    for batch in BATCHES:
        for index, prompt in enumerate(prompts[:batch]):
            sampling = SamplingParams(NEW_TOKENS, index, 0.8, ignore_eos=True)
            engine.worker.submit(
                GenerationRequest(f"{batch}-{index}", compact(prompt), sampling, PLAIN)
            )
        began, plans = [time.perf_counter()], []
        for step in run_until_idle(engine.worker, engine.executor):
            began.append(time.perf_counter())
            plans.append(step.plan)
        beyond = [
            after - before - cost.seconds(batch, plan.size.kv_tokens, batch)
            for (before, after), plan in zip(pairwise(began), plans, strict=True)
            if plan.num_tokens == len(plan.work) == batch  # count decode steps only
        ]
        found.append((batch, median(beyond)))
    return found


def draft_times(proposer: Proposer, tokenizer: Tokenizer, depth: int) -> list[tuple[int, float]]:
    """Return the median seconds of a call of a proposer by batch size, one new token at a time."""
    prompts = held_out_prompts(tokenizer, max(BATCHES), least=PROMPT_TOKENS, most=4 * PROMPT_TOKENS)
    found = []
    for batch in BATCHES:
        sequences = [
            Sequence.for_choice(
                index,
                GenerationRequest(
                    str(index), compact(prompt), SamplingParams(2 * NEW_TOKENS, 0), PLAIN
                ),
                ResumedChoice(0, ()),
            )
            for index, prompt in enumerate(prompts[:batch])
        ]
        requests = [DraftRequest(sequence, depth) for sequence in sequences]
        times_s = []
        for step in range(NEW_TOKENS):
            began_s = time.perf_counter()
            proposer.propose(requests)
            times_s.append(time.perf_counter() - began_s)
            for sequence, prompt in zip(sequences, prompts, strict=False):
                sequence.token_ids.append(prompt[step])
        for sequence in sequences:
            proposer.forget(sequence)
        found.append((batch, median(times_s[1:])))  # the first call reads the prompts
    return found


def draft_model_cost(proposer: Proposer, tokenizer: Tokenizer) -> dict[str, Any]:
    """Return the cost of the draft model in the form of a profile."""
    few, many = (draft_times(proposer, tokenizer, depth) for depth in DEPTHS)
    depth_s = [
        max(deep_s - shallow_s, 0.0) / (DEPTHS[1] - DEPTHS[0])
        for (_, shallow_s), (_, deep_s) in zip(few, many, strict=True)
    ]
    depth_s = list(accumulate(depth_s, max))  # the time never falls with the batch
    call_s, sequence_s = line_through(
        [
            (batch, shallow_s - DEPTHS[0] * each_s)
            for (batch, shallow_s), each_s in zip(few, depth_s, strict=True)
        ]
    )
    return {
        "sequences": BATCHES,
        "depth_s": [round(each_s, 7) for each_s in depth_s],
        "call_s": round(call_s, 8),
        "sequence_s": round(sequence_s, 9),
    }


def line_through(points: Iterable[tuple[int, float]]) -> tuple[float, float]:
    """Return constant and slope of the least-squares line, with negative values set to 0."""
    xs, ys = zip(*points, strict=True)
    x, y = sum(xs) / len(xs), sum(ys) / len(ys)
    spread = sum((each - x) ** 2 for each in xs)
    slope = max(0.0, sum((a - x) * (b - y) for a, b in zip(xs, ys, strict=True)) / spread)
    return max(0.0, y - slope * x), slope


def measure() -> dict[str, Any]:
    """Return the profile of the shipped model on this machine."""
    facts = provenance()
    engine = load_engine(WorkerConfig(speculation="off", proposer="draft_model"))
    tokenizer = engine.worker.tokenizer
    runner = cast(Runner, engine.executor)
    config = read_model_config(SHIPPED_MODEL)
    cost = measure_step_cost(runner, MOST_TOKENS, max(BATCHES), vocab_size=config.vocab_size)
    host_step_s, host_sequence_s = line_through(served_steps(engine, cost))
    call_s, lookup_s = line_through(draft_times(NgramProposer(), tokenizer, DRAFT_TOKENS))
    source = (
        f"measured: {facts['command']}, commit {facts['commit']}, {facts['date']}, torch "
        f"{facts['torch']}, {facts['threads']} threads"
    )
    return {
        "format": "profile/2",
        "device": facts["device"],
        "model": SHIPPED_MODEL_ID,
        "dtype": "float32",
        "source": source + (", machine disturbed" if facts["disturbed"] else ""),
        "token_buckets": cost.token_buckets,
        "step_s": [round(step_s, 7) for step_s in without_pairs(cost)],
        "kv_token_s": round(cost.kv_token_s, 12),
        "sequence_s": round(cost.sequence_s, 9),
        "prefill_attention_s": round(cost.pair_s, 13),
        "host": {
            "step_s": round(host_step_s, 7),
            "sequence_s": round(host_sequence_s, 9),
            "launches_ahead": runner.launcher is not None,
        },
        "draft": {
            "ngram": {"call_s": round(call_s, 8), "sequence_s": round(lookup_s, 9)},
            "draft_model": draft_model_cost(engine.proposers["draft_model"], tokenizer),
        },
        "kv_token_bytes": config.kv_bytes_per_token(4),
    }


def main() -> None:
    """Measure the profile, and write it."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    path.write_text(json.dumps(measure(), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
