"""The price of a draft slot: the survival that it needs to be worth the time it adds to a step.

    rate(n slots) = (weight + expected accepted tokens) / (T(n) - prompts(n))

Every prompt must be computed in some step, and accepted tokens shorten only the time of decodes. So
the rate excludes the time of a step's prompts, `prompts(n)`. Slots first take the places that
prompts leave free. Each further slot moves a prompt token to a later step.

This price minimises mean latency in steady state. Let r sequences of D tokens arrive per second. A
step of n sequences then lasts

    T = T0 + n x (slots x t + reads) + T x f,     with f the share of prompts.

By Little's law, n = r x D x T / accepted. The time of a sequence is then

    n / r = D x T0 / (accepted x (1 - f) - r x D x (slots x t + reads)).

The time is shortest if slots are taken down to a survival of r x D x t / (1 - f). That is the
number of tokens per second of the time without prompts, multiplied by the seconds of a token. In
simulations of mixed work on H100 and H200, it takes 1 to 6% less time than a rule with the time of
prompts. Counting sequences that wait for prompts as delayed gained nothing (a tenth of them: -1% to
+0.4%, all of them: +1 to +6%, 2026-11-21).

The value of a second is another rate, which decides what proposers are called: the rate without
drafts times `LongRunSpeedup`. A second of a proposer is not available to later steps, which earn
tokens at the long-run rate. The rate of a step without drafts is a worse value, because drafts
raise the rate. With a fixed value of a second, the steps that maximise tokens - value x time also
maximise the long-run rate, if the value is that rate (the renewal-reward theorem, and W.
Dinkelbach, On Nonlinear Fractional Programming, 1967). The price uses the rate of the step instead:
choosing slots by the long-run rate took between 2% less and 2% more model time (1 to 16 streams of
held-out texts, on average 0.2% more, 2026-11-22).
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray

from draftgate.policies.costs.step_cost import StepCost
from draftgate.policies.types import StepView

Array = NDArray[np.float64]

LEAST_S: Final = 1e-9
"""Minimum time of a step, because no number of slots would be best if steps took no time."""

_FORGETTING: Final = 0.98
"""Decay per step, which averages about the last fifty. (Chosen, not tuned, 2026-11-22.)"""


def step_s(step: StepView, cost: StepCost, slots: int = 0) -> float:
    """Return the positive seconds of a step with `slots` slots, without its prompts."""
    prompts = step.prefill_tokens
    displaced = min(max(slots - step.free_slots, 0), prompts) if prompts else 0
    fed = step.tokens + slots - displaced
    seconds = cost.seconds(fed, step.kv_tokens, step.sequences, slots)
    seconds += step.verify_s if slots else 0.0
    if not prompts:
        return max(seconds, LEAST_S)
    return max(seconds + _deferred_s(step, cost) * displaced - prompts_s(step, cost), LEAST_S)


def slots_s(step: StepView, cost: StepCost, most_slots: int) -> Array:
    """Return `step_s` of 0 to `most_slots` slots, [most_slots + 1]."""
    prompts = step.prefill_tokens
    if not prompts:
        seconds = cost.slots_s(step.tokens, step.kv_tokens, step.sequences, most_slots)
    else:
        slots = np.arange(most_slots + 1)
        displaced = np.minimum(np.maximum(slots - step.free_slots, 0), prompts)
        added = slots - displaced
        seconds = cost.slots_s(step.tokens, step.kv_tokens, step.sequences, int(added[-1]))[added]
        slot_s = cost.slot_s(step.kv_tokens, step.sequences)
        if slot_s:
            seconds += slot_s * displaced
        seconds += _deferred_s(step, cost) * displaced - prompts_s(step, cost)
    seconds[1:] += step.verify_s
    return np.maximum(seconds, LEAST_S)


def few_slots_s(step: StepView, cost: StepCost, most_slots: int) -> list[float]:
    """Return the values of `slots_s` up to rounding, faster for a few dozen slots."""
    if step.prefill_tokens:
        several: list[float] = slots_s(step, cost, most_slots).tolist()
        return several
    seconds = cost.few_slots_s(step.tokens, step.kv_tokens, step.sequences, most_slots)
    if step.verify_s:
        seconds[1:] = [each + step.verify_s for each in seconds[1:]]
    if seconds[0] >= LEAST_S:  # more slots never take less time
        return seconds
    return [max(each, LEAST_S) for each in seconds]


def rate(step: StepView, cost: StepCost) -> float:
    """Return the weighted tokens per second of the step without drafts."""
    return step.total_weight / step_s(step, cost)


def prompts_s(step: StepView, cost: StepCost) -> float:
    """Return the seconds by which its prompts lengthen a step."""
    if not step.prefill_tokens:
        return 0.0
    return cost.seconds(step.tokens) - cost.seconds(step.tokens - step.prefill_tokens)


def _deferred_s(step: StepView, cost: StepCost) -> float:
    """Return the seconds that a prompt token takes in a later step, as a share of that step."""
    if not step.prefill_tokens:
        return 0.0
    share_s = cost.seconds(step.tokens, step.kv_tokens, step.sequences) / step.tokens
    return max(share_s, prompts_s(step, cost) / step.prefill_tokens)


def slot_price(
    step: StepView,
    cost: StepCost,
    accepted: float = 0.0,
    slots: int = 0,
    drafting_s: float = 0.0,
) -> float:
    """Return the price of one more draft slot in weighted tokens, which is 0 on an idle worker.

    `price = rate x average extra seconds per slot up to the next cost step`, where the rate is that
    of the step with its drafts. The best slots that `allocation` omits have at most this mean
    survival, up to the next cost step.

    Args:
        accepted: weighted tokens that drafts are expected to add to the step.
        slots: draft slots of the step.
        drafting_s: seconds to compute these drafts.
    """
    if step.sequences <= 0:
        return 0.0
    displaced = min(max(slots - step.free_slots, 0), step.prefill_tokens)
    fed = step.tokens + slots - displaced
    more = cost.next_edge(fed) - fed
    present_s = step_s(step, cost, slots)
    extra_s = step_s(step, cost, slots + more) - present_s - (0.0 if slots else step.verify_s)
    tokens_per_s = (step.total_weight + accepted) / (present_s + drafting_s)
    return tokens_per_s * max(extra_s, 0.0) / more


def least_slot_price(step: StepView, cost: StepCost) -> float:
    """Return a price that every worthwhile slot of a step exceeds, in weighted tokens.

    Any number of slots takes at least the smallest average time per slot. The best number has at
    least the rate of the step without drafts. The result is 0 if tokens are left on the present
    stair, and infinite if no slot fits.
    """
    most = step.slot_budget
    if most <= 0 or step.sequences <= 0:
        return math.inf
    if step.prefill_tokens:
        seconds = slots_s(step, cost, most)
        slot_s = float(((seconds[1:] - seconds[0]) / np.arange(1, most + 1)).min())
    else:
        slot_s = cost.least_token_s(step.tokens, most, step.verify_s)
        slot_s += cost.slot_s(step.kv_tokens, step.sequences)
    return max(slot_s, 0.0) * rate(step, cost)


class LongRunSpeedup:
    """Tokens of recent steps, relative to steps of the same duration without drafts.

    The ratio changes less with the batch than the rate does.
    """

    def __init__(self) -> None:
        self._tokens = self._plain_tokens = 0.0

    @property
    def ratio(self) -> float:
        """The speedup, at least 1, because a step may always omit drafts."""
        return max(1.0, self._tokens / self._plain_tokens) if self._plain_tokens else 1.0

    def add_step(self, tokens: float, plain_tokens: float) -> None:
        """Learn from a step.

        Args:
            tokens: expected weighted tokens of the step.
            plain_tokens: weighted tokens of steps without drafts in the same time.
        """
        self._tokens = _FORGETTING * self._tokens + tokens
        self._plain_tokens = _FORGETTING * self._plain_tokens + plain_tokens
