"""What a step gives for its time, and what a draft slot must promise for lengthening it.

    rate(n slots) = (weight + expected accepted) / (T(n) - prompts(n))

A step's prompts have to be computed, if not in this step then in another, and an accepted token
shortens only what decodes take; so the time of prompts, `prompts(n)`, is taken off. Slots first
take what prompts leave of the step; each further one sends a prompt token to a later step.

It is the price at which mean latency is least in steady state. With r sequences a second of D
tokens each, a step of n of them lasts T = T0 + n x (slots x t + reads) + T x f, where prompts take
the share f, and n = r x D x T / accepted (Little's law). Solved for the time of a sequence,

    n / r = D x T0 / (accepted x (1 - f) - r x D x (slots x t + reads)),

which is least if slots are taken down to a survival of r x D x t / (1 - f): tokens a second by the
seconds that are not for prompts, times the seconds of a token. In simulations of mixed work on
H100 and H200 this takes 1 to 6% less than with prompts' time left in, where they fill the steps;
to count the sequences that wait for prompts among those delayed brought nothing more (0.1 of them:
-1% to +0.4%, all: +1 to +6%; 2026-11-21).
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
"""Steps take at least so long: a device that is said to need no time has no best set."""


def step_s(step: StepView, cost: StepCost, slots: int = 0) -> float:
    """Return what a step takes with so many slots, but for its prompts: more than 0 seconds."""
    prompts = step.prefill_tokens
    displaced = min(max(slots - step.free_slots, 0), prompts)
    fed = step.tokens + slots - displaced
    seconds = cost.seconds(fed, step.kv_tokens, step.sequences, slots)
    seconds += step.verify_s if slots else 0.0
    return max(seconds + _deferred_s(step, cost) * displaced - prompts_s(step, cost), LEAST_S)


def slots_s(step: StepView, cost: StepCost, most_slots: int) -> Array:
    """Return `step_s` of 0 to `most_slots` slots, [most_slots + 1]."""
    prompts = step.prefill_tokens
    if not prompts:
        seconds = cost.slots_s(step.tokens, step.kv_tokens, step.sequences, most_slots)
        seconds[1:] += step.verify_s
        return np.maximum(seconds, LEAST_S)
    slots = np.arange(most_slots + 1)
    displaced = np.minimum(np.maximum(slots - step.free_slots, 0), prompts)
    added = slots - displaced
    seconds = cost.slots_s(step.tokens, step.kv_tokens, step.sequences, int(added[-1]))[added]
    if cost.pair_s and step.sequences:
        seconds += cost.pair_s * step.kv_tokens / step.sequences * displaced
    seconds += _deferred_s(step, cost) * displaced - prompts_s(step, cost)
    seconds[1:] += step.verify_s
    return np.maximum(seconds, LEAST_S)


def few_slots_s(step: StepView, cost: StepCost, most_slots: int) -> list[float]:
    """Return what `slots_s` does, up to its last bits: sooner for some tens of slots."""
    if step.prefill_tokens:
        several: list[float] = slots_s(step, cost, most_slots).tolist()
        return several
    seconds = cost.few_slots_s(step.tokens, step.kv_tokens, step.sequences, most_slots)
    once_s = step.verify_s
    return [max(seconds[0], LEAST_S)] + [max(each + once_s, LEAST_S) for each in seconds[1:]]


def rate(step: StepView, cost: StepCost) -> float:
    """Return the weighted tokens that a second of the step brings without drafts."""
    return step.total_weight / step_s(step, cost)


def prompts_s(step: StepView, cost: StepCost) -> float:
    """Return by how much its prompts lengthen a step."""
    if not step.prefill_tokens:
        return 0.0
    return cost.seconds(step.tokens) - cost.seconds(step.tokens - step.prefill_tokens)


def _deferred_s(step: StepView, cost: StepCost) -> float:
    """Return what a prompt token takes in a later step: its share of all that is in that."""
    if not step.prefill_tokens:
        return 0.0
    share_s = cost.seconds(step.tokens, step.kv_tokens, step.sequences) / step.tokens
    return max(share_s, prompts_s(step, cost) / step.prefill_tokens)


def slot_price(step: StepView, cost: StepCost, accepted: float = 0.0) -> float:
    """Return what a draft slot must promise, in weighted tokens (design, section 1).

    `price = rate x average extra seconds per slot up to the next cost step`. The price of an idle
    worker is 0.

    Args:
        accepted: weighted tokens that drafts are expected to bring to the step.
    """
    if step.sequences <= 0:
        return 0.0
    slots = cost.next_edge(step.tokens) - step.tokens
    without_s = step_s(step, cost)
    extra_s = step_s(step, cost, slots) - without_s - step.verify_s
    return (step.total_weight + accepted) / without_s * max(extra_s, 0.0) / slots


def least_slot_price(step: StepView, cost: StepCost) -> float:
    """Return what no draft slot of a step can pay below, in weighted tokens.

    However many slots are taken, each takes the least average of all numbers of them; and the best
    set of slots has no lower rate than the step without. 0 where tokens are left on the present
    stair, infinite where there is no room for a slot.
    """
    most = step.slot_budget
    if most <= 0 or step.sequences <= 0:
        return math.inf
    if step.prefill_tokens:
        seconds = slots_s(step, cost, most)
        slot_s = float(((seconds[1:] - seconds[0]) / np.arange(1, most + 1)).min())
    else:
        slot_s = cost.least_token_s(step.tokens, most, step.verify_s)
        slot_s += cost.pair_s * step.kv_tokens / step.sequences
    return max(slot_s, 0.0) * rate(step, cost)
