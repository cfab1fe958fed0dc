"""A step as a batching policy sees it."""

from __future__ import annotations

from collections.abc import Collection, Iterable

from draftgate.backends.core.sequence import Sequence
from draftgate.backends.core.steps import SequenceWork
from draftgate.policies.batching import patience_s
from draftgate.policies.types import BatchView


def batch_view(
    decodes: Collection[SequenceWork],
    running: Iterable[Sequence],
    room_tokens: int,
    now_s: float | None,
    drafting_s: float,
    cost_error: float,
) -> BatchView:
    """Return the decodes of a step with their drafts, and what prompts they may wait for.

    Args:
        running: all sequences of the batch, in the order in which prompts go on.
        room_tokens: tokens the step has left.
        now_s: the time, if a sequence has a service level; else None.
        drafting_s: seconds that computing the drafts takes before the step.
        cost_error: of the forecasts of step times (`StepCostFit.relative_error`).
    """
    return BatchView(
        tokens=sum([work.num_tokens for work in decodes]),
        kv_tokens=sum([work.context_tokens for work in decodes]),
        sequences=len(decodes),
        most_prefill_tokens=room_tokens,
        prompt_kv_tokens=next((s.num_computed for s in running if s.pending_tokens > 1), 0),
        within_s=None if now_s is None else _within_s(decodes, now_s, drafting_s),
        cost_error=cost_error,
    )


def _within_s(decodes: Iterable[SequenceWork], now_s: float, drafting_s: float) -> float | None:
    """Return the seconds left to the step of the decode with the tightest target; None if none."""
    left_s = []
    for work in decodes:
        due_s, tpot_s = work.sequence.next_due_s, work.sequence.request.service.tpot_s
        if due_s is not None and tpot_s is not None:
            left_s.append(max(patience_s(due_s - now_s, tpot_s) - drafting_s, 0.0))
    return min(left_s, default=None)
