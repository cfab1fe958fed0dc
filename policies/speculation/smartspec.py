"""`smartspec`: one draft length for the whole batch, the one of the best goodput.

Liu et al., "Optimizing Speculative Decoding for Serving Large Language Models Using Goodput"
(arXiv 2406.14066), by the rules of its code for vLLM V1: every proposing sequence is expected to
get (1 - a^(k+1)) / (1 - a) tokens with one acceptance a for all, others 1; lengths are tried from 0
on until goodput drops.

Two things are kinder than the code: k is chosen anew in each step instead of every 200th, and a is
the running chance of a token that was put to the test (the code divides accepted by drafted tokens,
so that positions behind a rejection count as failures). Drafting has the cost measured here instead
of a constant share of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.planning import MAX_DRAFT_TOKENS, plan_up_to, within_budget
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad


@dataclass(frozen=True, slots=True)
class SmartSpec:
    """One length for all by goodput."""

    max_draft_tokens: int = MAX_DRAFT_TOKENS
    name: str = "smartspec"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Leave it to the steps."""
        reason = "up to {cap} draft tokens, the same for all by goodput"
        return plan_up_to(self.name, self.max_draft_tokens, request, load, reason)

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Look at every offer."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Return min(k, what is offered) for the k behind which goodput drops first."""
        longest = max((c.max_draft_tokens for c in step.candidates), default=0)
        best, best_goodput = within_budget([0] * len(step.candidates), 0), 0.0
        for k in range(longest + 1):
            wanted = [min(k, c.max_draft_tokens) for c in step.candidates]
            lengths = within_budget(wanted, step.slot_budget)
            goodput = _goodput(step, cost, lengths)
            if goodput < best_goodput:
                break
            best, best_goodput = lengths, goodput
        return best


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
