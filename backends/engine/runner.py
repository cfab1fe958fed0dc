"""Turns a `StepPlan` into a `StepResult` on the device."""

from __future__ import annotations

import time

import torch
from torch import Tensor

from backends.core.steps import StepPlan, StepResult
from backends.engine.inputs import build_inputs
from backends.engine.kv_pool import KvPool
from backends.engine.model import Decoder
from backends.engine.sampler import emit, read_logprobs


class Runner:
    """Runs steps of one model over one KV pool. Use in one thread only."""

    def __init__(self, decoder: Decoder, pool: KvPool) -> None:
        """Keep both."""
        self._decoder = decoder
        self._pool = pool

    @torch.inference_mode()
    def execute(self, plan: StepPlan) -> StepResult:
        """Run one step: forward, sample, walk the drafts."""
        started_s = time.perf_counter()
        logits = self.logits(plan)
        emitted = emit(plan, logits)
        logprobs = read_logprobs(plan, logits, emitted)
        step_s = time.perf_counter() - started_s
        return StepResult(tuple(emitted), tuple(logprobs), step_s)

    @torch.inference_mode()
    def logits(self, plan: StepPlan) -> Tensor:
        """Run the forward pass alone; return float32 [sampling rows, vocab_size]."""
        return self._decoder.forward(build_inputs(plan, self._pool), self._pool)
