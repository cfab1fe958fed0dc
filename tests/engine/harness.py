"""A harness that drives an engine worker step by step, without threads."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from collections.abc import Sequence as Many
from dataclasses import dataclass, field, replace
from pathlib import Path

import torch

from draftgate.backends.adapter_card import AdapterCard
from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.pipeline import run_until_idle
from draftgate.backends.core.proposer import DraftRequest, Proposer
from draftgate.backends.core.scheduler import Scheduler, SchedulerConfig
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.worker import WorkerCore
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, Features, KvPool
from draftgate.backends.engine.lora.products import CpuAdapters
from draftgate.backends.engine.lora.weights import LoraCheckpoint
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.proposers.ngram import NgramProposer
from draftgate.backends.engine.quantisation.packed import Packing
from draftgate.backends.engine.runner import Runner
from draftgate.backends.engine.sampler import Verify
from draftgate.backends.engine.weights import load_weights
from draftgate.backends.grammar import LlGrammars
from draftgate.backends.prompt_logprobs import PromptLogprobs
from draftgate.backends.token_ids import compact
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import (
    Delta,
    FinishReason,
    GenerationRequest,
    GrammarSpec,
    ResumedChoice,
    SamplingParams,
    Task,
    TokenLogprob,
)
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.protocols import SpeculationPolicy
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.speculation.revision import PlanRevision
from draftgate.policies.types import (
    RequestView,
    SpeculationMode,
    SpeculationPlan,
    StepView,
    WorkerLoad,
)

MAX_MODEL_LEN = 1024

COST = StepCost((16, 32, 64, 128), (1e-3, 1.4e-3, 2e-3, 3.5e-3), sequence_s=1e-4)
"""A fixed cost, so that the decisions of `auto` do not depend on the machine."""

PROPOSERS = ("ngram", "eagle", "draft_model", "sparse_self")
IDLE = WorkerLoad(0, 0, 1, 1, 0.0, 0.5, PROPOSERS)


@dataclass(eq=False)
class Model:
    """A loaded checkpoint, with exact rows if the dtype is bfloat16, and LoRA adapters.

    Attributes:
        kv_dtype: dtype of keys and values, or None for that of the weights.
        packing: which weights stay packed, or None.
    """

    directory: Path
    dtype: torch.dtype = torch.float32
    verify: Verify = "coupled"
    kv_dtype: torch.dtype | None = None
    adapters: tuple[Path, ...] = ()
    packing: Packing | None = None
    config: ModelConfig = field(init=False)
    decoder: Decoder = field(init=False)
    tokenizer: Tokenizer = field(init=False)
    slots: dict[str, int] = field(init=False, default_factory=dict)  # of adapters, by digest

    def __post_init__(self) -> None:
        self.config = read_model_config(self.directory)
        exact = self.dtype is not torch.float32
        weights = load_weights(
            self.directory, self.config, self.dtype, exact=exact, packing=self.packing
        )
        memory = CpuAdapters(weights, exact=exact) if self.adapters else None
        weights = weights if memory is None else memory.weights
        self.decoder = Decoder(self.config, weights, MAX_MODEL_LEN, memory)
        self.tokenizer = Tokenizer(self.directory)
        for slot, directory in enumerate(self.adapters, 1):
            adapter = LoraCheckpoint(directory, self.config)
            memory.install(slot, memory.prepare(adapter.read(self.dtype)))
            self.slots[adapter.digest] = slot

    def runner(self, num_blocks: int) -> Runner:
        """Create a runner with its own KV pool."""
        return Runner(self.decoder, self.pool(num_blocks), self.verify)

    def pool(self, num_blocks: int, features: Features | None = None) -> KvPool:
        """Create a KV pool."""
        dtype = self.kv_dtype or self.dtype
        return KvPool(self.config, num_blocks, dtype, features=features)


@dataclass(frozen=True)
class Setup:
    """The batching, drafting and memory of a run. No setup may change the tokens of a run."""

    policy: SpeculationPolicy = field(default_factory=Off)
    proposers: Callable[[Engine], dict[str, Proposer]] = lambda engine: {"ngram": NgramProposer()}
    max_num_seqs: int = 16
    max_step_tokens: int = 512
    num_blocks: int = 1024


@dataclass
class Outcome:
    """The results of a run by (request, choice) and its counters."""

    tokens: dict[tuple[str, int], list[int]] = field(default_factory=dict)
    text: dict[tuple[str, int], str] = field(default_factory=dict)
    logprobs: dict[tuple[str, int], list[TokenLogprob]] = field(default_factory=dict)
    finish_reasons: dict[tuple[str, int], FinishReason] = field(default_factory=dict)
    embeddings: dict[str, bytes] = field(default_factory=dict)
    prompt_logprobs: dict[str, PromptLogprobs] = field(default_factory=dict)
    accepted: int = 0
    rejected: int = 0
    preemptions: int = 0
    leaked_blocks: int = 0
    cached_tokens: int = 0
    revisions: list[PlanRevision] = field(default_factory=list)
    accepted_predictions: int = 0
    rejected_predictions: int = 0


class Engine:
    """A worker with its runner, driven in the caller's thread."""

    def __init__(self, model: Model, setup: Setup) -> None:
        self.model = model
        self.blocks = KvBlocks(setup.num_blocks, BLOCK_TOKENS)
        self.pool = self.new_pool(setup.num_blocks)
        self.runner = Runner(model.decoder, self.pool, model.verify)
        self.scheduler = Scheduler(
            SchedulerConfig(setup.max_num_seqs, setup.max_step_tokens, model.config.eos_ids),
            self.blocks,
            setup.policy,
            setup.proposers(self),
            COST,
        )
        grammars = LlGrammars(model.tokenizer, model.config.eos_ids)
        self.worker = WorkerCore(
            self.scheduler,
            model.tokenizer,
            MAX_MODEL_LEN,
            grammars,
            tasks=(Task.GENERATE, Task.EMBED),
            adapters=tuple(AdapterCard(digest, digest, "") for digest in model.slots),
        )

    def new_pool(self, num_blocks: int) -> KvPool:
        """Return the KV memory of the worker."""
        return self.model.pool(num_blocks)

    def run(self, requests: Iterable[GenerationRequest]) -> Outcome:
        """Run all requests to completion and return the outcome."""
        outcome = Outcome()
        for request in requests:
            self.worker.admission.check(request)
            slot = self.model.slots[request.adapter] if request.adapter else 0
            self.worker.submit(request, adapter_slot=slot)
        sequences = self.scheduler.waiting
        for step in run_until_idle(self.worker, self.runner):
            for request_id, delta in step.deltas:
                add_delta(outcome, request_id, delta)
        outcome.preemptions = sum(sequence.preemptions for sequence in sequences)
        outcome.leaked_blocks = self.blocks.num_blocks - self.blocks.num_free
        return outcome


