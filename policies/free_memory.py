"""The memory that workers have free for their sequences: freeness, headroom, and waits for memory.

    freeness = (free memory - demand - headroom) / sequences       (Llumnix, arXiv 2406.03243)

The unit of freeness is decode steps: the steps until the memory is full if every sequence adds a
token in each step. The *demand* is what sequences in the queue of the worker need. The *headroom*
is for urgent sequences, so that their steps stay short. If demand and headroom exceed the free
memory, freeness is the missing memory in tokens, below 0. It is not divided then: a quotient would
rank the worker with the most sequences first.
"""

from __future__ import annotations

import math
from typing import Final

from draftgate.policies.types import WorkerLoad

IDEAL_SHARE: Final = 1 / 8
"""Share of the memory that a worker with an urgent sequence should use at most. Llumnix keeps 1,600
of about 13,000 tokens, at which a decode step takes as long as that of a lone sequence."""


def freeness(free_tokens: int, sequences: int) -> float:
    """Return the freeness of a worker in steps, or its missing tokens as a negative number.

    Args:
        free_tokens: free memory less demand and headroom, which may be negative.
        sequences: number of sequences that share the memory. A worker without any counts as one.
    """
    return free_tokens / max(sequences, 1) if free_tokens > 0 else float(free_tokens)


def headroom_tokens(load: WorkerLoad) -> int:
    """Return the headroom of a worker's urgent sequences, or 0 without any."""
    return math.ceil((1.0 - IDEAL_SHARE) * load.kv_total_tokens) if load.urgent else 0


def release_rate(used_tokens: int, left_tokens: float, tpot_s: float) -> float:
    """Return the tokens per second of memory that ending sequences release, or 0 if unknown.

    Args:
        used_tokens: tokens in the memory.
        left_tokens: expected number of tokens that each sequence still generates.
        tpot_s: seconds per token of a sequence.
    """
    left_s = left_tokens * tpot_s
    return used_tokens / left_s if left_s > 0.0 else 0.0
