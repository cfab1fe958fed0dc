"""Speculation policies of other engines, as baselines for `auto`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.plan_reason import PlanCause
from draftgate.policies.speculation.planning import (
    MAX_DRAFT_TOKENS,
    no_speculation,
    plan_up_to,
    unweighted,
    within_budget,
)
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

MOST_FIXED: Final = 64
"""Maximum draft length of `fixed:K`: the number of slots in a verify tile of a GPU kernel."""


class _AllDrafts:
    """A policy that receives every draft, whatever it is worth."""

    __slots__ = ()

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        del step, cost
        return None


@dataclass(frozen=True, slots=True)
class Off(_AllDrafts):
    """`off`: never speculate. Lookups still run, to learn what speculation would gain."""

    name: str = "off"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        del load
        return no_speculation(self.name, request, PlanCause.SERVER_OFF)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        del cost
        return [0] * len(step.candidates)


@dataclass(frozen=True, slots=True)
class Fixed(_AllDrafts):
    """`fixed:K`: draft up to K tokens in every step, whatever the load.

    This is the default of other engines: vLLM's `num_speculative_tokens` and TensorRT-LLM's
    `max_draft_len`.

    Raises:
        ValueError: K is not from 1 to `MOST_FIXED`.
    """

    draft_tokens: int

    def __post_init__(self) -> None:
        if not 1 <= self.draft_tokens <= MOST_FIXED:
            raise ValueError(f"fixed:K needs K from 1 to {MOST_FIXED}, not {self.draft_tokens}")

    @property
    def name(self) -> str:
        return f"fixed:{self.draft_tokens}"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        cause = PlanCause.FIXED_LENGTH
        return plan_up_to(self.name, self.draft_tokens, request, load, cause)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        del cost
        return _equal_lengths(step, self.draft_tokens)


@dataclass(frozen=True, slots=True)
class ThresholdByBatch(_AllDrafts):
    """`threshold_by_batch:FILE`: draft lengths by batch size, from a user's table.

    The policy follows vLLM's `num_speculative_tokens_per_batch_size` (pull request 32374).

    Attributes:
        name: `threshold_by_batch:FILE`.
        table: rows (first batch size, last batch size, draft tokens). The first row that contains a
            batch size decides. Without a matching row, the worker drafts nothing.

    Raises:
        ValueError: the table is empty, or a row is not a range of batch sizes with a length.
    """

    name: str
    table: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        if not self.table:
            raise ValueError("the table of draft lengths by batch size is empty")
        for first, last, length in self.table:
            if not (1 <= first <= last and 0 <= length <= MOST_FIXED):
                raise ValueError(
                    f"[{first}, {last}, {length}] is not a row [first batch size, last batch size, "
                    f"draft tokens up to {MOST_FIXED}]"
                )

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        # The batch may have another size when the request decodes, so the plan allows the longest
        # draft.
        longest = max(length for _, _, length in self.table)
        return plan_up_to(self.name, longest, request, load, PlanCause.BATCH_TABLE)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        del cost
        rows = (length for first, last, length in self.table if first <= step.sequences <= last)
        return _equal_lengths(step, next(rows, 0))


@dataclass(frozen=True, slots=True)
class SmartSpec(_AllDrafts):
    """`smartspec`: the draft length with the best goodput, for the whole batch.

    The policy follows SmartSpec (Liu et al., arXiv 2406.14066), with the rules of its code for vLLM
    V1. A single acceptance a applies to all drafts. Every drafting sequence is expected to get (1 -
    a^(k+1)) / (1 - a) tokens, and any other sequence 1. Lengths are tried from 0 until goodput
    drops.

    Three differences favour this policy over that code. It chooses the length in each step instead
    of every 200th. Its acceptance counts verified tokens only, whereas the code counts positions
    after a rejection as failures. Drafting has its measured cost instead of a constant share of the
    step.
    """

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "smartspec"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        cause = PlanCause.BATCH_GOODPUT
        return plan_up_to(self.name, self.max_draft_tokens, request, load, cause)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        longest = max((c.max_draft_tokens for c in step.candidates), default=0)
        best, best_goodput = [0] * len(step.candidates), 0.0
        for k in range(longest + 1):
            lengths = _equal_lengths(step, k)
            goodput = _goodput(step, cost, lengths)
            if goodput < best_goodput:
                break
            best, best_goodput = lengths, goodput
        return best


@dataclass(frozen=True, slots=True)
class AdaptiveVerification(_AllDrafts):
    """`adaptive_verification`: draft as deep as possible, then verify the likeliest slots.

    In vLLM's adaptive verification (pull requests 47808 and 52228), all sequences draft their full
    length. The step then verifies B* = argmax (sampling sequences + sum of the B largest survivals)
    / T(tokens + B) slots. The cost of drafting and the weights of sequences do not count. Survivals
    are the worker's calibrated values, which favours this policy over the original.
    """

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "adaptive_verification"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        cause = PlanCause.LIKELIEST_SLOTS
        return plan_up_to(self.name, self.max_draft_tokens, request, load, cause)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        # The worker calls this method twice for computed drafts: for their depths, then for the
        # slots.
        if any(candidate.depth_s > 0.0 for candidate in step.candidates):
            return _equal_lengths(step, max(c.max_draft_tokens for c in step.candidates))
        return allocate(replace(unweighted(step), prefill_tokens=0), cost)


def _equal_lengths(step: StepView, length: int) -> list[int]:
    """Return drafts of equal length, as far as candidates and budget allow."""
    wanted = [min(length, candidate.max_draft_tokens) for candidate in step.candidates]
    return within_budget(wanted, step.slot_budget)


def _goodput(step: StepView, cost: StepCost, lengths: Sequence[int]) -> float:
    """Return the expected tokens per second of a step with these drafts."""
    acceptance = min(step.acceptance, 1.0 - 1e-6)
    expected = sum((1 - acceptance ** (length + 1)) / (1 - acceptance) for length in lengths)
    tokens = step.sequences - len(lengths) + expected
    slots = sum(lengths)
    step_s = cost.seconds(step.tokens + slots, step.kv_tokens, step.sequences, slots)
    depths: dict[float, int] = {}
    for candidate, length in zip(step.candidates, lengths, strict=True):
        depths[candidate.depth_s] = max(length, depths.get(candidate.depth_s, 0))
    draft_s = sum(depth_s * depth for depth_s, depth in depths.items())
    return tokens / max(step_s + draft_s, 1e-9)