def run(model: Model, requests: Iterable[GenerationRequest], setup: Setup) -> Outcome:
    """Run all requests to completion on a new worker and return the outcome."""
    return Engine(model, setup).run(requests)


def add_delta(outcome: Outcome, request_id: str, delta: Delta) -> None:
    """Add a delta to the results of a run."""
    key = (request_id, delta.choice)
    outcome.tokens.setdefault(key, []).extend(delta.token_ids)
    outcome.text[key] = outcome.text.get(key, "") + delta.text
    outcome.logprobs.setdefault(key, []).extend(delta.logprobs)
    outcome.cached_tokens += delta.cached_tokens
    if delta.pooled is not None:
        outcome.embeddings[request_id] = delta.pooled
    if delta.prompt_logprobs is not None:
        outcome.prompt_logprobs[request_id] = delta.prompt_logprobs
    if delta.finish_reason is not None:
        outcome.finish_reasons[key] = delta.finish_reason
    if delta.outcome is not None:
        outcome.accepted += delta.outcome.num_accepted_tokens
        outcome.rejected += delta.outcome.num_drafted_tokens - delta.outcome.num_accepted_tokens
        outcome.revisions += delta.outcome.revisions
        outcome.accepted_predictions += delta.outcome.accepted_prediction_tokens
        outcome.rejected_predictions += delta.outcome.rejected_prediction_tokens


