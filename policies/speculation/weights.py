"""What a token of a sequence is worth, by its lateness and its priority.

A step's rate counts each expected token with the weight of its sequence (`allocation`). So late
sequences get slots that others would have had, at the same price for all. Lateness is laxity (least
laxity first: Mok, 1983): the time until the next token is due, less the time of the step.

Unlike an order by deadline, weights starve no sequence: slots earn weight x survival, and a late
sequence whose drafts do not survive takes none. Nor does a sequence gain by being very late: under
overload, a queue by deadline would serve those that have missed their targets already.
"""

from __future__ import annotations

from typing import Final

from draftgate.policies.types import ServiceLevel

LATE_WEIGHT: Final = 4.0
"""Weight of a late sequence. A slot with survival 0.2 then counts as much as one with 0.8 of a
sequence that has time. At an acceptance of 0.7, about four more slots per draft are verified."""

AMPLE_TOKENS: Final = 16.0
"""A sequence that is this many tokens ahead weighs as much as one without a target: more than a
step can give it, and more than it loses in a few steps of one token each."""

PRIORITY_FACTOR: Final = 2.0
MOST_PRIORITY: Final = 2
"""Each priority class weighs twice the next one, over two classes in either direction: with more,
one request would outweigh a batch."""


def weight(laxity_s: float | None, service: ServiceLevel) -> float:
    """Return what a token of a sequence is worth; 1 without a target and a priority.

    Args:
        laxity_s: seconds until its next token is due, less those of the step; None without a
            target.
        service: its targets and priority.
    """
    level = min(max(service.priority, -MOST_PRIORITY), MOST_PRIORITY)
    by_priority = PRIORITY_FACTOR**-level
    if laxity_s is None or not service.tpot_s:
        return by_priority
    ahead = min(max(laxity_s / service.tpot_s / AMPLE_TOKENS, 0.0), 1.0)
    return float(by_priority * (LATE_WEIGHT + (1.0 - LATE_WEIGHT) * ahead))


def next_due_s(service: ServiceLevel, first_token_s: float, tokens: int) -> float | None:
    """Return when the next token of a decoding sequence is due; None without a target.

    Args:
        service: its targets.
        first_token_s: when its first token was emitted.
        tokens: how many it has; the next is due that many `tpot_s` after the first.
    """
    return None if service.tpot_s is None else first_token_s + tokens * service.tpot_s
