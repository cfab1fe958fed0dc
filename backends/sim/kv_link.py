"""KV blocks without bytes, and the links between simulated workers."""

from __future__ import annotations

from typing import Final, NamedTuple


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
