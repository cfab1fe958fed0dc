"""Runs a `StepPlan` on the device and returns its `StepResult`."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Final, Protocol

import torch
from torch import Tensor

from draftgate.backends.core.steps import Executor, StepLauncher, StepPlan, StepResult
from draftgate.backends.engine import logprobs, pooling, prompt_logprobs
from draftgate.backends.engine.inputs import (
    Feed,
    build_inputs,
    feed_of,
    lay_out_plan,
    padded,
    slots_of,
)
from draftgate.backends.engine.kv_pool import KvPool
from draftgate.backends.engine.logits import adjust, forbid
from draftgate.backends.engine.logprobs import StepLogprobs
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.prompt_logprobs import ScoredChunk
from draftgate.backends.engine.sampler import Verify, Walks, draw_tokens, walk_drafts


@dataclass(frozen=True, slots=True)
class LaunchedStep:
    """A launched step, whose results the device may still be computing.

    Attributes:
        tokens: int64 [sampling rows], the token of each row.
        logprobs: log probabilities of the parts that request them, None if no part does.
        started_s: `time.perf_counter` after the host has packed the inputs.
        pooled: the pooled rows of the plan (`pooling.select_pooled`).
        scored: one chunk for each entry of `StepPlan.scored`.
    """

    plan: StepPlan
    tokens: Tensor
    logprobs: StepLogprobs | None
    started_s: float
    pooled: Tensor | None = None
    scored: tuple[ScoredChunk, ...] = ()


class ModelRunner(Executor, Protocol):
    """The interface of a runner for loading, warming up and a worker's loop."""

    @property
    def launcher(self) -> StepLauncher | None:
        """The launcher of asynchronous steps, None if the device is synchronous."""
        ...

    def logits(self, plan: StepPlan) -> Tensor:
        """Return the logits of a forward pass alone: float32 [sampling rows, vocab_size]."""
        ...

    def forward(self, feeds: Iterable[Feed]) -> Tensor:
        """Return the logits of a forward pass over feeds: float32 [sampled rows, vocab_size]."""
        ...


class Runner:
    """Runs steps of a model over a KV pool. Only one thread may use a runner."""

    launcher: Final = None

    def __init__(self, decoder: Decoder, pool: KvPool, verify: Verify = "coupled") -> None:
        self._decoder = decoder
        self._pool = pool
        self._verify = verify
        self._eos_ids = decoder.config.known_eos_ids

    def execute(self, plan: StepPlan) -> StepResult:
        """Run a step and return its result."""
        return self.fetch(self.launch(plan))

    @torch.inference_mode()
    def launch(self, plan: StepPlan) -> LaunchedStep:
        """Enqueue the forward pass, sampling and log probabilities of a step.

        The method does not wait for results.
        """
        hidden_rows = pooling.rows_to_pool(plan) + prompt_logprobs.rows_to_score(plan)
        inputs = padded(
            lay_out_plan(plan), self._pool.dump_slot, hidden_rows, self._decoder.padded_rows
        )
        started_s = time.perf_counter()
        hidden = self._decoder.last_hidden(inputs, self._pool.layers)
        logits = self._decoder.sampled_logits(hidden, inputs.num_samples)
        pooled = pooling.select_pooled(hidden, inputs.num_samples, len(plan.pooled))
        scored = prompt_logprobs.score_rows(plan, hidden, inputs.num_samples, self._decoder.logits)
        if plan.is_plain:
            tokens = draw_tokens(plan, logits, self._verify)
            return LaunchedStep(plan, tokens, None, started_s, pooled, scored)
        wanted = logprobs.model_logprobs(plan, logits)
        forbid(plan, logits)
        adjust(plan, logits, self._eos_ids)
        tokens = draw_tokens(plan, logits, self._verify)
        found = logprobs.row_logprobs(plan, wanted, tokens)
        return LaunchedStep(plan, tokens, found, started_s, pooled, scored)

    def fetch(self, step: LaunchedStep) -> StepResult:
        """Wait for a launched step, walk its drafts, and return the result.

        Only this method waits for the device.
        """
        walks = walk_drafts(step.plan, step.tokens.tolist())
        self._compact(step.plan, walks)
        found = logprobs.emitted_logprobs(step.logprobs, walks)
        pooled = pooling.pooled_bytes(step.pooled)
        scored = prompt_logprobs.packed_chunks(step.scored)
        step_s = time.perf_counter() - step.started_s
        return StepResult(walks.emitted, walks.accepted, found, step_s, pooled, scored)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Return the logits of a forward pass alone: float32 [sampling rows, vocab_size]."""
        return self.forward(map(feed_of, plan.work))

    @torch.inference_mode()
    def forward(self, feeds: Iterable[Feed]) -> Tensor:
        """Return the logits of a forward pass over feeds: float32 [sampled rows, vocab_size]."""
        inputs = build_inputs(feeds, self._pool.dump_slot, rows_of=self._decoder.padded_rows)
        return self._decoder.forward(inputs, self._pool.layers)

    def _compact(self, plan: StepPlan, walks: Walks) -> None:
        """Move the keys and values of accepted paths to the slots of their positions."""
        sources: list[int] = []
        targets: list[int] = []
        for work, path in zip(plan.work, walks.accepted, strict=True):
            if work.draft.is_chain or not work.sequence.block_table:
                # A chain needs no move. An empty block table means that the sequence was cancelled
                # during the step, and its blocks may have a new owner.
                continue
            moved = [(place, depth) for depth, place in enumerate(path) if place != depth]
            table, end = work.sequence.block_table, work.confirmed_end
            sources += slots_of(table, (end + place for place, _ in moved))
            targets += slots_of(table, (end + depth for _, depth in moved))
        if sources:
            self._pool.move(sources, targets)
