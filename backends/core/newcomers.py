"""What those who wait for a place in the batch would take of memory and of a step."""

from __future__ import annotations

from collections.abc import Collection
from itertools import islice

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.core.sequence import Sequence


def first_blocks(waiting: Collection[Sequence], blocks: KvBlocks) -> int:
    """Return the blocks of the sequence that comes in next; 0 if none can now.

    Args:
        waiting: those for whom there is a seat, next first.
    """
    newcomer = next(iter(waiting), None)
    if newcomer is None:
        return 0
    hashes = newcomer.sharable_hashes(blocks.block_size)
    needed = blocks.needed(hashes, len(newcomer.token_ids))
    return needed if needed <= blocks.num_free else 0


def prompt_tokens(waiting: Collection[Sequence], blocks: KvBlocks, seats: int, most: int) -> int:
    """Return the prompt tokens that newcomers have ready, as far as `most`.

    What is in the cache is left out for the first one only: looking it up takes as long for the
    others, of whom few come in with one step.

    Args:
        waiting: next first; the first can come in.
        seats: how many could come in.
    """
    first = next(iter(waiting))
    cached = blocks.num_cached(first.sharable_hashes(blocks.block_size))
    tokens = len(first.token_ids) - cached * blocks.block_size
    for sequence in islice(waiting, 1, seats):
        if tokens >= most:
            break
        tokens += len(sequence.token_ids)
    return tokens
