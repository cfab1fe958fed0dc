"""Times a worker's steps before it serves requests, and tests that its bits are exact."""

from __future__ import annotations

import time
from collections.abc import Callable
from collections.abc import Sequence as Many
from dataclasses import replace
from functools import partial
from itertools import accumulate, pairwise
from typing import Final

import torch

from draftgate.backends.core.drafts import ROOT, Draft
from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork, StepPlan
from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.inputs import AttentionSpan, attention_inputs
from draftgate.backends.engine.kv_pool import BLOCK_TOKENS, KV_TILE
from draftgate.backends.engine.linear import padded_rows
from draftgate.backends.engine.numerics import CPU
from draftgate.backends.engine.operators.choose import operators_for
from draftgate.backends.engine.runner import ModelRunner
from draftgate.backends.token_ids import compact
from draftgate.backends.types import GenerationRequest, ResumedChoice, SamplingParams
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.baselines import Off
from draftgate.policies.types import RequestView, WorkerLoad

TOKEN_BUCKETS: Final = tuple(
    sorted(
        {padded_rows(n) for n in (4, 5, 6, 8, 10, 12, 16, 20, 24, 32, 48, 64, 96, 128, 192, 256)}
    )
)
"""Token counts of the timed steps: padded sizes of verify steps."""

UNPADDED_BUCKETS: Final = (
    *range(1, 9), 10, 12, 14, 16, 20, 24, 28, 32, 40, 48, 64, 96, 128, 192, 256,
)  # fmt: skip
"""Token counts of the timed steps without padding, where every further row costs time."""

TIMED_SLOTS: Final = 8
"""Draft slots of the step that times the attention of a slot."""

TIMED_SAMPLES: Final = 64
"""Sampled tokens of the step that times the cost of sampling one: a batch of 16 with drafts of
three. With AMX, the first 16 take less time than later ones, because products have tiles of 16
rows. (Chosen by that reasoning, 2026-11-28.)"""

TIMED_SEQUENCES: Final = 16
"""Sequences of the batch that times the cost of a sequence, enough to exceed the noise."""

TIMED_CONTEXT: Final = 2048
"""KV tokens of the step that times KV reads: eight tiles, enough to exceed the noise."""

DEPTH_BUCKETS: Final = (1, 4, 16, 64)
"""Batch sizes at which `measure_depths` times a draft."""

_TIMED_RUNS: Final = 5
"""Runs of each shape. The fastest run counts, because other processes only lengthen runs."""

TIMED_TEMPERATURE: Final = 1.0
"""Temperature of timed steps, the default of the API. A sampled row takes the shipped model 0.16 to
0.18 ms, and a greedy row 0.11 to 0.13 ms (16 to 64 rows, Zen 5, 2026-11-22). With greedy rows,
sampled slots seem too cheap, and `auto` verifies too many.
"""

_PROBE_VOCABULARY: Final = 32
"""Upper bound on the token ids in probed steps. Every model has at least this number of ids."""

TOKEN_STRIDE: Final = 7919
"""Distance of the ids of neighbouring tokens in timed steps, a prime number.

Equal tokens would choose the same experts of a mixture, and a step would seem to read fewer experts
than a step of a text does.
"""

PROBE_START: Final = KV_TILE - 24
PROBE_TOKENS: Final = 48
PROBE_WIDTHS: Final = (1, 5, 16, 33, 48)
"""Block widths of the probe: single tokens, and below, at and above the row tile.

The blocks cross the border of two KV tiles.
"""

PROBE_WINDOW: Final = 50
"""Length of the probed sliding windows in tokens. A model's own windows would need a long context.
"""