def request(
    request_id: str,
    prompt_ids: Iterable[int],
    policy: SpeculationPolicy,
    *,
    n: int = 1,
    resumed: tuple[ResumedChoice, ...] = (),
    mode: SpeculationMode = SpeculationMode.AUTO,
    grammar: GrammarSpec | None = None,
    **sampling: object,
) -> GenerationRequest:
    """Create a request with the speculation plan of the policy."""
    params = SamplingParams(**{"max_tokens": 128, "seed": 0, "ignore_eos": True, **sampling})
    prompt = compact(tuple(prompt_ids))
    view = RequestView(len(prompt), params.max_tokens, params.temperature, mode)
    plan = policy.decide(view, IDLE)
    return GenerationRequest(request_id, prompt, params, plan, n, resumed=resumed, grammar=grammar)


def embedding_request(request_id: str, prompt_ids: Iterable[int]) -> GenerationRequest:
    """Create a request for the embedding of a prompt."""
    return replace(request(request_id, prompt_ids, Off(), max_tokens=0), task=Task.EMBED)


@dataclass(frozen=True)
class RandomSlots:
    """An adversarial policy that gives random numbers of slots to random sequences."""

    rng: random.Random
    name: str = "random"

    def decide(self, request: RequestView, load: object) -> SpeculationPlan:
        named = request.mode is not SpeculationMode.AUTO
        proposer = request.mode.value if named else "ngram"
        return SpeculationPlan(self.name, request.mode, proposer, 12, "chaos")

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> list[int]:
        lengths, budget = [0] * len(step.candidates), step.slot_budget
        for index in self.rng.sample(range(len(lengths)), len(lengths)):
            lengths[index] = self.rng.randint(
                0, min(step.candidates[index].max_draft_tokens, budget)
            )
            budget -= lengths[index]
        return lengths


class HostileProposer:
    """A proposer of n-gram drafts with random tokens and branches."""

    def __init__(self, vocab_size: int, rng: random.Random) -> None:
        self._ngram = NgramProposer()
        self._vocab_size = vocab_size
        self._rng = rng

    def depth_s(self, sequences: int) -> float:
        return 0.0

    def catch_up_s(self, sequence: Sequence) -> float:
        return 0.0

    def propose(self, requests: Many[DraftRequest]) -> list[Draft]:
        drafts = self._ngram.propose(requests)
        return [self._spoil(d, r.max_tokens) for d, r in zip(drafts, requests, strict=True)]

    def _spoil(self, drafts: Draft, most: int) -> Draft:
        """Replace a fifth of the draft tokens and add random branches."""
        rng, tokens, parents = self._rng, list(drafts.token_ids), list(drafts.parents)
        parents = parents or list(range(-1, len(tokens) - 1))
        while len(tokens) < most and rng.random() < (0.5 if tokens else 0.9):
            parents.append(rng.randrange(-1, len(tokens)))
            tokens.append(rng.randrange(self._vocab_size))
        for place in range(len(tokens)):
            if rng.random() < 0.2:
                tokens[place] = rng.randrange(self._vocab_size)
        spoiled = Draft(tuple(tokens), tuple(parents))
        return spoiled.select([place for place in range(len(spoiled)) if _is_only(spoiled, place)])

    def forget(self, sequence: Sequence) -> None:
        self._ngram.forget(sequence)


def _is_only(draft: Draft, place: int) -> bool:
    """Return whether no token on the path equals an earlier sibling."""
    while place != ROOT:
        same = (draft.parent(place), draft.token_ids[place])
        if same in {(draft.parent(i), draft.token_ids[i]) for i in range(place)}:
            return False
        place = draft.parent(place)
    return True
