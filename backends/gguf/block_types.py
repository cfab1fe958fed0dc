"""The types of tensors in GGUF files: how many values a block has, and in how many bytes."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Final


@dataclass(frozen=True, slots=True)
class BlockType:
    """How a tensor of a GGUF file stores its values.

    Attributes:
        number: the number of the type in files.
        name: the name of the type in `ggml`.
        values: values of a block. 1 for types that are not quantised.
        num_bytes: bytes of a block.
    """

    number: int
    name: str
    values: int
    num_bytes: int

    def row_bytes(self, columns: int) -> int:
        """Return the bytes of a row, whose `columns` must be a multiple of `values`."""
        return columns // self.values * self.num_bytes


_SUPPORTED: Final = (
    BlockType(0, "F32", 1, 4),
    BlockType(1, "F16", 1, 2),
    BlockType(2, "Q4_0", 32, 18),
    BlockType(3, "Q4_1", 32, 20),
    BlockType(6, "Q5_0", 32, 22),
    BlockType(7, "Q5_1", 32, 24),
    BlockType(8, "Q8_0", 32, 34),
    BlockType(10, "Q2_K", 256, 84),
    BlockType(11, "Q3_K", 256, 110),
    BlockType(12, "Q4_K", 256, 144),
    BlockType(13, "Q5_K", 256, 176),
    BlockType(14, "Q6_K", 256, 210),
    BlockType(20, "IQ4_NL", 32, 18),
    BlockType(23, "IQ4_XS", 256, 136),
    BlockType(30, "BF16", 1, 2),
)

BLOCK_TYPES: Final[Mapping[int, BlockType]] = MappingProxyType({t.number: t for t in _SUPPORTED})
"""The supported types by their numbers."""

UNSUPPORTED_TYPES: Final[Mapping[int, str]] = MappingProxyType(
    {
        9: "Q8_1",
        **dict(zip(range(15, 20), ("Q8_K", "IQ2_XXS", "IQ2_XS", "IQ3_XXS", "IQ1_S"), strict=True)),
        21: "IQ3_S",
        22: "IQ2_S",
        **dict(zip(range(24, 30), ("I8", "I16", "I32", "I64", "F64", "IQ1_M"), strict=True)),
        34: "TQ1_0",
        35: "TQ2_0",
        39: "MXFP4",
        40: "NVFP4",
        41: "Q1_0",
        42: "Q2_0",
    }
)
"""Names of the other types by their numbers, for error messages."""
