"""What `auto` costs where it drafts nothing: CPU time of whole steps with and without a proposer.

    python -m bench.engine.idle_speculation --json OUT

Two workers side by side, step by step in turns: `auto` with n-gram drafts and their index, at a
price that admits no slot, and the same without any proposer. The device is a stub that returns a
token for each sequence at once, behind the real input builder, and text and streams come behind it,
as in `bench.host`; so the share is that of the host's time, and less of a step's.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any, Final

import torch

from bench.engine.host import build_step, stub_result
from bench.engine.record import provenance
from draftgate.backends.base import WorkerConfig
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.steps import StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.load import load_engine
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.runner import Runner
from draftgate.backends.streams import DeltaStreams
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import GenerationRequest, SamplingParams
from draftgate.policies.registry import speculation_policy
from draftgate.policies.step_cost import StepCost
from draftgate.policies.types import RequestView

BATCHES: Final = (1, 16, 256)
CONTEXT: Final = 512
STEPS: Final = 1200
KEPT: Final = 0.98
"""Share of the steps that count, the shortest ones: the rest was interrupted."""

EDGES: Final = (1, 4, 8, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256, 384, 512)
DEAR: Final = StepCost(EDGES, tuple(1e-3 * tokens for tokens in EDGES))
"""Every token costs its share of the step, so no slot can earn more than it costs."""


class Side:
    """A worker with a stub for a device."""

    def __init__(
        self, runner: Runner, tokenizer: Tokenizer, batch: int, proposers: dict[str, Proposer]
    ) -> None:
        """Begin requests, and prefill them all."""
        blocks = KvBlocks(batch * (CONTEXT + STEPS) // 8, 16)
        config, policy = SchedulerConfig(batch, 1 << 14), speculation_policy("auto")
        scheduler = Scheduler(config, blocks, policy, proposers, DEAR)
        self.worker = WorkerCore(scheduler, tokenizer, 2 * (CONTEXT + STEPS))
        self.cpu_s: list[float] = []
        self._runner = runner
        self._streams = DeltaStreams(on_abandon=lambda _request_id: None)
        self._count = 0
        for index in range(batch):
            prompt = tuple((index * 31 + place * 7) % 3000 for place in range(CONTEXT))
            sampling = SamplingParams(CONTEXT + STEPS, index, 0.0, ignore_eos=True)
            plan = policy.decide(RequestView(CONTEXT, STEPS, 0.0), self.worker.load())
            request = GenerationRequest(str(index), compact(prompt), sampling, plan)
            self._streams.open(request)
            self.worker.submit(request)
        while self.step().num_sampling < batch:
            pass
        self.cpu_s.clear()

    def step(self) -> StepPlan:
        """Run a step, and keep what it took of the processor."""
        self._count += 1
        started_s = time.thread_time()
        plan = self.worker.plan()
        assert plan is not None
        build_step(self._runner, plan, 0.0)
        delivered = self.worker.complete(plan, stub_result(plan, self._count))
        self._streams.deliver(delivered)
        self.worker.load()
        self.cpu_s.append(time.thread_time() - started_s)
        return plan

    @property
    def step_us(self) -> float:
        """Mean microseconds of the steps that were not interrupted."""
        kept = sorted(self.cpu_s)[: int(KEPT * len(self.cpu_s))]
        return 1e6 * sum(kept) / len(kept)


def measure_batch(runner: Runner, tokenizer: Tokenizer, batch: int) -> dict[str, Any]:
    """Return the row of one batch size."""
    without = Side(runner, tokenizer, batch, {})
    auto = Side(runner, tokenizer, batch, {"ngram": NgramProposer()})
    for count in range(STEPS // 2):
        for side in (without, auto) if count % 2 else (auto, without):
            plan = side.step()
            assert plan.num_tokens == batch, "a slot was taken"
    share = auto.step_us / without.step_us - 1.0
    return {
        "sequences": batch,
        "without_proposer_us": round(without.step_us, 1),
        "auto_us": round(auto.step_us, 1),
        "more_percent": round(100 * share, 2),
    }


def main() -> None:
    """Measure and write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--json", type=Path, required=True)
    path = parser.parse_args().json
    torch.set_num_threads(1)
    facts = provenance()
    engine = load_engine(WorkerConfig(speculation="off", kv_bytes=1 << 28))
    assert isinstance(engine.executor, Runner)
    rows = []
    for batch in BATCHES:
        rows.append(measure_batch(engine.executor, engine.worker.tokenizer, batch))
        print(rows[-1], flush=True)
    path.write_text(json.dumps({**facts, "steps": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
