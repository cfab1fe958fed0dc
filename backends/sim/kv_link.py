"""KV blocks without bytes, and the links between simulated workers."""

from __future__ import annotations

from typing import Final, NamedTuple

from draftgate.backends.core.kv_blocks import KvBlocks
from draftgate.backends.kv_transfer.exchange import (
    AdoptBlocks,
    KvExchange,
    KvOperation,
    KvResult,
    NoMemory,
)
from draftgate.backends.kv_transfer.format import KvChunk


class KvLink(NamedTuple):
    """A link from a simulated worker to the workers that pull its blocks.

    Attributes:
        bytes_per_s: bandwidth, more than 0.
        latency_s: seconds from the request of a chunk to its first byte.
    """

    bytes_per_s: float
    latency_s: float


LOCAL_LINK: Final = KvLink(2.55e9, 1e-3)
"""A link as fast as the copies in figure 10 of Llumnix (arXiv 2406.03243), between GPUs over a
network of 64 Gbit/s."""


class TimedExchange(KvExchange):
    """Runs operations on blocks without bytes, and knows how long their copies would take.

    Attributes:
        takes_time: whether copies take time.
        copied_s: seconds of the copies since the owner set it to 0.
    """

    def __init__(self, blocks: KvBlocks, block_s: float) -> None:
        """Copy blocks.

        Args:
            block_s: seconds in which the worker's thread copies a block.
        """
        super().__init__(blocks, NoMemory())
        self._block_s = block_s
        self.takes_time = block_s > 0.0
        self.copied_s = 0.0

    def run(self, operation: KvOperation, now_s: float) -> KvResult:
        """See `KvExchange`."""
        result = super().run(operation, now_s)
        copied = operation.chunk if isinstance(operation, AdoptBlocks) else result
        if isinstance(copied, KvChunk):
            self.copied_s += len(copied.hashes) * self._block_s
        return result
