"""The steps of a choice, for clients that request them with `speculation.trace`."""

from __future__ import annotations

from typing import Final

from msgspec import UNSET, UnsetType

from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.types import Delta, StepTrace
from draftgate.gateway.http.replies.rendering import WholeChoice
from draftgate.gateway.http.replies.shapes import StepReply

GRAMMAR: Final = "grammar"
"""The proposer of tokens that a grammar forces."""


def step_replies(added: Delta | WholeChoice, tokenizer: Tokenizer) -> list[StepReply] | UnsetType:
    """Return a description of each step that added tokens, or unset without a trace."""
    if not added.steps:
        return UNSET

    def text(token_id: int) -> str:
        # Some decoders strip the leading space of a single token, but not within a text.
        return tokenizer.texts[token_id] or tokenizer.token_text(token_id)

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
    accepted = f"{step.accepted} accepted"
    if step.proposer == GRAMMAR:
        return f"the grammar allows no other tokens: {step.offered} forced, {accepted}"
    verified = len(step.draft_ids)
    text = f"{verified} of {step.offered} draft tokens verified"
    # The first slot that was not verified, or the last slot. Its survival is known unless the
    # drafts ended for a reason other than the price.
    slot = min(verified, step.offered - 1)
    if slot >= len(step.survivals):
        return f"{text}{_at_price(step)}; {accepted}"
    survival = step.survivals[slot]
    # A verified slot may be below the price, because the cost of a step grows in stairs.
    side = "below" if survival < step.price else "above"
    text += f": survival {_number(survival)} of slot {slot + 1} is {side} the price "
    unverified = ", but it was not verified" if verified < step.offered and side == "above" else ""
    return f"{text}{_number(step.price)}{unverified}; {accepted}"


def _at_price(step: StepTrace) -> str:
    return f" at the price {_number(step.price)}" if step.price > 0 else ""


def _number(value: float) -> str:
    if 0 < value < 0.01:
        return "under 0.01"
    return f"{value:.2f}".rstrip("0").rstrip(".")
