"""Measure decode tokens per second of several speculation policies, interleaved in one run.

    python -m bench.engine.speculation --json bench/results/NAME.json

Prompts are held-out code. The output of a small model may end in a loop, which n-grams predict
perfectly. Each setting is therefore measured on whole outputs of 128 tokens, and on outputs that
end where their loop begins.

Each policy has its own engine and keeps its learned estimates. Each round runs all policies on the
same prompts in rotating order. Policies are compared by the ratio to the first policy within a
round.

On a busy machine, CPU seconds of the computing thread (`cpu`) are more reliable than wall time.
Engines of one process differ by a few percent, because their weights are at different addresses.
With `--one-engine`, requests without speculation run on the engine of the next policy.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from statistics import median
from typing import Any

from bench.harness.prompts import held_out_prompts
from bench.harness.provenance import provenance
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.engine.load import LoadedEngine, load_engine
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView

POLICIES = ("off", "fixed:2", "fixed:4", "fixed:8", "smartspec", "auto")
BATCHES = (1, 8, 32)
TEMPERATURES = (0.0, 0.8)
PROMPT_TOKENS = (40, 240)
NEW_TOKENS = 128
GRAM = 8
LEAST_TOKENS = 24
AT_BATCH_1 = 24
KV_BYTES = 96 << 20
"""KV memory of each engine in bytes, small enough that a round touches all pages. On a virtual
machine, the first touch of a page would otherwise dominate the measurement."""


@dataclass
class Decoding:
    """Sums over the pure decode steps of a run."""

    tokens: int = 0
    seconds: float = 0.0
    cpu_s: float = 0.0
    steps: int = 0
    drafted: int = 0
    accepted: int = 0


@dataclass(frozen=True)
class Prompt:
    """A prompt, its sampling parameters, and the number of tokens to generate."""

    token_ids: tuple[int, ...]
    seed: int
    max_tokens: int = NEW_TOKENS


def loop_start(tokens: Sequence[int]) -> int:
    """Return the number of output tokens before a loop, or of all tokens without a loop.

    A loop begins with the first repeated 8-gram after which over half of the 8-grams are repeated.
    """
    grams = [tuple(tokens[i : i + GRAM]) for i in range(len(tokens) - GRAM + 1)]
    seen: set[tuple[int, ...]] = set()
    repeated = []
    for gram in grams:
        repeated.append(gram in seen)
        seen.add(gram)
    for start, again in enumerate(repeated):
        rest = repeated[start:]
        if again and sum(rest) > len(rest) / 2:
            return start
    return len(tokens)


def decode(
    engine: LoadedEngine, prompts: Sequence[Prompt], policy: str, temperature: float
) -> tuple[Decoding, dict[str, list[int]]]:
    """Run the prompts as a batch, and count the steps in which all sequences decode.

    Steps include planning. Later steps do not count, because a server would add requests to the
    batch.
    """
    for index, prompt in enumerate(prompts):
        engine.worker.submit(_request(engine, index, prompt, policy, temperature))
    sums, outputs = Decoding(), {str(index): list[int]() for index in range(len(prompts))}
    started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    for step in run_until_idle(engine.worker, engine.executor, time.monotonic):
        ended_s, ended_cpu_s = time.perf_counter(), time.thread_time()
        decoding = sum(work.start >= work.sequence.prompt_tokens for work in step.plan.work)
        if decoding == len(prompts):
            sums.seconds += ended_s - started_s
            sums.cpu_s += ended_cpu_s - started_cpu_s
            sums.steps += 1
            sums.tokens += sum(len(delta.token_ids) for _, delta in step.deltas)
            sums.drafted += sum(work.num_drafts for work in step.plan.work)
            sums.accepted += sum(len(emitted) - 1 for emitted in step.result.emitted)
        for request_id, delta in step.deltas:
            outputs[request_id].extend(delta.token_ids)
        started_s, started_cpu_s = time.perf_counter(), time.thread_time()
    return sums, outputs


def _request(
    engine: LoadedEngine, index: int, prompt: Prompt, policy: str, temperature: float
) -> GenerationRequest:
    most = prompt.max_tokens
    sampling = SamplingParams(most, prompt.seed, temperature, ignore_eos=True)
    view = RequestView(len(prompt.token_ids), most, temperature)
    plan = speculation_policy(policy).decide(view, engine.worker.load())
    return GenerationRequest(str(index), compact(prompt.token_ids), sampling, plan)


def compare(
    engines: Mapping[str, LoadedEngine],
    prompts: Sequence[Prompt],
    batch: int,
    temperature: float,
    rounds: int,
) -> dict[str, Any] | None:
    """Run all policies over all prompts in batches, in `rounds` interleaved rounds.

    The first batch is a warm-up for memory and caches.

    Returns:
        Metrics by policy, or None if no batch ever decoded as a whole.
    """
    batches = [prompts[i : i + batch] for i in range(0, len(prompts) - batch + 1, batch)]
    policies = list(engines)
    for policy in policies:
        decode(engines[policy], batches[-1], policy, temperature)
    totals = {policy: Decoding() for policy in policies}
    ratios: dict[str, list[float]] = {policy: [] for policy in policies[1:]}
    cpu_ratios: dict[str, list[float]] = {policy: [] for policy in policies[1:]}
    for turn in range(rounds):
        for number, group in enumerate(batches):
            first = (turn + number) % len(policies)
            runs = {
                policy: decode(engines[policy], group, policy, temperature)[0]
                for policy in policies[first:] + policies[:first]
            }
            if not all(run.steps for run in runs.values()):
                continue  # a sequence ended before all sequences decoded
            for policy, run in runs.items():
                _add(totals[policy], run)
            for policy, so_far in ratios.items():
                so_far.append(_rate(runs[policy]) / _rate(runs[policies[0]]))
                cpu_ratios[policy].append(_cpu_rate(runs[policy]) / _cpu_rate(runs[policies[0]]))
    if not ratios[policies[-1]]:
        return None
    return {
        "batches": len(batches),
        "rounds": rounds,
        "policies": {
            policy: _figures(sums, batch, ratios.get(policy, [1.0]), cpu_ratios.get(policy, [1.0]))
            for policy, sums in totals.items()
        },
    }


def _figures(
    sums: Decoding, batch: int, ratios: Sequence[float], cpu_ratios: Sequence[float]
) -> dict[str, Any]:
    return {
        "tokens_per_s": round(_rate(sums), 1),
        "tokens_per_cpu_s": round(_cpu_rate(sums), 1),
        "cpu_speedup_median_of_runs": round(median(cpu_ratios), 3),
        "speedup_median_of_runs": round(median(ratios), 3),
        "speedup_of_runs": [round(ratio, 3) for ratio in ratios],
        "tokens_per_step_and_sequence": round(sums.tokens / sums.steps / batch, 3),
        "drafted": sums.drafted,
        "accepted": sums.accepted,
    }


def _rate(sums: Decoding) -> float:
    return sums.tokens / sums.seconds


def _cpu_rate(sums: Decoding) -> float:
    return sums.tokens / sums.cpu_s


def _add(total: Decoding, part: Decoding) -> None:
    total.tokens += part.tokens
    total.seconds += part.seconds
    total.cpu_s += part.cpu_s
    total.steps += part.steps
    total.drafted += part.drafted
    total.accepted += part.accepted


def measure(args: argparse.Namespace) -> dict[str, Any]:
    """Return all results, with the first policy as the baseline."""
    facts = provenance()
    policies, proposer = args.policies, args.proposer
    engines = _engines(args)
    engine = engines[policies[0]]
    least, most = args.prompt_tokens
    ids = held_out_prompts(engine.worker.tokenizer, args.prompts, least=least, most=most)
    prompts = [Prompt(token_ids, seed) for seed, token_ids in enumerate(ids)]
    for policy in policies:  # warm memory up, and let the policies learn
        decode(engines[policy], prompts[: max(args.batches)], policy, 0.0)
    results = []
    for temperature in args.temperatures:
        groups = {"whole": prompts, "before_loops": _before_loops(engine, prompts, temperature)}
        for batch in args.batches:
            for name, group in groups.items():
                if len(group) < batch:
                    continue
                # Keep evenly spaced groups in order of length.
                some = group[:: max(1, len(group) // AT_BATCH_1)] if batch == 1 else group
                row = compare(engines, some, batch, temperature, args.rounds)
                if row is None:
                    continue
                head = {"temperature": temperature, "batch": batch, "outputs": name}
                cut = sum(prompt.max_tokens < NEW_TOKENS for prompt in some)
                results.append({**head, "prompts": len(some), "cut": cut, **row})
                ratios = {
                    p: metrics["speedup_median_of_runs"] for p, metrics in row["policies"].items()
                }
                cpu = {p: metrics["tokens_per_cpu_s"] for p, metrics in row["policies"].items()}
                print(head, ratios, "tokens per CPU second", cpu, flush=True)
    facts |= {"numerics_class": engine.served.card.numerics_class, "proposer": proposer}
    return {**facts, "results": results}


def _engines(args: argparse.Namespace) -> dict[str, LoadedEngine]:
    """Return the engine of each policy."""
    chosen = str(args.model) if args.model else None
    engines: dict[str, LoadedEngine] = {}
    for policy in reversed(args.policies):
        if args.one_engine and policy == "off":
            engines[policy] = engines[next(reversed(engines))]
            continue
        config = WorkerConfig(
            model=chosen, speculation=policy, proposer=args.proposer, kv_bytes=args.kv_bytes
        )
        engines[policy] = load_engine(config)
    return {policy: engines[policy] for policy in args.policies}


def _before_loops(
    engine: LoadedEngine, prompts: Sequence[Prompt], temperature: float
) -> list[Prompt]:
    """Return the prompts whose outputs have enough tokens before a loop, cut at the loop.

    The prompts are sorted by length, so that the sequences of a batch end at about the same time.
    """
    _, outputs = decode(engine, prompts, "off", temperature)
    starts = [loop_start(outputs[str(index)]) for index in range(len(prompts))]
    cut = [
        replace(prompt, max_tokens=start)
        for prompt, start in zip(prompts, starts, strict=True)
        if start >= LEAST_TOKENS
    ]
    return sorted(cut, key=lambda prompt: prompt.max_tokens)


def main() -> None:
    """Measure the policies, and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--prompts", type=int, default=64)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--proposer", help="name of the only proposer (default: all proposers)")
    parser.add_argument("--policies", default=POLICIES, type=lambda text: text.split(","))
    parser.add_argument(
        "--one-engine", action="store_true", help="run `off` and the next policy on the same engine"
    )
    parser.add_argument("--batches", default=BATCHES, nargs="+", type=int)
    parser.add_argument("--temperatures", default=TEMPERATURES, nargs="+", type=float)
    parser.add_argument("--prompt-tokens", default=PROMPT_TOKENS, nargs=2, type=int)
    parser.add_argument(
        "--kv-bytes", default=KV_BYTES, type=int, help="KV memory of each engine, in bytes"
    )
    parser.add_argument("--json", type=Path, required=True)
    args = parser.parse_args()
    result = measure(args)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
