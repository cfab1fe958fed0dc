"""A simulated worker that computes steps from totals, cheap enough for a thousand workers.

The simulated worker of `backends.sim` plans each step with all its sequences: blocks, drafts,
tokens and text. 1,000 workers run about 40,000 steps a second, so this model keeps totals instead.
A step takes constant time, except for the prompts that join it and the sequences that end. Steps in
which nothing else changes are planned together.

The model uses the step costs, the batching policy and the speed estimates of the production worker.
Like its scheduler, it admits sequences in order of arrival when their tokens fit into memory, and
preempts the youngest sequence when memory is full. It has no prefix cache, no drafts and no noise.
A sequence takes the memory of its tokens and of half a block. `tests/bench/test_batch_model.py`
compares both workers.
"""

from __future__ import annotations

import math
from bisect import insort
from collections import deque
from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum, auto
from heapq import heappop, heappush
from operator import attrgetter
from typing import Final, NamedTuple

from draftgate.policies.batching import Slack
from draftgate.policies.costs.speed import SpeedMeter
from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import BatchView, WorkerLoad

BLOCK_TOKENS: Final = 16

_PART_BLOCK: Final = BLOCK_TOKENS // 2
"""Mean number of unused tokens in the last block of a sequence."""

_BATCHING: Final = Slack()
_BY_KEY: Final = attrgetter("key")


@dataclass(frozen=True, slots=True)
class BatchLimits:
    """The device and the limits of a worker.

    Attributes:
        cost: step costs.
        memory_tokens: number of tokens that the KV memory holds.
        max_sequences: maximum number of running sequences.
        step_tokens: maximum number of tokens in a step.
    """

    cost: StepCost
    memory_tokens: int
    max_sequences: int = 256
    step_tokens: int = 512


class State(Enum):
    """The state of a sequence."""

    WAITING = auto()
    PREFILL = auto()
    DECODE = auto()
    PAUSED = auto()
    ENDED = auto()


@dataclass(eq=False, slots=True)
class BatchSequence:
    """A sequence of a worker.

    Attributes:
        key: number of the sequence, ascending with arrival.
        prompt: tokens of the prompt, with the output of an earlier worker.
        output: tokens to generate.
        cached: leading tokens of the prompt that need no computation.
        queued_s: time of its arrival in seconds.
        urgent: whether its priority class is above the usual one.
        scheduled_s: time of its first step, or None before.
        kept: output tokens at the start of its present state.
        pending: tokens to compute before the next output token, in `State.PREFILL`.
        since_step: number of steps of the worker at the start of `State.DECODE`.
        preemptions: number of preemptions.
    """

    key: int
    prompt: int
    output: int
    cached: int = 0
    queued_s: float = 0.0
    urgent: bool = False
    scheduled_s: float | None = None
    kept: int = 0
    pending: int = 0
    since_step: int = 0
    preemptions: int = 0
    state: State = State.WAITING

    @property
    def context(self) -> int:
        """Tokens of prompt and output at the start of its present state."""
        return self.prompt + self.kept


class StepEnd(NamedTuple):
    """The sequences that a step has changed.

    Attributes:
        first: sequences with their first token.
        ended: sequences that have all their tokens.
    """

    first: list[BatchSequence]
    ended: list[BatchSequence]


class _Run(NamedTuple):
    """Steps that were planned together, of equal time."""

    begun_s: float
    step_s: float
    steps: int


