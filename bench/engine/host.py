"""Measure the host's CPU time per step by part, and the cost of a policy that drafts nothing.

    draftgate bench host --json OUT

A batch decodes held-out code. The device is a stub that emits the next tokens of the code and
reports the step times of a cost model, after the real input builder. The modes are:

* `off`: the policy `off`
* `ngram`: the policy `auto` with n-gram drafts, on a device with the step costs of `h100-8b`
* `paused`: the policy `auto` on a device on which no draft is worth its time

The times are CPU time of the worker's thread, and of the delivery to the streams in the event loop
(`deliver`). The modes alternate, so that a busy machine slows all of them. `--lookups-only`
measures only n-gram lookups (`lookups.py`).
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.engine.lookups import held_out_tokens, measure_lookups
from bench.harness.provenance import provenance
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.inputs import lay_out_plan, padded
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.sampler import row_sampling, walk_drafts
from draftgate.backends.sim.profile import load_profile
from draftgate.backends.streams import DeltaStreams
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.gateway.process import settle_process
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView

BATCHES: Final = (1, 16, 64, 256)
TEMPERATURES: Final = (0.0, 0.8)
CONTEXT_TOKENS: Final = 512
WARM_STEPS: Final = 72
"""Steps before the measurement. They include the first fit of step costs and four reviews, after
which the drafting of paused sequences is switched off."""
ROUNDS: Final = 20
STEPS_PER_ROUND: Final = 8
REAL_STEPS: Final = 5

MOST_TOKENS: Final = 8192
"""Output limit in tokens, which no sequence reaches."""
MOST_STEP_TOKENS: Final = 1 << 14
KV_BYTES: Final = 7 << 30

REFERENCE_DEVICE: Final = "h100-8b"
COSTLY_SLOTS: Final = StepCost((1,), (1e-3,))
"""Step costs of a device on which each slot costs as much as a sequence."""

POLICIES: Final = {"off": "off", "ngram": "auto", "paused": "auto"}


@dataclass
class Parts:
    """CPU seconds of each part, by step."""

    taken: dict[str, list[float]] = field(default_factory=dict)

    def time(self, name: str, work: Callable[[], Any]) -> Any:
        """Run a part and record its time."""
        started_s = time.thread_time()
        result = work()
        self.taken.setdefault(name, []).append(time.thread_time() - started_s)
        return result

    def p10_us(self) -> dict[str, float]:
        """Return the lowest decile of each part and of the sum of all parts, in microseconds."""
        sums = sorted(self._sums())
        found = {name: lowest_decile_us(parts) for name, parts in self.taken.items()}
        return {**found, "all": lowest_decile_us(sums), "median": round(1e6 * median(sums), 1)}

    def _sums(self) -> list[float]:
        return [sum(parts) for parts in zip(*self.taken.values(), strict=True)]


def lowest_decile_us(seconds: list[float]) -> float:
    """Return the lowest decile in microseconds, which other programs hardly change."""
    return round(1e6 * sorted(seconds)[len(seconds) // 10], 1)


class Batch:
    """A decoding batch of one mode on a stub device."""

    def __init__(
        self, engine: LoadedEngine, text: list[int], mode: str, sequences: int, temperature: float
    ) -> None:
        """Submit the requests and run their prompts."""
        assert isinstance(engine.executor, Runner)
        self._runner = engine.executor
        self._temperature = temperature
        self._text = text
        self._sequences = sequences
        self.parts = Parts()
        self._worker = self._new_worker(engine, mode)
        self._streams = DeltaStreams(on_abandon=lambda _request_id: None)
        self.drafted = self.accepted = self.steps = 0
        for index in range(sequences):
            self._submit(index, mode)
        while (plan := self._next_plan()).chunks or plan.num_sampling < sequences:
            walks = walk_drafts(plan, self._row_tokens(plan))
            self._worker.complete(plan, self._result(plan, walks.emitted))
        self._plan = plan

    def _next_plan(self) -> StepPlan:
        plan = self._worker.plan()
        assert plan is not None, "no sequence has ended"
        return plan

    def _new_worker(self, engine: LoadedEngine, mode: str) -> WorkerCore:
        """Return a worker with the engine's tokenizer and number of blocks."""
        self._cost = COSTLY_SLOTS if mode == "paused" else load_profile(REFERENCE_DEVICE).cost
        blocks = KvBlocks(engine.served.card.pool_tokens // BLOCK_TOKENS, BLOCK_TOKENS)
        scheduler = Scheduler(
            SchedulerConfig(max(BATCHES), MOST_STEP_TOKENS),
            blocks,
            speculation_policy(POLICIES[mode]),
            {"ngram": NgramProposer()},
            self._cost,
        )
        return WorkerCore(scheduler, engine.worker.tokenizer, 2 * MOST_TOKENS)

    def _submit(self, index: int, mode: str) -> None:
        prompt = compact([self._token(index, place) for place in range(CONTEXT_TOKENS)])
        sampling = SamplingParams(MOST_TOKENS, index, self._temperature, ignore_eos=True)
        view = RequestView(CONTEXT_TOKENS, MOST_TOKENS, self._temperature)
        plan = speculation_policy(POLICIES[mode]).decide(view, self._worker.load())
        request = GenerationRequest(str(index), prompt, sampling, plan)
        self._streams.open(request)
        self._worker.submit(request)

    def step(self) -> None:
        """Run one step and record the time of its parts."""
        plan, parts = self._plan, self.parts
        parts.time("inputs", partial(self._build_inputs, plan))
        tokens = self._row_tokens(plan)
        walks = parts.time("walk", partial(walk_drafts, plan, tokens))
        result = self._result(plan, walks.emitted)
        delivered = parts.time("complete", partial(self._worker.complete, plan, result))
        assert len(delivered) == self._sequences
        parts.time("deliver", partial(self._streams.deliver, delivered))
        parts.time("load", self._worker.load)
        self._plan = parts.time("plan", self._next_plan)
        self.steps += 1
        self.drafted += sum(work.num_drafts for work in plan.work)
        self.accepted += sum(len(emitted) - 1 for emitted in walks.emitted)

    def real_step_us(self) -> float:
        """Return the CPU time of the step with the real model, in microseconds."""
        taken = []
        for _ in range(REAL_STEPS):
            started_s = time.thread_time()
            self._runner.execute(self._plan)
            taken.append(time.thread_time() - started_s)
        return round(1e6 * min(taken), 1)

    def reference_step_us(self) -> float:
        """Return the predicted time of the step on `REFERENCE_DEVICE`, in microseconds."""
        size = self._plan.size
        cost = load_profile(REFERENCE_DEVICE).cost
        return round(1e6 * cost.seconds(size.tokens, size.kv_tokens, size.sequences), 1)

    def _build_inputs(self, plan: StepPlan) -> object:
        """Build the inputs of the forward pass and of the sampler."""
        inputs = padded(lay_out_plan(plan), 0)
        begun = self._runner.operators.begin(inputs)
        assert plan.is_plain
        if self._temperature:
            row_sampling(plan, torch.device("cpu"))
        return begun

    def _row_tokens(self, plan: StepPlan) -> list[int]:
        """Return the true token of every row of a step."""
        tokens = []
        for work in plan.work:
            if work.samples:
                index, end = work.sequence.key, work.confirmed_end
                depths = (0, *work.draft.depths)
                tokens += [self._token(index, end + depth) for depth in depths]
        return tokens

    def _token(self, index: int, place: int) -> int:
        """Return a token of a sequence, which continues its own part of the text."""
        start = index * len(self._text) // self._sequences
        return self._text[(start + place) % len(self._text)]

    def _result(self, plan: StepPlan, emitted: list[tuple[int, ...]]) -> StepResult:
        size = plan.size
        step_s = self._cost.seconds(size.tokens, size.kv_tokens, size.sequences)
        return StepResult(emitted, ((),) * len(plan.work), step_s)


def measure_modes(
    engine: LoadedEngine, text: list[int], sequences: int, temperature: float
) -> Iterator[dict[str, Any]]:
    """Yield a row for each mode with this number of sequences."""
    batches = {mode: Batch(engine, text, mode, sequences, temperature) for mode in POLICIES}
    for batch in batches.values():
        for _ in range(WARM_STEPS):
            batch.step()
        batch.parts.taken.clear()
        batch.drafted = batch.accepted = batch.steps = 0
    for _ in range(ROUNDS):
        for batch in batches.values():
            for _ in range(STEPS_PER_ROUND):
                batch.step()
    step_us = batches["off"].real_step_us()
    reference_us = batches["off"].reference_step_us()
    off_us = batches["off"].parts.p10_us()["all"]
    for mode, batch in batches.items():
        parts = batch.parts.p10_us()
        row = {"mode": mode, "sequences": sequences, "temperature": temperature, **parts}
        row["drafted_per_sequence"] = round(batch.drafted / batch.steps / sequences, 2)
        row["accepted_per_sequence"] = round(batch.accepted / batch.steps / sequences, 2)
        if mode == "off":
            row |= {"real_step": step_us, f"{REFERENCE_DEVICE}_step": reference_us}
        if mode == "paused":
            tax_us = parts["all"] - off_us
            row["tax_of_real_step"] = round(tax_us / step_us, 5)
            row[f"tax_of_{REFERENCE_DEVICE}_step"] = round(tax_us / reference_us, 5)
        yield row


def measure(*, lookups_only: bool = False) -> dict[str, Any]:
    """Return the rows of all batches and of lookups, with their provenance."""
    torch.set_num_threads(1)
    facts = provenance()
    config = WorkerConfig(
        speculation="off",
        proposer="ngram",
        kv_bytes=KV_BYTES,
        max_num_seqs=max(BATCHES),
        max_step_tokens=MOST_STEP_TOKENS,
    )
    engine = load_engine(config)
    settle_process()
    if lookups_only:
        return {**facts, "ngram_lookups": measure_lookups(engine.worker.tokenizer)}
    text = held_out_tokens(engine.worker.tokenizer, max(BATCHES) * CONTEXT_TOKENS)
    rows = []
    for temperature in TEMPERATURES:
        for sequences in BATCHES:
            for row in measure_modes(engine, text, sequences, temperature):
                rows.append(row)
                print(row, flush=True)
    return {**facts, "context_tokens": CONTEXT_TOKENS, "microseconds_of_a_step": rows}


def main(arguments: list[str] | None = None) -> None:
    """Measure the host time, and write the JSON."""
    parser = argparse.ArgumentParser(prog="draftgate bench host", description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    parser.add_argument("--lookups-only", action="store_true")
    args = parser.parse_args(arguments)
    result = measure(lookups_only=args.lookups_only)
    args.json.parent.mkdir(parents=True, exist_ok=True)
    args.json.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