def measure_step_cost(
    runner: ModelRunner,
    max_tokens: int,
    max_sequences: int,
    token_buckets: tuple[int, ...] = TOKEN_BUCKETS,
    *,
    vocab_size: int = _PROBE_VOCABULARY,
) -> StepCost:
    """Time verify steps by tokens, sampled tokens, sequences, and KV tokens read.

    A sampled token needs its logits over the whole vocabulary. With a small model, the logits take
    longer than all layers: a draft slot of SmolLM2-135M takes 1.5 ms of a core, and a prompt token
    0.3 ms (bfloat16 with AMX, 2026-11-28). A table that does not separate the two predicts half of
    the time of a step with many slots after it has learned from prompts.

    The tokens of a step are spread over the vocabulary. In a mixture of experts, each further token
    therefore reads further experts, as in a text.

    Without the cost of KV reads, `auto` underestimates steps with long contexts. It then drafts too
    little where draft slots hardly lengthen a step.

    Args:
        runner: the runner to time.
        max_tokens: maximum tokens of one sequence in the KV pool.
        max_sequences: maximum sequences with one block each in the pool.
        token_buckets: token counts to time, ascending.
        vocab_size: number of token ids of the model.
    """
    verify = partial(_verify, vocabulary=vocab_size)
    buckets = [tokens for tokens in token_buckets if tokens <= max_tokens] or [max_tokens]
    samples = min(TIMED_SAMPLES, max_tokens)
    fed = [verify(tokens, wanted=1) for tokens in (*buckets, samples)]
    *measured_s, once_s, all_s = _times_s(
        runner, [StepPlan((work,)) for work in (*fed, verify(samples))]
    )
    sample_s = max(all_s - once_s, 0.0) / max(samples - 1, 1)
    step_s = list(accumulate(measured_s, max))
    many = min(TIMED_SEQUENCES, max_sequences, max_tokens)
    sequence_s = 0.0
    if many > 1:
        # Both steps have the same tokens.
        batch = StepPlan(tuple(verify(1, blocks=[index], first=index) for index in range(many)))
        alone = StepPlan((verify(many),))
        sequence_s = max(_time_s(runner, batch) - _time_s(runner, alone), 0.0) / (many - 1)
    # Each timed step had a single sequence, and sampled a single token.
    table_s = tuple(max(seconds - sequence_s - sample_s, 0.0) for seconds in step_s)
    context_tokens = min(TIMED_CONTEXT, max_tokens - TIMED_SLOTS - 1)
    kv_token_s, pair_s = _attention_s(runner, verify, context_tokens)
    return StepCost(tuple(buckets), table_s, kv_token_s, sequence_s, pair_s, sample_s)


def measure_depths(
    draft: Callable[[int], object], target: Callable[[], object], most: int
) -> StepCost:
    """Time drafting one more token per sequence for several numbers of sequences.

    A step of the target precedes each draft, as it does during serving. It evicts the draft model
    from the caches of a CPU, so a draft of one token takes 0.6 to 0.8 ms instead of 0.43 to 0.53 ms
    (shipped models, one core, Zen 4, 2026-11-22).

    Args:
        draft: drafts one token for this number of sequences.
        target: runs a step of the target with one token.
        most: maximum number of sequences.

    Returns:
        A step cost over sequences instead of tokens.
    """
    buckets = [count for count in DEPTH_BUCKETS if count < most] + [most]
    step_s: list[float] = []
    for count in buckets:
        draft(count)  # the first run allocates memory and selects kernels
        measured_s = min(_timed_s(draft, target, count) for _ in range(_TIMED_RUNS))
        step_s.append(max(measured_s, *step_s[-1:]) if step_s else measured_s)
    return StepCost(tuple(buckets), tuple(step_s))


def _timed_s(draft: Callable[[int], object], target: Callable[[], object], count: int) -> float:
    target()
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()
    started_s = time.perf_counter()
    draft(count)
    if torch.cuda.is_initialized():
        torch.cuda.synchronize()  # wait, because the draft may still be running
    return time.perf_counter() - started_s


def _attention_s(
    runner: ModelRunner, verify: Callable[..., SequenceWork], context_tokens: int
) -> tuple[float, float]:
    """Return `kv_token_s` and `pair_s` of the step cost, in seconds."""
    if context_tokens < 1:
        return 0.0, 0.0

    def longer_s(tokens: int) -> float:
        near, far = (
            _time_s(runner, StepPlan((verify(tokens, start=start, first=0),)))
            for start in (0, context_tokens)
        )
        return max(far - near, 0.0)

    decode_s, verify_s = longer_s(1), longer_s(1 + TIMED_SLOTS)
    slots_s = max(verify_s - decode_s, 0.0)
    return decode_s / context_tokens, slots_s / (TIMED_SLOTS * context_tokens)


def rehearse(runner: ModelRunner, tokens: int) -> None:
    """Run the most memory-intensive step of this size, which returns the logits of all tokens."""
    runner.execute(StepPlan((_verify(tokens),)))


def rehearse_tree(runner: ModelRunner) -> None:
    """Run a step that verifies a draft with two branches, so that its kernels are compiled."""
    work = _verify(3)
    branches = Draft(work.draft.token_ids, (ROOT, ROOT))
    runner.execute(StepPlan((replace(work, draft=branches),)))


def steps_are_exact(
    runner: ModelRunner,
    config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    max_tokens: int,
    device: torch.device = CPU,
) -> bool:
    """Return whether the bits of a token do not depend on the rest of its step."""
    windows = partial(windows_are_exact, config, dtype, kv_dtype, device)
    return rows_are_exact(runner, max_tokens) and windows()


