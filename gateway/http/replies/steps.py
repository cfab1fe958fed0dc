"""The steps of a choice, for clients that request them with `speculation.trace`."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, UnsetType

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, StepTrace
from draftgate.gateway.http.replies.rendering import WholeChoice
from draftgate.gateway.http.replies.shapes import StepReply
from draftgate.policies.speculation.plan_reason import compare

_GRAMMAR: Final = "grammar"
"""The proposer of tokens that a grammar forces."""


def step_replies(added: Delta | WholeChoice, tokenizer: Tokenizer) -> list[StepReply] | UnsetType:
    """Return a description of each step that added tokens, or unset without a trace."""
    if not added.steps:
        return UNSET

    text = tokenizer.token_text
    replies = []
    begin = 0
    for step in added.steps:
        tokens = added.token_ids[begin : begin + step.tokens]
        begin += step.tokens
        replies.append(
            StepReply(
                [text(token) for token in tokens],
                step.proposer,
                step.offered,
                [text(token) for token in step.draft_ids],
                step.accepted,
                list(step.survivals),
                step.price,
                describe_step(step),
            )
        )
    return replies


def describe_step(step: StepTrace) -> str:
    """Return a description of the draft of a step.

    The description has the numbers of verified and accepted tokens, and the reason for the length
    of the draft.
    """
    if step.offered == 0:
        return "no draft tokens" + _at_price(step)
    accepted, verified = f"{step.accepted} accepted", len(step.draft_ids)
    if step.proposer == _GRAMMAR:
        return f"the grammar allows no other tokens: {step.offered} forced, {accepted}"
    return f"{verified} of {step.offered} draft tokens verified{_limit(step)}; {accepted}"


def _limit(step: StepTrace) -> str:
    """Return why a step verified no more and no fewer draft tokens, as far as its figures tell.

    The price is a mean over the slots up to the next stair of the step cost. So the slots of a step
    may be worth their time together although the last one is below the price.
    """
    verified, survivals, price = len(step.draft_ids), step.survivals, step.price
    # The first slot that was not verified, or the last slot. Its survival is known unless the
    # drafts ended for a reason other than the price.
    slot = min(verified, step.offered - 1)
    if slot >= len(survivals):
        return _at_price(step)
    if verified == step.offered and not price:
        return ": slots are free at present"
    survival, sign, mean = compare(survivals[slot], price)
    if verified < step.offered and sign == ">":
        return f": slot {slot + 1} with survival {survival} exceeds the limit of this step"
    if verified < step.offered or sign == ">":
        side = {"<": "is below", "=": "equals", ">": "is above"}[sign]
        return f": survival {survival} of slot {slot + 1} {side} the price {mean}"
    worth, _, cost = compare(sum(survivals[:verified]), verified * price)
    if float(worth) < float(cost):
        return ""
    return f": together they are worth {worth} tokens and cost {cost}"


def _at_price(step: StepTrace) -> str:
    return f" at the price {step.price:.3g}" if step.price > 0 else ""
