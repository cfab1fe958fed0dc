"""Measure the host's CPU time per step for planning, inputs, stop checks, text and delivery.

    draftgate bench host --json OUT

256 sequences decode. The device is a stub that returns a token for each sequence immediately, after
the real input builder. The times are CPU time of the worker's thread, and of the delivery to the
streams in the event loop (`deliver`). N-gram lookups are measured separately (`lookups.py`), and
`--lookups-only` measures nothing else.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from statistics import median
from typing import Any, Final

import torch

from bench.engine.lookups import measure_lookups
from bench.harness.provenance import provenance
from draftgate.backends.core.steps import StepPlan, StepResult
from draftgate.backends.engine.inputs import build_inputs, feed_of
from draftgate.backends.engine.load import LoadedEngine, load_engine
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.sampler import row_sampling, walk_drafts
from draftgate.backends.streams import DeltaStreams
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.backends.worker_config import WorkerConfig
from draftgate.policies.registry import speculation_policy
from draftgate.policies.types import RequestView

SEQUENCES: Final = 256
CONTEXTS: Final = (64, 512, 2048)
STEPS: Final = 60
MOST_TOKENS: Final = 400
"""Output limit in tokens. No sequence ends before the last sequence is prefilled."""
KV_BYTES: Final = 7 << 30

TEMPERATURES: Final = (0.0, 0.8)


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

    def medians_us(self) -> dict[str, float]:
        """Return the median microseconds of each part, and of the sum of all parts."""
        sums = [sum(parts) for parts in zip(*self.taken.values(), strict=True)]
        return {
            **{name: round(1e6 * median(parts), 1) for name, parts in self.taken.items()},
            "all": round(1e6 * median(sums), 1),
        }


def measure_host(engine: LoadedEngine, context: int, temperature: float) -> dict[str, Any]:
    """Return the row of a context length."""
    runner = engine.executor
    assert isinstance(runner, Runner)
    worker = engine.worker
    vocab = worker.tokenizer.vocab_size
    streams = DeltaStreams(on_abandon=lambda _request_id: None)
    for index in range(SEQUENCES):
        prompt = tuple((index * 31 + place * 7) % vocab for place in range(context))
        sampling = SamplingParams(MOST_TOKENS, index, temperature, ignore_eos=True)
        view = RequestView(context, MOST_TOKENS, temperature)
        off = speculation_policy("off").decide(view, worker.load())
        request = GenerationRequest(str(index), compact(prompt), sampling, off)
        streams.open(request)
        worker.submit(request)
    parts = Parts()
    while (plan := worker.plan()) is not None and plan.num_sampling < SEQUENCES:
        worker.complete(plan, stub_result(plan, 0))
    for count in range(1, STEPS):
        assert plan is not None
        parts.time("inputs", partial(build_step, runner, plan, temperature))
        result = parts.time("walk", partial(stub_result, plan, count))
        delivered = parts.time("complete", partial(worker.complete, plan, result))
        assert len(delivered) == SEQUENCES
        parts.time("deliver", partial(streams.deliver, delivered))
        parts.time("load", worker.load)
        plan = parts.time("plan", worker.plan)
    for index in range(SEQUENCES):
        worker.cancel(str(index))
    return {"context_tokens": context, "temperature": temperature, **parts.medians_us()}


def build_step(runner: Runner, plan: StepPlan, temperature: float) -> object:
    """Build the inputs of the forward pass and of the sampler."""
    inputs = build_inputs(map(feed_of, plan.work), 0)
    begun = runner.operators.begin(inputs)
    assert plan.is_plain
    if temperature:
        row_sampling(plan, torch.device("cpu"))
    return begun


def stub_result(plan: StepPlan, count: int) -> StepResult:
    """Return a token per row, in the format of the sampler."""
    rows = sum(work.num_samples for work in plan.work)
    walks = walk_drafts(plan, [(count * 17 + row) % 3000 + 300 for row in range(rows)])
    return StepResult(walks.emitted, ((),) * len(plan.work), 0.0)


def measure(*, lookups_only: bool = False) -> dict[str, Any]:
    """Return the rows of all context lengths and of lookups, with their provenance."""
    torch.set_num_threads(1)
    facts = provenance()
    config = WorkerConfig(
        speculation="off", kv_bytes=KV_BYTES, max_num_seqs=SEQUENCES, max_step_tokens=1 << 14
    )
    engine = load_engine(config)
    lookups = {"ngram_lookups": measure_lookups(engine.worker.tokenizer)}
    if lookups_only:
        return {**facts, **lookups}
    rows = []
    for temperature in TEMPERATURES:
        for context in CONTEXTS:
            rows.append(measure_host(engine, context, temperature))
            print(rows[-1], flush=True)
    return {**facts, "sequences": SEQUENCES, "microseconds_of_a_step": rows, **lookups}


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
