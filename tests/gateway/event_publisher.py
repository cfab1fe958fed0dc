"""A model of a server with a prefix cache, which publishes the events of vLLM."""

from __future__ import annotations

from collections import OrderedDict, deque
from itertools import count
from typing import Any

import msgspec

Tokens = tuple[int, ...]


class CachingServer:
    """Stores and evicts blocks of tokens, and numbers the batches of their events.

    Like vLLM, it may hold several copies of a block, and reports each of them.

    Attributes:
        batches: the batches that it can still repeat, as number and MessagePack.
        cached: number of copies by the tokens up to the end of each block, least recently used
            first.
    """

    _clock = count()

    def __init__(
        self, block_tokens: int = 2, most_blocks: int = 8, keeps: int = 4, *, arrays: bool = False
    ) -> None:
        self.block_tokens = block_tokens
        self.most_blocks = most_blocks
        self.arrays = arrays
        self.batches: deque[tuple[int, bytes]] = deque(maxlen=keeps)
        self.cached: OrderedDict[Tokens, int] = OrderedDict()
        self.number = -1
        self._events: list[dict[str, Any]] = []

    def compute(self, prompt: Tokens, *, again: bool = False, salt: str = "") -> None:
        """Store the blocks of a prompt.

        Args:
            again: whether to ignore cached blocks, as for requests that run at the same time.
        """
        assert not salt or not again
        size = self.block_tokens
        ends = range(size, len(prompt) + 1, size)
        known = 0 if again else sum(1 for end in ends if prompt[:end] in self.cached)
        new = [prompt[:end] for end in ends][known:]
        if new:
            first = new[0][:-size]
            self._events.append(
                {
                    "type": "BlockStored",
                    "block_hashes": [name_of(tokens) for tokens in new],
                    "parent_block_hash": name_of(first) if first else None,
                    "token_ids": [token for tokens in new for token in tokens[-size:]],
                    "block_size": size,
                    "lora_id": None,
                    "medium": "GPU",
                    "lora_name": None,
                }
            )
        for tokens in new:
            self.cached[tokens] = self.cached.get(tokens, 0) + 1
        # The beginning of a prompt is evicted last.
        for end in reversed(ends):
            self.cached.move_to_end(prompt[:end])
        while sum(self.cached.values()) > self.most_blocks:
            self.evict()

    def evict(self) -> None:
        """Remove a copy of the block that was not used for the longest time."""
        tokens = next(iter(self.cached))
        self.cached[tokens] -= 1
        if not self.cached[tokens]:
            del self.cached[tokens]
        self._events.append(
            {"type": "BlockRemoved", "block_hashes": [name_of(tokens)], "medium": "GPU"}
        )

    def clear(self) -> None:
        """Remove all blocks."""
        self.cached.clear()
        self._events.append({"type": "AllBlocksCleared"})

    def publish(self) -> tuple[int, bytes]:
        """Return the next batch, with all events since the last one."""
        events, self._events = self._events, []
        shown: list[Any] = [list(one.values()) for one in events] if self.arrays else list(events)
        self.number += 1
        batch = self.number, msgspec.msgpack.encode([float(next(self._clock)), shown, 0])
        self.batches.append(batch)
        return batch

    def replay(self, first: int) -> list[tuple[int, bytes]]:
        """Return the batches from a number on, as far as they are kept."""
        return [batch for batch in self.batches if batch[0] >= first]

    def cached_tokens(self, prompt: Tokens) -> int:
        """Return the number of leading tokens of a prompt that are not computed again."""
        return cached_tokens(self.cached, prompt, self.block_tokens)


def cached_tokens(cached: Any, prompt: Tokens, block_tokens: int) -> int:
    """Return the number of leading tokens whose blocks are in a collection."""
    found = 0
    while found + block_tokens < len(prompt) and prompt[: found + block_tokens] in cached:
        found += block_tokens
    return found


def name_of(tokens: Tokens) -> bytes:
    """Return the hash by which the server names a block."""
    return msgspec.msgpack.encode(("name", tokens))
