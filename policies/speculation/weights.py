"""The weight of a sequence's tokens, by its lateness and its priority.

A step's rate counts each expected token with the weight of its sequence (`allocation`). So late
sequences get slots that other sequences would have got, at the same price for all. Lateness is
laxity (least laxity first: Mok, 1983): the time until the next token is due, less the time of the
step.

Unlike an order by deadline, weights starve no sequence. Slots earn weight x survival, and a late
sequence whose drafts do not survive takes none. A sequence does not gain from extreme lateness.
Under overload, a queue by deadline would serve the sequences that have already missed their
targets.
"""

from __future__ import annotations

from typing import Final

from draftgate.policies.types import ServiceLevel

LATE_WEIGHT: Final = 4.0
"""Weight of a late sequence. A slot with survival 0.2 then counts as much as a slot with 0.8 of a
sequence that is in time. At an acceptance of 0.7, about four more slots per draft are verified."""

AMPLE_TOKENS: Final = 16.0
"""Number of tokens ahead of its target at which a sequence weighs as much as one without a target.
A step cannot yield more tokens, and a few steps of one token each lose fewer."""

PRIORITY_FACTOR: Final = 2.0
MOST_PRIORITY: Final = 2
"""Ratio of the weights of neighbouring priority classes, over two classes in either direction. With
a wider range, one request would outweigh a batch."""

OFFLINE_WEIGHT: Final = 2.0**-10
"""Weight of a line of a batch. Beside other sequences, it changes the price of their draft slots by
less than 1%, so they draft as on a worker without batches. (Chosen, not tuned.)"""


def weight(laxity_s: float | None, service: ServiceLevel) -> float:
    """Return the weight of a sequence's tokens, which is 1 without a target and a priority.

    Args:
        laxity_s: seconds until its next token is due, less the seconds of the step, or None without
            a target.
        service: latency targets and priority.
    """
    if service.is_offline:
        return OFFLINE_WEIGHT
    level = min(max(service.priority, -MOST_PRIORITY), MOST_PRIORITY)
    by_priority = PRIORITY_FACTOR**-level
    if laxity_s is None or not service.tpot_s:
        return by_priority
    ahead = min(max(laxity_s / service.tpot_s / AMPLE_TOKENS, 0.0), 1.0)
    return float(by_priority * (LATE_WEIGHT + (1.0 - LATE_WEIGHT) * ahead))


def due_in_s(tpot_s: float, decoding_s: float, tokens: int) -> float:
    """Return the seconds until the next token of a sequence is due.

    Args:
        tpot_s: TPOT target of the sequence, in seconds.
        decoding_s: seconds since its first token.
        tokens: number of its tokens, so that the next token is due this many `tpot_s` after the
            first.
    """
    return tokens * tpot_s - decoding_s
