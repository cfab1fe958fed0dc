"""The format of the KV blocks that workers send to each other, and the checks on them.

The destination asks for the blocks of a hash chain (`core.prefix_cache`). The hash identifies the
content of a block: the tenant, the tokens of the block, and all tokens before it. The format
identifies the meaning of its bytes. Only workers of one numerics class exchange blocks, because a
block of another class would change the text.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

from msgspec import Struct

FORMAT_VERSION: Final = 2
"""Version of the layout, and of the frames that carry blocks (`framing`)."""

ITEM_BYTES: Final = {"float32": 4, "bfloat16": 2, "float16": 2, "float8_e4m3fn": 1, "uint8": 1}
"""Bytes of an element by the name of its dtype."""


class KvFormat(Struct, frozen=True):
    """The layout of a worker's KV blocks: [strips, block_tokens, head_dim] each.

    Attributes:
        numerics_class: class within which the bits of keys and values are equal.
        strips: number of layers times two (keys and values) times the number of KV heads.
    """

    numerics_class: str
    dtype: str
    block_tokens: int
    strips: int
    head_dim: int
    version: int = FORMAT_VERSION

    @property
    def block_bytes(self) -> int:
        """Bytes of a block."""
        return self.strips * self.block_tokens * self.head_dim * ITEM_BYTES[self.dtype]

    @property
    def token_bytes(self) -> int:
        """Bytes of a token."""
        return self.block_bytes // self.block_tokens


def format_refusal(source: KvFormat | None, sink: KvFormat | None) -> str | None:
    """Return why a worker cannot use the blocks of another worker, or None if it can."""
    if source is None or sink is None:
        return "a worker does not transfer KV blocks"
    for name in KvFormat.__struct_fields__:
        theirs, own = getattr(source, name), getattr(sink, name)
        if theirs != own:
            return f"the source has {name} {theirs}, but the destination has {own}"
    return None


class KvChunk(Struct, tag=True, frozen=True):
    """Consecutive blocks of a hash chain, whole or a range of their strips.

    Attributes:
        hashes: the hash of each block.
        checksums: CRC-32 of the bytes of each block.
        data: bytes of all blocks, [blocks, strips, block_tokens, head_dim]. The blocks of a
            simulated worker have no bytes.
        first_strip: first strip of the range. Only whole blocks are sent so far.
    """

    hashes: tuple[bytes, ...]
    checksums: tuple[int, ...]
    data: memoryview
    first_strip: int = 0

    def intact(self, block_bytes: int) -> Iterator[int]:
        """Yield the indices of the blocks before the first damaged block.

        Later blocks are useless, because a prefix has no gaps.

        Args:
            block_bytes: bytes of a block on the receiving worker.
        """
        if len(self.data) != block_bytes * len(self.hashes) or self.first_strip:
            return
        for index, checksum in zip(range(len(self.hashes)), self.checksums, strict=False):
            if checksum != crc(self.data[index * block_bytes : (index + 1) * block_bytes]):
                return
            yield index


NO_BLOCKS: Final = KvChunk((), (), memoryview(b""))


def chunk_of(hashes: tuple[bytes, ...], data: memoryview) -> KvChunk:
    """Return a chunk of at least one whole block with its checksums."""
    size = len(data) // len(hashes)
    parts = (data[begin * size : (begin + 1) * size] for begin in range(len(hashes)))
    return KvChunk(hashes, tuple(map(crc, parts)), data)


def crc(data: memoryview) -> int:
    """Return the CRC-32 of a block.

    CRC-32 detects every error burst of up to 32 bits. ISA-L computes it with carry-less
    multiplications at 10.0 GB/s, and zlib computes the same value at 2.4 GB/s. A weighted sum in
    numpy would reach 6.8 GB/s (one core, CPU time, blocks of 96 KiB, zlib 1.2.13, AMD EPYC, AVX2,
    2026-11-23).
    """
    # An engine that sends no blocks runs without ISA-L.
    from isal import isal_zlib

    return isal_zlib.crc32(data)
