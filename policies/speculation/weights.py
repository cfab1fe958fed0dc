"""What a token of a sequence is worth: by how late it is, and by its priority.

A step's rate counts each expected token with its sequence's weight (`allocation`), so who
is late gets the slots that others would have had, at the same price for all. Lateness is laxity
(least laxity first: Mok, 1983): the time until the next token is due, less the time of the step.
Unlike an order by deadline, weights starve nobody: slots earn by weight x survival, and a late
sequence whose drafts do not survive takes none. Nobody gains by being later than late: under
overload a queue by deadline serves those who have lost already.
"""

from __future__ import annotations

from typing import Final

from draftgate.policies.types import ServiceLevel

LATE_WEIGHT: Final = 4.0
"""Weight of a sequence that is late. A slot that survives with 0.2 then counts as much as one with
0.8 of somebody who has time: the drafts of late sequences are verified about four slots deeper at
an acceptance of 0.7 a token."""

AMPLE_TOKENS: Final = 16.0
"""So many tokens ahead a sequence is as good as one without a target: more than a step can give it
and more than a few steps that give it one token each can take."""

PRIORITY_FACTOR: Final = 2.0
MOST_PRIORITY: Final = 2
"""Each class of priority counts twice the one below it, two up and two down: with more, one request
would outweigh a batch."""


def weight(laxity_s: float | None, service: ServiceLevel) -> float:
    """Return what a token of a sequence is worth; 1 for one without target and priority.

    Args:
        laxity_s: seconds until its next token is due, less those of the step; None without a
            target.
        service: what was asked for.
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
        first_token_s: when its first token came.
        tokens: how many it has; the next is due that many `tpot_s` behind the first.
    """
    return None if service.tpot_s is None else first_token_s + tokens * service.tpot_s
