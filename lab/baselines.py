"""Policies of other engines, with which studies compare those of Draftgate.

They are registered by entry points, so every command that takes a policy knows their names.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.registry import without_argument
from draftgate.policies.speculation.allocation import allocate
from draftgate.policies.speculation.baselines import AllDrafts, equal_lengths
from draftgate.policies.speculation.plan_reason import PlanCause
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS, plan_up_to, unweighted
from draftgate.policies.types import BatchView, RequestView, SpeculationPlan, StepView, WorkerLoad


@dataclass(frozen=True, slots=True)
class SmartSpec(AllDrafts):
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
            lengths = equal_lengths(step, k)
            goodput = _goodput(step, cost, lengths)
            if goodput < best_goodput:
                break
            best, best_goodput = lengths, goodput
        return best


@dataclass(frozen=True, slots=True)
class AdaptiveVerification(AllDrafts):
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
            return equal_lengths(step, max(c.max_draft_tokens for c in step.candidates))
        return allocate(replace(unweighted(step), prefill_tokens=0), cost)


@dataclass(frozen=True, slots=True)
class PrefillFirst:
    """`prefill_first`: compute whole prompts before decodes, as vLLM did before chunked prefill."""

    name: str = "prefill_first"
    stalls_decodes: bool = True

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        del cost
        return max(0, batch.most_prefill_tokens)


@dataclass(frozen=True, slots=True)
class DecodeFirst:
    """`decode_first`: compute no prompt until every decode has ended, as FasterTransformer did."""

    name: str = "decode_first"
    stalls_decodes: bool = False

    def prefill_tokens(self, batch: BatchView, cost: StepCost) -> int:
        del cost
        return 0 if batch.sequences else max(0, batch.most_prefill_tokens)


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


smartspec: Final = without_argument(SmartSpec)
adaptive_verification: Final = without_argument(AdaptiveVerification)
prefill_first: Final = without_argument(PrefillFirst)
decode_first: Final = without_argument(DecodeFirst)
