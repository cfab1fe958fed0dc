"""Drives a worker on the engine step by step, without threads: every run is the same."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from pathlib import Path

import torch

from backends.core.drive import drive
from backends.core.kv_blocks import KvBlocks
from backends.core.scheduler import Scheduler, SchedulerConfig
from backends.core.sequence import Sequence
from backends.core.steps import Draft, Proposer
from backends.core.worker import Worker
from backends.engine.config import ModelConfig, read_model_config
from backends.engine.kv_pool import BLOCK_TOKENS, KvPool
from backends.engine.model import Decoder
from backends.engine.proposers.ngram import NgramProposer
from backends.engine.runner import Runner
from backends.engine.sampler import Verify
from backends.engine.weights import load_weights
from backends.tokenizer import Tokenizer
from backends.types import (
    Delta,
    GenerationRequest,
    ResumedChoice,
    SamplingParams,
    TokenLogprob,
)
from policies.protocols import SpeculationPolicy
from policies.speculation import Off
from policies.step_cost import StepCost
from policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

MAX_MODEL_LEN = 1024

COST = StepCost((16, 32, 64, 128), (1e-3, 1.4e-3, 2e-3, 3.5e-3), sequence_s=1e-4)
"""Fixed, so that what `auto` decides does not depend on the machine."""

IDLE = WorkerLoad(0, 0, 1, 1, 0.0, 0.5, ("ngram",))


@dataclass(eq=False)
class Model:
    """A loaded checkpoint; in bfloat16 with the promise of exact bits."""

    directory: Path
    dtype: torch.dtype = torch.float32
    verify: Verify = "coupled"
    config: ModelConfig = field(init=False)
    decoder: Decoder = field(init=False)
    tokenizer: Tokenizer = field(init=False)

    def __post_init__(self) -> None:
        self.config = read_model_config(self.directory)
        exact = self.dtype is not torch.float32
        weights = load_weights(self.directory, self.config, self.dtype, exact=exact)
        self.decoder = Decoder(self.config, weights, MAX_MODEL_LEN)
        self.tokenizer = Tokenizer(self.directory)

    def runner(self, num_blocks: int) -> Runner:
        """A runner with a KV pool of its own."""
        return Runner(self.decoder, KvPool(self.config, num_blocks, self.dtype), self.verify)


@dataclass(frozen=True)
class Setup:
    """How a run is batched; none of it may change a token."""

    policy: SpeculationPolicy = field(default_factory=Off)
    proposers: Callable[[], dict[str, Proposer]] = lambda: {"ngram": NgramProposer()}
    max_num_seqs: int = 16
    max_step_tokens: int = 512
    num_blocks: int = 1024


@dataclass
class Outcome:
    """What a run gave: tokens by (request, choice), and how it went."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    text: dict[tuple[str, int], str] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprob]] = field(default_factory=dict)
    accepted: int = 0
    rejected: int = 0
    preemptions: int = 0
    leaked_blocks: int = 0
    cached_tokens: int = 0


class Engine:
    """A worker with its device, driven in the caller's thread."""

    def __init__(self, model: Model, setup: Setup) -> None:
        self.blocks = KvBlocks(setup.num_blocks, BLOCK_TOKENS)
        self.scheduler = Scheduler(
            SchedulerConfig(setup.max_num_seqs, setup.max_step_tokens, model.config.eos_ids),
            self.blocks,
            setup.policy,
            setup.proposers(),
            COST,
        )
        self.worker = Worker(self.scheduler, model.tokenizer, MAX_MODEL_LEN)
        self.runner = model.runner(setup.num_blocks)

    def run(self, requests: Iterable[GenerationRequest]) -> Outcome:
        """Run the requests to their end."""
        outcome = Outcome()
        for request in requests:
            self.worker.check(request)
            self.worker.submit(request)
        sequences = self.scheduler.waiting
        for step in drive(self.worker, self.runner):
            for request_id, delta in step.deltas:
                _note(outcome, request_id, delta)
        outcome.preemptions = sum(sequence.preemptions for sequence in sequences)
        outcome.leaked_blocks = self.blocks.num_blocks - self.blocks.num_free
        return outcome


def run(model: Model, requests: Iterable[GenerationRequest], setup: Setup) -> Outcome:
    """Run all requests to their end on a fresh worker."""
    return Engine(model, setup).run(requests)


def _note(outcome: Outcome, request_id: str, delta: Delta) -> None:
    key = (request_id, delta.choice)
    outcome.tokens.setdefault(key, []).extend(delta.token_ids)
    outcome.text[key] = outcome.text.get(key, "") + delta.text
    outcome.logprobs.setdefault(key, []).extend(delta.logprobs)
    outcome.cached_tokens += delta.cached_tokens
    if delta.outcome is not None:
        outcome.accepted += delta.outcome.num_accepted_tokens
        outcome.rejected += delta.outcome.num_drafted_tokens - delta.outcome.num_accepted_tokens


def request(
    request_id: str,
    prompt_ids: Iterable[int],
    policy: SpeculationPolicy,
    *,
    n: int = 1,
    resumed: tuple[ResumedChoice, ...] = (),
    **sampling: object,
) -> GenerationRequest:
    """A request that speculates as the policy says."""
    params = SamplingParams(**{"max_tokens": 128, "seed": 0, "ignore_eos": True, **sampling})
    prompt = tuple(prompt_ids)
    view = RequestView(len(prompt), params.max_tokens, params.temperature)
    plan = policy.decide(view, IDLE)
    return GenerationRequest(request_id, prompt, params, plan, n, resumed=resumed)


@dataclass(frozen=True)
class RandomSlots:
    """An adversarial policy: any number of slots for anybody, at random."""

    rng: random.Random
    name: str = "random"

    def decide(self, request: RequestView, load: object) -> SpeculationPlan:
        return SpeculationPlan(self.name, request.mode, "ngram", 12, "chaos")

    def draft_lengths(self, step: StepView, cost: StepCost) -> list[int]:
        lengths, budget = [0] * len(step.candidates), step.slot_budget
        for index in self.rng.sample(range(len(lengths)), len(lengths)):
            lengths[index] = self.rng.randint(
                0, min(step.candidates[index].max_draft_tokens, budget)
            )
            budget -= lengths[index]
        return lengths


class HostileProposer:
    """Drafts n-grams with random tokens among them, and random tokens where there are none."""

    def __init__(self, vocab_size: int, rng: random.Random) -> None:
        self._ngram = NgramProposer()
        self._vocab_size = vocab_size
        self._rng = rng

    def propose(self, sequence: Sequence, max_tokens: int) -> Draft:
        rng = self._rng
        drafted = self._ngram.propose(sequence, max_tokens).token_ids
        length = len(drafted) or rng.randint(0, max_tokens)
        noise = (rng.randrange(self._vocab_size) for _ in range(length))
        mixed = [
            drafted[i] if i < len(drafted) and rng.random() < 0.8 else token
            for i, token in enumerate(noise)
        ]
        return Draft(tuple(mixed))

    def forget(self, sequence: Sequence) -> None:
        self._ngram.forget(sequence)
