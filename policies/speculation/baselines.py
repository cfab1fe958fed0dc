"""Speculation policies that follow the settings of other engines, whatever a draft is worth."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.plan_reason import PlanCause
from draftgate.policies.speculation.planning import no_speculation, plan_up_to, within_budget
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad

MOST_FIXED: Final = 64
"""Maximum draft length of `fixed:K`: the number of slots in a verify tile of a GPU kernel."""


class AllDrafts:
    """A policy that receives every draft, whatever it is worth."""

    __slots__ = ()

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        del step, cost
        return None


@dataclass(frozen=True, slots=True)
class Off(AllDrafts):
    """`off`: never speculate. Lookups still run, to learn what speculation would gain."""

    name: str = "off"

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        del load
        return no_speculation(self.name, request, PlanCause.SERVER_OFF)

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        del cost
        return [0] * len(step.candidates)


@dataclass(frozen=True, slots=True)
class Fixed(AllDrafts):
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
        return equal_lengths(step, self.draft_tokens)


@dataclass(frozen=True, slots=True)
class ThresholdByBatch(AllDrafts):
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
        return equal_lengths(step, next(rows, 0))


def equal_lengths(step: StepView, length: int) -> list[int]:
    """Return drafts of equal length, as far as candidates and budget allow."""
    wanted = [min(length, candidate.max_draft_tokens) for candidate in step.candidates]
    return within_budget(wanted, step.slot_budget)
