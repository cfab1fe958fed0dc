"""The engine with a measured model, for single steps and for workers that run whole requests."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Final

from bench.engine.cases import Case
from bench.engine.device import device_elapsed_s, elapsed_s
from bench.engine.models import Model
from draftgate.backends.core.drafts import Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.proposer import Proposer
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.gpu.shapes import ROW_BUCKETS
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from draftgate.backends.engine.load import runner_for
from draftgate.backends.engine.loaded import LoadedEngine
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.runner import ModelRunner
from draftgate.backends.engine.served import ServedModel
from draftgate.backends.engine.warmup import (
    TIMED_CONTEXT,
    TIMED_SLOTS,
    TOKEN_BUCKETS,
    measure_step_cost,
)
from draftgate.backends.kv_transfer.exchange import KvExchange
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ModelCard, ResumedChoice, SamplingParams
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import RequestView, WorkerLoad

LEAST_LENGTH: Final = TIMED_CONTEXT + TIMED_SLOTS + 1
"""Minimum sequence length in tokens for the measurement of step costs."""

MAX_SEQS: Final = 64
STEP_TOKENS: Final = 2048
"""Tokens per step of workers. The limit is large, so that prompts are prefilled in few steps and
all sequences decode together."""

GREEDY: Final = SamplingParams(max_tokens=1, seed=0, temperature=0.0)


@dataclass(frozen=True)
class BenchEngine:
    """The engine with a loaded model.

    Attributes:
        max_seqs: maximum number of sequences of a step.
    """

    model: Model
    pool: KvPool
    runner: ModelRunner
    max_model_len: int
    max_seqs: int = MAX_SEQS

    @classmethod
    def load(
        cls,
        model: Model,
        most_tokens: int,
        longest: int,
        *,
        exact: bool = False,
        max_seqs: int = MAX_SEQS,
    ) -> BenchEngine:
        """Load a model.

        Args:
            most_tokens: size of the pool in KV tokens.
            longest: number of tokens of the longest sequence.
            exact: whether to use batch-invariant kernels.
            max_seqs: maximum number of sequences of a step.
        """
        longest = max(longest, LEAST_LENGTH)
        most_tokens = max(most_tokens, longest)
        # Each sequence that ends within a block needs an additional block.
        blocks = -(-most_tokens // BLOCK_TOKENS) + max_seqs
        pool = KvPool(model.config, blocks, model.dtype, model.device)
        for layer in pool.layers:
            layer.uniform_(-1.0, 1.0)  # without this, all reads would hit a single page of zeros
        decoder = Decoder(model.config, model.weights(exact=exact), longest)
        runner = runner_for(decoder, pool, max_num_seqs=max_seqs, max_model_len=longest)
        return cls(model, pool, runner, longest, max_seqs)

    def exact(self) -> BenchEngine:
        """Return the engine in exact mode with the same pool."""
        decoder = Decoder(self.model.config, self.model.weights(exact=True), self.max_model_len)
        runner = runner_for(
            decoder, self.pool, max_num_seqs=self.max_seqs, max_model_len=self.max_model_len
        )
        return replace(self, runner=runner)

    @cached_property
    def cost(self) -> StepCost:
        """The step costs that a worker measures when it starts."""
        buckets = ROW_BUCKETS if self.model.device.type == "cuda" else TOKEN_BUCKETS
        most_sequences = min(self.max_seqs, self.pool.num_blocks)
        return measure_step_cost(
            self.runner,
            self.max_model_len,
            most_sequences,
            buckets,
            vocab_size=self.model.config.vocab_size,
        )

    def step_s(self, case: Case) -> float:
        """Run a step with greedy tokens that are read back, and return its seconds."""
        return self.plan_s(step_plan([case], self.model.config.vocab_size))

    def plan_s(self, plan: StepPlan) -> float:
        """Run a step whose tokens are read back, and return its seconds."""
        return elapsed_s(self.model.device, lambda: self.runner.execute(plan))

    def device_s(self, case: Case) -> float:
        """Run a step on a GPU with greedy tokens, and return the seconds of the device."""
        return self.plan_device_s(step_plan([case], self.model.config.vocab_size))

    def plan_device_s(self, plan: StepPlan) -> float:
        """Run a step on a GPU, and return the seconds of the device."""
        launcher, launched = self.runner.launcher, list[Any]()
        assert launcher is not None
        taken_s = device_elapsed_s(
            self.model.device, lambda: launched.append(launcher.launch(plan))
        )
        launcher.fetch(launched[0])
        return taken_s

    def worker(self, policy: SpeculationPolicy, proposers: dict[str, Proposer]) -> LoadedEngine:
        """Return a new worker that uses the pool. Only a single worker may run at a time."""
        blocks = KvBlocks(self.pool.num_blocks, BLOCK_TOKENS)
        scheduler = Scheduler(
            SchedulerConfig(self.max_seqs, STEP_TOKENS),
            blocks,
            policy,
            proposers,
            self.cost,
        )
        worker = WorkerCore(scheduler, self.model.tokenizer, self.max_model_len)
        card = ModelCard(self.model.name, self.model.name, self.max_model_len, None, 0)
        served = ServedModel(card, worker.admission)
        exchange = KvExchange(blocks, self.pool)
        return LoadedEngine(worker, self.runner, exchange, served, proposers)


def step_plan(
    cases: Iterable[Case], vocab_size: int, sampling: SamplingParams = GREEDY
) -> StepPlan:
    """Return a step of all sequences of the cases, with separate blocks for each sequence."""
    work: list[SequenceWork] = []
    block = 0
    for case in cases:
        blocks = -(-(case.context_tokens + case.tokens) // BLOCK_TOKENS)
        for _ in range(case.batch):
            work.append(_work(case, len(work), range(block, block + blocks), vocab_size, sampling))
            block += blocks
    return StepPlan(tuple(work))


def _work(
    case: Case, index: int, blocks: range, vocab_size: int, sampling: SamplingParams
) -> SequenceWork:
    plan = Off().decide(RequestView(1, 1, 0.0), WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ()))
    request = GenerationRequest(str(index), compact((1,)), sampling, plan)
    sequence = Sequence.for_choice(index, request, ResumedChoice(0, ()))
    sequence.block_table.extend(blocks)
    tokens = tuple(token % vocab_size for token in range(1, case.tokens + 1))
    start = case.context_tokens
    if case.name == "prefill":
        return SequenceWork(sequence, start, tokens, samples=True)
    return SequenceWork(sequence, start, tokens[:1], samples=True, draft=Draft(tokens[1:]))


def most_kv_tokens(cases: list[Case]) -> int:
    """Return the number of KV tokens of the largest step, in whole blocks."""
    return max(
        case.batch * -(-(case.context_tokens + case.tokens) // BLOCK_TOKENS) * BLOCK_TOKENS
        for case in cases
    )