def rows_are_exact(runner: ModelRunner, max_tokens: int) -> bool:
    """Return whether single-token steps and blocks of tokens give bit-identical logits.

    The test uses KV blocks that are contiguous, in two runs that meet within a tile, and scattered.
    """
    stop = min(PROBE_START + PROBE_TOKENS, max_tokens)
    first = max(stop - PROBE_TOKENS, 0)
    run = list(range(-(-stop // BLOCK_TOKENS)))
    half = len(run) // 2
    tables = (run, run[half:] + run[:half], run, run, run[::-1])
    feeds = [
        (table, [0, *range(first, stop, width), stop])
        for table, width in zip(tables, PROBE_WIDTHS, strict=True)
    ]
    alone, *others = (_probe(runner, *feed, first) for feed in [*feeds, (run, [0, stop])])
    return all(torch.equal(alone, other) for other in others)


def windows_are_exact(
    config: ModelConfig,
    dtype: torch.dtype,
    kv_dtype: torch.dtype,
    device: torch.device = CPU,
) -> bool:
    """Return whether single-token steps and blocks give bit-identical sliding-window attention."""
    if all(window is None for window in config.windows):
        return True
    probed = replace(config, windows=(PROBE_WINDOW,))
    operators = operators_for(probed, dtype, 1, device)
    random = torch.Generator().manual_seed(0)
    stop = PROBE_START + PROBE_TOKENS
    pages = range(-(-stop // BLOCK_TOKENS))
    shape = (2 * config.num_kv_heads, 2 * KV_TILE, config.head_dim)
    layer_kv = torch.randn(shape, generator=random).to(device, kv_dtype)
    shape = (padded_rows(stop), config.num_heads, config.head_dim)
    queries = torch.randn(shape, generator=random).to(device, dtype)

    def attended(width: int) -> torch.Tensor:
        rows = []
        for start in range(PROBE_START, stop, width):
            tokens = min(width, stop - start)
            span = AttentionSpan(tokens, start, pages)
            step = queries[start : start + padded_rows(tokens)]
            step_state = operators.begin(attention_inputs(span, len(step)).on(device))
            rows.append(operators.attend(step_state, step, layer_kv, PROBE_WINDOW)[:tokens])
        return torch.cat(rows)

    alone, *others = map(attended, PROBE_WIDTHS)
    return all(torch.equal(alone, other) for other in others)


def _probe(runner: ModelRunner, blocks: list[int], edges: list[int], first: int) -> torch.Tensor:
    """Return the logits of the positions from `first` on, computed in steps between the edges."""
    steps = [
        _verify(end - start, start=start, blocks=blocks, wanted=min(end - first, end - start))
        for start, end in pairwise(edges)
        if start < end
    ]
    return torch.cat([runner.logits(StepPlan((work,))) for work in steps])


def _times_s(runner: ModelRunner, plans: Many[StepPlan]) -> list[float]:
    """Return the seconds of each step. Rounds of all steps spread a disturbance over them."""
    for plan in plans:
        runner.execute(plan)  # the first run allocates memory and selects kernels
    rounds = [[runner.execute(plan).step_s for plan in plans] for _ in range(_TIMED_RUNS)]
    return [min(times_s) for times_s in zip(*rounds, strict=True)]


def _time_s(runner: ModelRunner, plan: StepPlan) -> float:
    return _times_s(runner, [plan])[0]


def _verify(
    tokens: int,
    *,
    start: int = 0,
    first: int | None = None,
    blocks: list[int] | None = None,
    wanted: int | None = None,
    vocabulary: int = _PROBE_VOCABULARY,
) -> SequenceWork:
    """Return work that verifies `tokens - 1` arbitrary draft tokens.

    Args:
        start: position of the first token.
        first: place of the first token in an arbitrary text. The default is `start`.
        blocks: block table. The default is the first blocks of the pool.
        wanted: number of rows at the end whose logits the step returns, or None for all rows.
        vocabulary: upper bound on the token ids.
    """
    sampling = SamplingParams(max_tokens=1, seed=0, temperature=TIMED_TEMPERATURE)
    view = RequestView(1, 1, TIMED_TEMPERATURE)
    plan = Off().decide(view, WorkerLoad(0, 0, 0, 0, 0.0, 0.0, ()))
    sequence = Sequence.for_choice(
        0, GenerationRequest("warm-up", compact((0,)), sampling, plan), ResumedChoice(0, ())
    )
    sequence.block_table.extend(blocks or range(-(-(start + tokens) // BLOCK_TOKENS)))
    first = start if first is None else first
    fed = tuple(place * TOKEN_STRIDE % vocabulary for place in range(first, first + tokens))
    wanted = tokens if wanted is None else wanted
    confirmed = tokens - max(wanted - 1, 0)
    return SequenceWork(sequence, start, fed[:confirmed], wanted > 0, Draft(fed[confirmed:]))