class BatchWorker:
    """The queue, the batch and the memory of a worker.

    Calls of `plan` and `complete` alternate while the worker has work. Sequences may join, pause
    and leave between any two calls.

    Attributes:
        decoding: sequences that get a token in each step, by key.
        steps: number of steps that have ended.
    """

    def __init__(self, limits: BatchLimits) -> None:
        """Start empty."""
        self.decoding: dict[int, BatchSequence] = {}
        self.steps = 0
        self._limits = limits
        self._waiting: list[BatchSequence] = []  # by key
        self._prefilling = deque[BatchSequence]()
        self._ends: list[tuple[int, int]] = []  # last step and key of decodes, a heap
        self._kv_tokens = self._prefill_tokens = 0  # in the memory of decodes, and of prefills
        self._chunks: list[tuple[BatchSequence, int]] = []  # of the step under way
        self._run = _Run(0.0, 0.0, 1)
        self._urgent = 0
        self._meter = SpeedMeter(limits.cost, limits.step_tokens)

    def add(self, sequence: BatchSequence) -> None:
        """Queue a sequence."""
        sequence.state = State.WAITING
        self._urgent += sequence.urgent
        insort(self._waiting, sequence, key=_BY_KEY)

    def remove(self, sequence: BatchSequence, state: State = State.ENDED) -> None:
        """Take a sequence out of the worker, unless it has ended, and free its memory."""
        if sequence.state is State.ENDED:
            return
        if sequence.state is not State.PAUSED:
            self._urgent -= sequence.urgent
        if sequence.state is State.DECODE:
            sequence.kept = self.generated(sequence)
            self._kv_tokens -= sequence.context
            del self.decoding[sequence.key]
        elif sequence.state is State.PREFILL:
            self._prefill_tokens -= sequence.context
            self._prefilling.remove(sequence)
        elif sequence.state is State.WAITING:
            self._waiting.remove(sequence)
        sequence.state = state

    def pause(self, sequence: BatchSequence) -> None:
        """Take a sequence out of the batch until `resume`."""
        self.remove(sequence, State.PAUSED)

    def resume(self, sequence: BatchSequence) -> None:
        """Queue a paused sequence again, whose full blocks are still cached."""
        if sequence.state is State.PAUSED:
            sequence.cached = sequence.context - sequence.context % BLOCK_TOKENS
            self.add(sequence)

    def generated(self, sequence: BatchSequence) -> int:
        """Return the output tokens of a sequence so far."""
        decodes = sequence.state is State.DECODE
        return sequence.kept + (self.steps - sequence.since_step if decodes else 0)

    def load(self) -> WorkerLoad:
        """Return the load of the worker in the form of the production scheduler."""
        limits, waiting = self._limits, self._waiting
        prompts = sum([one.pending for one in self._prefilling])
        return WorkerLoad(
            running=self._running,
            waiting=len(waiting),
            kv_blocks_free=max(self._free_tokens, 0) // BLOCK_TOKENS,
            kv_blocks_total=limits.memory_tokens // BLOCK_TOKENS,
            price=0.0,
            acceptance=0.0,
            proposers=(),
            max_sequences=limits.max_sequences,
            prompt_tokens=prompts + sum([one.context for one in waiting]),
            step_tokens=limits.step_tokens,
            kv_block_tokens=BLOCK_TOKENS,
            speed=self._meter.speed(limits.cost, len(self.decoding), self._kv_tokens),
            steps=self.steps,
            head_tokens=waiting[0].context if waiting else 0,
            urgent=self._urgent,
        )

    def plan(self, now_s: float, most_s: float = 0.0) -> float | None:
        """Begin a step, and return its seconds, or None without work.

        Args:
            most_s: time in which further steps that only decode may begin. They belong to the
                result and to the next call of `complete`. Call `cut` before any change meanwhile.
        """
        self._meter.begin_step(now_s)
        self._preempt()
        cost, decodes = self._limits.cost, len(self.decoding)
        tokens, kv_tokens, pairs = decodes, self._kv_tokens, 0.0
        if self._prefilling or self._waiting:
            self._chunks = list(self._fill(decodes, now_s))
            for one, chunk in self._chunks:
                known = one.context - one.pending
                tokens, kv_tokens = tokens + chunk, kv_tokens + known + chunk
                pairs += (chunk - 1) * (known + chunk / 2)  # as `StepSize.pairs` counts them
        if not tokens:
            self._meter.record_idle()
            return None
        self._meter.record_step(decodes, decodes, tokens - decodes)
        step_s = cost.seconds(tokens, kv_tokens, decodes + len(self._chunks)) + cost.pair_s * pairs
        steps = 1
        if most_s > step_s and not self._chunks:
            until_end, until_full = self._ends[0][0] - self.steps, self._free_tokens // decodes + 1
            steps = max(min(math.ceil(most_s / step_s), until_end, until_full), 1)
            step_s = cost.seconds(tokens, kv_tokens + decodes * (steps - 1) // 2, decodes)
        self._run = _Run(now_s, step_s, steps)
        return step_s * steps

    def cut(self, now_s: float) -> float | None:
        """Plan no further step after the one under way, and return its end.

        Returns:
            None if the end remains as planned.
        """
        run = self._run
        if run.steps == 1:
            return None
        done = max(min(int((now_s - run.begun_s) / run.step_s), run.steps - 1), 0)
        self._decode(done)
        self._run = _Run(run.begun_s + done * run.step_s, run.step_s, 1)
        return self._run.begun_s + run.step_s

    def _decode(self, steps: int) -> None:
        """Account for the first steps of a run. The meter has seen the plan of the first one."""
        decodes, run = len(self.decoding), self._run
        for number in range(1, steps + 1):
            self._meter.begin_step(run.begun_s + number * run.step_s)
            self._meter.record_step(decodes, decodes, 0)
        self.steps += steps
        self._kv_tokens += steps * decodes

    def complete(self) -> StepEnd:
        """End the step under way, or all steps that were planned together."""
        self._decode(self._run.steps - 1)
        self.steps += 1
        self._kv_tokens += len(self.decoding)
        found = StepEnd([], [])
        for one, chunk in self._chunks:
            if one.state is not State.PREFILL:
                continue  # it has left meanwhile
            one.pending -= chunk
            if not one.pending:
                self._begin_decode(one)
                if not one.kept:
                    found.first.append(one)
        self._chunks = []
        while self._ends and self._ends[0][0] <= self.steps:
            _, key = heappop(self._ends)
            ended = self.decoding.get(key)
            # An entry of an earlier decode of the sequence, before a pause, may remain.
            if ended is not None and self.generated(ended) >= ended.output:
                self.remove(ended)
                found.ended.append(ended)
        return found

    @property
    def _running(self) -> int:
        return len(self.decoding) + len(self._prefilling)

    @property
    def _free_tokens(self) -> int:
        used = self._kv_tokens + self._prefill_tokens + _PART_BLOCK * self._running
        return self._limits.memory_tokens - used

    def _fill(self, decodes: int, now_s: float) -> Iterator[tuple[BatchSequence, int]]:
        """Yield the prompt chunks of the step, and admit sequences that fit into memory."""
        budget = self._prompt_budget(decodes)
        for one in self._prefilling:
            if budget <= 0:
                return
            chunk = min(one.pending, budget)
            budget -= chunk
            yield one, chunk
        while budget > 0 and self._waiting and self._running < self._limits.max_sequences:
            one = self._waiting[0]
            if one.context + _PART_BLOCK > self._free_tokens:
                return
            del self._waiting[0]
            self._admit(one, now_s)
            chunk = min(one.pending, budget)
            budget -= chunk
            yield one, chunk

    def _prompt_budget(self, decodes: int) -> int:
        """Return how many prompt tokens the batching policy lets join the decodes."""
        known = 0
        if self._prefilling:
            known = self._prefilling[0].context - self._prefilling[0].pending
        budget = self._limits.step_tokens - decodes
        view = BatchView(decodes, self._kv_tokens, decodes, budget, known)
        return _BATCHING.prefill_tokens(view, self._limits.cost)

    def _admit(self, one: BatchSequence, now_s: float) -> None:
        one.state, one.pending = State.PREFILL, max(one.context - one.cached, 1)
        if one.scheduled_s is None:
            one.scheduled_s = now_s
        self._prefill_tokens += one.context
        self._prefilling.append(one)

    def _begin_decode(self, one: BatchSequence) -> None:
        """Count the token that the last chunk of a prompt has generated."""
        self._prefilling.remove(one)
        self._prefill_tokens -= one.context
        one.state, one.since_step = State.DECODE, self.steps - 1
        self.decoding[one.key] = one
        self._kv_tokens += one.context + 1
        heappush(self._ends, (one.since_step + one.output - one.kept, one.key))

    def _preempt(self) -> None:
        """Preempt the youngest sequences until the others fit into memory."""
        while self._free_tokens < 0 and self._running > 1:
            youngest = max((*self.decoding.values(), *self._prefilling), key=_BY_KEY)
            self.remove(youngest, State.WAITING)
            youngest.preemptions += 1
            youngest.cached = 0
            self.add(youngest)
