"""Before a worker is ready: run its shapes once, time them, and test that bits are exact."""

from __future__ import annotations

from itertools import pairwise
from statistics import median
from typing import Final

import torch

from backends.core.sequence import Sequence
from backends.core.steps import SequenceWork, StepPlan
from backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE
from backends.engine.linear import ROW_TILE
from backends.engine.runner import Runner
from backends.types import GenerationRequest, SamplingParams
from policies.speculation import Off
from policies.step_cost import StepCost
from policies.types import RequestView, WorkerLoad

TOKEN_BUCKETS: Final = tuple(ROW_TILE * tiles for tiles in (1, 2, 3, 4, 6, 8, 12, 16))
"""Token counts that are timed: the padded sizes of verify steps."""

TIMED_RUNS: Final = 5
"""Runs of each shape; their median counts, because other processes disturb single ones."""

PROBE_VOCABULARY: Final = 32
"""Token ids below this are fed; every model has so many."""

PROBE_START: Final = KV_TILE - 40
PROBE_TOKENS: Final = 80
PROBE_WIDTHS: Final = (5, 16, 33, 80)
"""The probe compares one-by-one with blocks within, at, and over the row tile, across the border
of two KV tiles, and reads one of them from scattered blocks."""


def measure_step_cost(runner: Runner, max_tokens: int, max_sequences: int) -> StepCost:
    """Time verify steps of one sequence by tokens, and what each further sequence adds.

    Args:
        max_tokens: most tokens the KV pool can hold for one sequence.
        max_sequences: most sequences of a batch the pool has a block for.
    """
    buckets = [tokens for tokens in TOKEN_BUCKETS if tokens <= max_tokens] or [max_tokens]
    step_s: list[float] = []
    for tokens in buckets:
        measured_s = _time_s(runner, StepPlan((_verify(tokens),)))
        step_s.append(max(measured_s, *step_s[-1:]) if step_s else measured_s)
    many = min(ROW_TILE, max_sequences)
    sequence_s = 0.0
    if many > 1:
        batch = StepPlan(tuple(_verify(1, blocks=[index]) for index in range(many)))
        sequence_s = max(_time_s(runner, batch) - step_s[0], 0.0) / (many - 1)
    # The timed steps had one sequence each.
    table_s = tuple(max(seconds - sequence_s, 0.0) for seconds in step_s)
    return StepCost(tuple(buckets), table_s, sequence_s=sequence_s)


def measure_kv_token_s(runner: Runner, context_tokens: int) -> float:
    """Return the seconds by which each KV token read makes a decode longer."""
    near, far = (
        _time_s(runner, StepPlan((_verify(1, start=start),))) for start in (0, context_tokens)
    )
    return max(far - near, 0.0) / context_tokens


def rows_are_exact(runner: Runner, max_tokens: int) -> bool:
    """Return whether logits of tokens one by one equal those in blocks, bit for bit."""
    stop = min(PROBE_START + PROBE_TOKENS, max_tokens)
    blocks = list(range(-(-stop // BLOCK_TOKENS)))
    alone = _probe(runner, blocks, stop, 1)
    tables = [blocks] * (len(PROBE_WIDTHS) - 1) + [blocks[::-1]]
    return all(
        torch.equal(alone, _probe(runner, table, stop, width))
        for table, width in zip(tables, PROBE_WIDTHS, strict=True)
    )


def _probe(runner: Runner, blocks: list[int], stop: int, width: int) -> torch.Tensor:
    """Return the logits of the probed tokens, fed in steps of `width` behind one prefill."""
    first = min(PROBE_START, stop // 2)
    starts = [0, *range(first, stop, width)]
    steps = [
        _verify(end - start, start=start, blocks=blocks) for start, end in pairwise([*starts, stop])
    ]
    return torch.cat([runner.logits(StepPlan((work,))) for work in steps])[first:]


def _time_s(runner: Runner, plan: StepPlan) -> float:
    runner.execute(plan)  # first runs allocate and choose kernels
    return median(runner.execute(plan).step_s for _ in range(TIMED_RUNS))


def _verify(tokens: int, *, start: int = 0, blocks: list[int] | None = None) -> SequenceWork:
    """Return work that verifies `tokens - 1` arbitrary drafts, by default in the first blocks."""
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=0.0)
    view = RequestView(1, 1, 0.0)
    plan = Off().decide(view, WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ()))
    sequence = Sequence.of(0, GenerationRequest("warm-up", (0,), sampling, plan), 0)
    sequence.block_table = blocks or list(range(-(-(start + tokens) // BLOCK_TOKENS)))
    fed = tuple(position % PROBE_VOCABULARY for position in range(start, start + tokens))
    return SequenceWork(sequence, start, fed, tokens - 1, samples=True)
