"""Measure decode speed with drafts of a fixed acceptance rate, relative to no drafts.

The continuations are from a run without drafts. Every draft length and `auto` then run the same
prompts in the same rounds. Only steps in which the whole batch decodes count.
"""

from __future__ import annotations

from collections.abc import Sequence as Many
from contextlib import ExitStack
from dataclasses import dataclass, field
from itertools import count
from statistics import median
from typing import Any, NamedTuple

from bench.engine.bench_engine import BenchEngine
from bench.engine.cases import weight_bytes
from bench.engine.device import Rates
from bench.engine.replay import NAME, RecordedProposer, ReplayProposer, Tested
from bench.engine.serving import (
    BATCHES,
    PLAIN,
    Generation,
    Prompt,
    Serving,
    greedy_requests,
    in_batches,
)
from draftgate.backends.types import SpeculationOutcome
from draftgate.lab.sim.recording import load_recording
from draftgate.policies.registry import speculation_policy
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS
from draftgate.policies.types import SpeculationMode, SpeculationPlan


class Replayed(NamedTuple):
    """Settings of the measurement.

    Attributes:
        acceptance: probability that a draft token is right, or the name of a proposer whose drafts
            are in `recording`.
        lengths: fixed draft lengths.
        new_tokens: number of output tokens of each prompt.
        rounds: number of rounds of all policies, whose medians count.
        recording: name or file of recorded drafts.
        batches: numbers of sequences.
    """

    acceptance: float | str
    lengths: tuple[int, ...]
    new_tokens: int
    rounds: int
    recording: str = "llama-3.1-8b"
    batches: tuple[int, ...] = BATCHES

    def proposer(self, continuations: dict[Prompt, list[int]], vocab_size: int) -> ReplayProposer:
        """Return a proposer that knows the continuation of each prompt.

        Raises:
            ValueError: the recording is missing, damaged, or without drafts of the proposer.
        """
        if not isinstance(self.acceptance, str):
            return ReplayProposer.of(continuations.items(), self.acceptance, vocab_size)
        recording = load_recording(self.recording)
        if self.acceptance not in recording.proposers:
            raise ValueError(f"{self.recording} has no drafts of {self.acceptance}")
        # Texts of a task are stored together, so the prompts take texts from all of them in turn.
        tasks = [recording.texts(task, 0.0) for task in recording.tasks]
        texts = (
            tasks[i % len(tasks)][i // len(tasks) % len(tasks[i % len(tasks)])] for i in count()
        )
        return RecordedProposer(
            {prompt: tuple(tokens) for prompt, tokens in continuations.items()},
            name=self.acceptance,
            texts=dict(zip(continuations, texts, strict=False)),
            vocab_size=vocab_size,
        )


@dataclass
class _Runs:
    """The rounds of a policy at a single batch size.

    Attributes:
        rates: tokens per second of each round, or 0 if the prompts never all decoded together.
    """

    rates: list[float] = field(default_factory=list)
    outcome: SpeculationOutcome = field(default_factory=SpeculationOutcome)
    tested: Tested = field(default_factory=Tested)
    tokens: int = 0
    equal: int = 0
    outputs: int = 0


def measure_speedups(
    bench_engine: BenchEngine, settings: Replayed, rates: Rates
) -> list[dict[str, Any]]:
    """Return a row for each policy and batch size of a model."""
    prompts = bench_engine.model.prompts(max(settings.batches))
    with Serving(bench_engine.worker(speculation_policy("off"), {})) as plain:
        generation = plain.run(greedy_requests(prompts, settings.new_tokens, PLAIN))
    continuations = {prompt: generation.outputs[str(index)] for index, prompt in enumerate(prompts)}
    rows = []
    for batch in settings.batches:
        runs = _run_all(bench_engine, settings, in_batches(prompts, batch), continuations)
        rows += [_row(bench_engine, settings, rates, batch, name, runs) for name in runs]
        for row in rows[-len(runs) :]:
            print({"model": bench_engine.model.name, **row}, flush=True)
    return rows


def _policies(settings: Replayed) -> dict[str, int]:
    """Return the maximum draft length by policy."""
    fixed = {f"fixed:{length}": length for length in settings.lengths}
    return {"off": 0, **fixed, "auto": MAX_DRAFT_TOKENS}


def _run_all(
    bench_engine: BenchEngine,
    settings: Replayed,
    groups: Many[Many[Prompt]],
    continuations: dict[Prompt, list[int]],
) -> dict[str, _Runs]:
    policies = _policies(settings)
    runs = {name: _Runs() for name in policies}
    vocab_size = bench_engine.model.config.vocab_size
    with ExitStack() as running:
        servings = {}
        for name in policies:
            proposer = settings.proposer(continuations, vocab_size)
            runs[name].tested = proposer.tested
            engine = bench_engine.worker(speculation_policy(name), {NAME: proposer})
            servings[name] = running.enter_context(Serving(engine))
        for turn in range(settings.rounds):
            order = list(policies.items())
            for name, longest in order if turn % 2 else reversed(order):
                generations = [_run(servings[name], group, longest, settings) for group in groups]
                _count(runs[name], generations, groups, continuations)
    return runs


def _run(serving: Serving, group: Many[Prompt], longest: int, settings: Replayed) -> Generation:
    plan = PLAIN
    if longest:
        plan = SpeculationPlan("bench", SpeculationMode.AUTO, NAME, longest, "a benchmark")
    return serving.run(greedy_requests(group, settings.new_tokens, plan))


def _count(
    runs: _Runs,
    generations: Many[Generation],
    groups: Many[Many[Prompt]],
    continuations: dict[Prompt, list[int]],
) -> None:
    """Add the results of a round."""
    windows = [each.decode_window for each in generations]
    tokens, seconds = (sum(parts) for parts in zip(*windows, strict=True))
    runs.rates.append(tokens / seconds if seconds else 0.0)
    for each, group in zip(generations, groups, strict=True):
        runs.outcome += each.outcome
        for index, prompt in enumerate(group):
            output = each.outputs[str(index)]
            runs.tokens += len(output)
            runs.outputs += 1
            runs.equal += output == continuations[prompt]


def _row(
    bench_engine: BenchEngine,
    settings: Replayed,
    rates: Rates,
    batch: int,
    name: str,
    runs: dict[str, _Runs],
) -> dict[str, Any]:
    own, off = runs[name], runs["off"]
    row: dict[str, Any] = {
        "proposer": None if name == "off" else _label(settings),
        "policy": name,
        "batch": batch,
        "decode_tokens_per_s": round(median(own.rates), 1),
        "equal_outputs": round(own.equal / own.outputs, 3),
    }
    rounds = zip(own.rates, off.rates, strict=True)
    ratios = [mine / plain for mine, plain in rounds if mine and plain]
    if name == "off":
        if batch == 1:
            row["share_of_bandwidth"] = round(
                _bandwidth_share(bench_engine, median(own.rates), rates), 3
            )
        return row
    tested = own.tested
    drafted = own.outcome.num_drafted_tokens
    steps = own.tokens - own.outcome.num_accepted_tokens
    return row | {
        "speedup": round(median(ratios), 3) if ratios else None,
        "acceptance": round(tested.acceptance or 0.0, 3),
        "tested_tokens": tested.agreed + tested.rejected,
        "accepted_of_drafted": round(own.outcome.num_accepted_tokens / max(drafted, 1), 3),
        "tokens_per_step": round(own.tokens / steps, 3),
    }


def _label(settings: Replayed) -> str:
    if isinstance(settings.acceptance, str):
        return f"replay, {settings.acceptance} of {settings.recording}"
    return f"replay, acceptance {settings.acceptance}"


def _bandwidth_share(bench_engine: BenchEngine, tokens_per_s: float, rates: Rates) -> float:
    """Return the share of the bandwidth that the weights alone use."""
    num_bytes = weight_bytes(bench_engine.model.config, bench_engine.model.dtype.itemsize)
    return num_bytes * tokens_per_s / rates.bytes_per_s
