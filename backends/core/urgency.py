"""The urgency of a worker's next step, for the order of the workers on a shared device."""

from __future__ import annotations

from collections.abc import Iterable

from draftgate.backends.core.sequence import Sequence
from draftgate.policies.batching import longest_wait_s
from draftgate.policies.turns import StepUrgency


def urgency_of(sequences: Iterable[Sequence], now_s: float, step_s: float) -> StepUrgency:
    """Return the urgency of a step for some sequences, at least one.

    Targets count only in the most urgent class, because less urgent sequences alone would have to
    wait.

    Args:
        now_s: present time in seconds.
        step_s: predicted seconds of the step.
    """
    sequences = list(sequences)
    priority = min([each.request.service.priority for each in sequences])
    slacks_s = [
        wait_s - step_s
        for each in sequences
        if each.request.service.priority == priority
        and (wait_s := _longest_wait_s(each, now_s)) is not None
        and wait_s >= step_s
    ]
    return StepUrgency(priority, min(slacks_s, default=None), step_s)


def _longest_wait_s(sequence: Sequence, now_s: float) -> float | None:
    """Return the seconds until a sequence needs its next token or its embedding, or None.

    The wait of a request at the gateway is unknown here, so its first token may be due earlier.
    """
    service = sequence.request.service
    if sequence.first_token_s is None:
        return None if service.ttft_s is None else sequence.queued_s + service.ttft_s - now_s
    due_in_s = sequence.due_in_s(now_s)
    if due_in_s is None or sequence.tpot_s is None:
        return None
    return longest_wait_s(due_in_s, sequence.tpot_s)
