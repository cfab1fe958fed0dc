"""The run of a worker in a recording: the calls of its scheduler and what its decisions read.

The scheduler has no clock and no device. Its calls, the measured seconds of its steps, and the
predictions of its proposers therefore determine every step. A replay of the calls makes the same
decisions from the same values, without the text.

Requests are numbered from 0 in order of arrival, where each choice counts as a request.
"""

from __future__ import annotations

from typing import Final

import msgspec

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import ANYTIME, Pace, ServiceLevel, SpeculationPlan

TICKS_PER_S: Final = 1 << 20
"""Ticks per second of recorded times. A tick is a power of two, so differences between times are
exact in floating point, wherever the clock starts. A replay thus computes the same differences from
times that start at 0."""


def ticks_at(seconds: float) -> int:
    """Return a time in whole ticks."""
    return int(seconds * TICKS_PER_S)


def seconds_at(ticks: int) -> float:
    """Return a time in seconds, exactly."""
    return ticks / TICKS_PER_S


class RecordedCost(msgspec.Struct, frozen=True, omit_defaults=True):
    """Step costs in a file; see `policies.costs.step_cost.StepCost`."""

    token_buckets: tuple[int, ...]
    step_s: tuple[float, ...]
    kv_token_s: float = 0.0
    sequence_s: float = 0.0
    pair_s: float = 0.0
    sample_s: float = 0.0

    @classmethod
    def from_cost(cls, cost: StepCost) -> RecordedCost:
        """Return the form of step costs."""
        linear_s = cost.kv_token_s, cost.sequence_s, cost.pair_s, cost.sample_s
        # A fitted table contains NumPy numbers.
        return cls(cost.token_buckets, tuple(map(float, cost.step_s)), *map(float, linear_s))

    @property
    def cost(self) -> StepCost:
        """The step costs.

        Raises:
            ValueError: the table is damaged.
        """
        return StepCost(**msgspec.structs.asdict(self))


class RecordedWorker(msgspec.Struct, frozen=True, omit_defaults=True):
    """A worker at the start of its run.

    Attributes:
        speculation, batching: names of its policies.
        proposers: names of its proposers, cheapest first.
        computing: names of the proposers that compute drafts, instead of looking them up.
        max_num_seqs, max_step_tokens: limits of a step.
        blocks, block_tokens: number of its KV blocks, and tokens per block.
        cost: step costs before the first step.
        first_text: `Text.prompt` of its first request.
    """

    speculation: str
    batching: str
    proposers: tuple[str, ...]
    computing: tuple[str, ...]
    max_num_seqs: int
    max_step_tokens: int
    blocks: int
    block_tokens: int
    cost: RecordedCost
    first_text: int = 0


class RecordedRequest(msgspec.Struct, frozen=True, omit_defaults=True):
    """A request, as far as decisions read it.

    Attributes:
        prompt_tokens: length of the prompt.
        max_tokens: maximum number of output tokens.
        temperature: sampling temperature.
        plan: speculation plan, with the values from which the gateway made it.
        service: latency targets and priority.
        counts_tokens: whether a penalty or a bad word reads earlier tokens.
    """

    prompt_tokens: int
    max_tokens: int
    temperature: float
    plan: SpeculationPlan
    service: ServiceLevel = ANYTIME
    counts_tokens: bool = False


class Arrived(msgspec.Struct, frozen=True, array_like=True, tag="arrive"):
    """A request joins the queue. `ticks` is the time of its arrival."""

    ticks: int
    request: RecordedRequest


class Planned(msgspec.Struct, frozen=True, array_like=True, tag="plan"):
    """A step is planned, or the worker is idle.

    Attributes:
        ticks: time of the call.
        work: request, number of fed tokens and number of draft tokens, for each part of the step.
        predictions: seconds that computing proposers predicted during the call, in order.
        silent: indices of the drafts that computing proposers did not make, although they were
            called, among all of their drafts of the call.
        ahead: whether the result of the previous step was unknown.
    """

    ticks: int
    work: tuple[tuple[int, int, int], ...]
    predictions: tuple[float, ...] = ()
    silent: tuple[int, ...] = ()
    ahead: bool = False


class Applied(msgspec.Struct, frozen=True, array_like=True, tag="apply"):
    """The result of a step.

    Attributes:
        ticks: end of the step.
        step_s: its measured seconds.
        emitted: number of new tokens for each request that decodes.
    """

    ticks: int
    step_s: float
    emitted: tuple[int, ...]


class Ended(msgspec.Struct, frozen=True, array_like=True, tag="end"):
    """A request has ended, or the server has stopped.

    Attributes:
        output_tokens: length of its output.
        stopped: whether an end-of-sequence token ended it.
        blocks: the full KV blocks of prompt and output, as pairs of a number and a length, for runs
            of consecutive numbers. Blocks with the same tokens before their end have one number.
    """

    request: int
    output_tokens: int
    stopped: bool
    blocks: tuple[tuple[int, int], ...]


class Cancelled(msgspec.Struct, frozen=True, array_like=True, tag="cancel"):
    """A client disconnects."""

    request: int


class Paced(msgspec.Struct, frozen=True, array_like=True, tag="pace"):
    """The pace of a request changes, because its client reads slowly or catches up.

    Attributes:
        tpot_s: seconds in which the client can take one token of each choice, or 0 if unknown.
    """

    request: int
    pace: Pace
    tpot_s: float = 0.0


class Evicted(msgspec.Struct, frozen=True, array_like=True, tag="evict"):
    """Cached KV blocks are evicted while a draft model borrows blocks.

    Attributes:
        operation: number of operations on the blocks so far (`core.recorded_blocks`).
        blocks: number of evicted blocks.
    """

    operation: int
    blocks: int


Call = Arrived | Planned | Applied | Ended | Cancelled | Paced | Evicted
"""A call of the scheduler, the end of a request, or an eviction."""
