"""What each step did, told to a client that asked for it: `speculation.trace`."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Final

from draftgate.backends.types import StepTrace
from draftgate.gateway.http.replies.shapes import StepReply

GRAMMAR: Final = "grammar"
"""The proposer of tokens that a form forces."""


def step_replies(
    steps: Sequence[StepTrace], token_ids: Sequence[int], text: Callable[[int], str]
) -> list[StepReply]:
    """Return what the steps behind some tokens did, in words.

    Args:
        token_ids: the tokens that the steps added, in order.
        text: of a single token.
    """
    replies = []
    begin = 0
    for step in steps:
        tokens = token_ids[begin : begin + step.tokens]
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
                reason(step),
            )
        )
    return replies


def reason(step: StepTrace) -> str:
    """Say what a step did with its draft, and why it went no further.

    Survivals may go one slot beyond what was verified; then it is said what kept that one out.
    """
    if step.offered == 0:
        return f"nothing was drafted{_at(step.price)}"
    if step.proposer == GRAMMAR:
        forced = "1 token" if step.offered == 1 else f"{step.offered} tokens"
        return f"the form leaves no choice: {forced} forced, {_accepted(step)}"
    return f"{_verified(step)}; {_accepted(step)}"


def _verified(step: StepTrace) -> str:
    verified, survivals = len(step.draft_ids), step.survivals
    if verified < step.offered:
        told = f"{verified or 'none'} of {step.offered} drafted verified"
        if len(survivals) <= verified:
            return told + _at(step.price)
        chance = survivals[verified]
        cut = f"{told}: the {_ordinal(verified + 1)} survives with {_number(chance)}, "
        if chance < step.price:
            return f"{cut}below the price {_number(step.price)}"
        return f"{cut}but was left out"
    told = f"{_all(verified)} drafted verified"
    if not survivals:
        return told + _at(step.price)
    least = survivals[verified - 1]
    side = "below" if least < step.price else "above"  # below: the step's cost is a staircase
    which = "the last survives" if verified > 1 else "it survives"
    return f"{told}: {which} with {_number(least)}, {side} the price {_number(step.price)}"


def _accepted(step: StepTrace) -> str:
    verified = len(step.draft_ids)
    if step.accepted == verified > 0:
        return {1: "accepted", 2: "both accepted"}.get(verified, "all accepted")
    return f"{step.accepted or 'none'} accepted"


def _all(count: int) -> str:
    return {1: "the one", 2: "both"}.get(count, f"all {count}")


def _at(price: float) -> str:
    return f" at the price {_number(price)}" if price > 0 else ""


def _number(value: float) -> str:
    if 0 < value < 0.01:
        return "under 0.01"
    return f"{value:.2f}".rstrip("0").rstrip(".")


def _ordinal(number: int) -> str:
    suffix = {1: "st", 2: "nd", 3: "rd"}.get(number % 10, "th")
    return f"{number}{'th' if number % 100 in (11, 12, 13) else suffix}"
