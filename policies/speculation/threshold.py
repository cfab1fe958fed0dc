"""`threshold_by_batch:FILE`: draft lengths by batch size, from a table that a user writes.

vLLM's `num_speculative_tokens_per_batch_size` (pull request 32374): rows of a first and a last
batch size and the draft length between them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.speculation.fixed import MOST_FIXED
from draftgate.policies.speculation.planning import plan_up_to, within_budget
from draftgate.policies.types import RequestView, SpeculationPlan, StepView, WorkerLoad


@dataclass(frozen=True, slots=True)
class ThresholdByBatch:
    """Draft lengths by batch size.

    Attributes:
        name: `threshold_by_batch:FILE`.
        table: rows (first batch size, last batch size, draft tokens); batches in none draft
            nothing.
    """

    name: str
    table: tuple[tuple[int, int, int], ...]

    def __post_init__(self) -> None:
        """Check the table.

        Raises:
            ValueError: it is empty, or a row is no range of batch sizes with a length.
        """
        if not self.table:
            raise ValueError("the table of draft lengths by batch size is empty")
        for first, last, length in self.table:
            if not (1 <= first <= last and 0 <= length <= MOST_FIXED):
                raise ValueError(
                    f"[{first}, {last}, {length}] is no row [first batch size, last batch size, "
                    f"draft tokens up to {MOST_FIXED}]"
                )

    def decide(self, request: RequestView, load: WorkerLoad) -> SpeculationPlan:
        """Plan the longest draft of the table: the batch may be another when it decodes."""
        longest = max(length for _, _, length in self.table)
        reason = "up to {cap} draft tokens, by a table of batch sizes"
        if not longest:
            reason, longest = "the table of batch sizes drafts nothing", 0
        return plan_up_to(self.name, longest, request, load, reason)

    def least_survival(self, step: StepView, cost: StepCost) -> float | None:
        """Look at every offer."""
        del step, cost
        return None

    def draft_lengths(self, step: StepView, cost: StepCost) -> Sequence[int]:
        """Allow what the first row with the batch's size says, first come first served."""
        del cost
        length = self._length(step.sequences)
        wanted = [min(length, candidate.max_draft_tokens) for candidate in step.candidates]
        return within_budget(wanted, step.slot_budget)

    def _length(self, sequences: int) -> int:
        rows = (length for first, last, length in self.table if first <= sequences <= last)
        return next(rows, 0)
