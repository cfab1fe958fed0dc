"""Blocks of quantised values in GGUF files, and their values as float32.

A row of a matrix is a sequence of blocks, each a fixed number of values in a fixed number of bytes.
Rows are independent, so they may be sliced, joined and permuted without unpacking. The layouts are
those of `ggml-common.h`. The operations round in the order of `gguf.quants.dequantize`, so that
results have the same bits.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from types import MappingProxyType
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.gguf.block_types import BlockType

_IQ4_VALUES: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
"""The values of the 16 codes of IQ4_NL and IQ4_XS."""

_PAIR_PLACES: Final = torch.arange(0, 8, 2, dtype=torch.uint8)
"""Places of the pairs of bits in a byte."""


def unpack(kind: BlockType, rows: Tensor) -> Tensor:
    """Return the values of packed rows.

    Args:
        kind: the type of the blocks.
        rows: uint8 `[rows, row_bytes]`.

    Returns:
        float32 `[rows, columns]`, `row_bytes / kind.num_bytes * kind.values` columns.
    """
    blocks = rows.reshape(-1, kind.num_bytes)
    return _VALUES[kind.name](blocks).reshape(len(rows), -1)


def _halves(blocks: Tensor, start: int) -> Tensor:
    """Return the half float at bytes `start` and `start + 1` of each block, float32 [blocks, 1]."""
    return blocks[:, start : start + 2].contiguous().view(torch.float16).float()


def _nibbles(packed: Tensor) -> Tensor:
    """Return the low nibbles of bytes and then the high ones, uint8 [blocks, 32]."""
    return torch.cat((packed & 15, packed >> 4), -1)


def _fifth_bits(packed: Tensor) -> Tensor:
    """Return the bits of four bytes, lowest first, as bit 4 of 32 values."""
    bits = packed.unsqueeze(-1) >> torch.arange(8, dtype=torch.uint8) & 1
    return bits.flatten(1) << 4


def _q4_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * (_nibbles(blocks[:, 2:]).float() - 8)


def _q4_1(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _nibbles(blocks[:, 4:]).float() + _halves(blocks, 2)


def _q5_0(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 6:]) | _fifth_bits(blocks[:, 2:6])
    return _halves(blocks, 0) * (codes.float() - 16)


def _q5_1(blocks: Tensor) -> Tensor:
    codes = _nibbles(blocks[:, 8:]) | _fifth_bits(blocks[:, 4:8])
    return _halves(blocks, 0) * codes.float() + _halves(blocks, 2)


def _q8_0(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * blocks[:, 2:].contiguous().view(torch.int8).float()


def _iq4_values(packed: Tensor) -> Tensor:
    """Return the values of the nibbles of IQ4_NL and IQ4_XS, low nibbles first."""
    return torch.tensor(_IQ4_VALUES, dtype=torch.float32)[_nibbles(packed).int()]


def _iq4_nl(blocks: Tensor) -> Tensor:
    return _halves(blocks, 0) * _iq4_values(blocks[:, 2:])


def _iq4_xs(blocks: Tensor) -> Tensor:
    # The scales of eight sub-blocks have 6 bits, of which the high ones come first.
    high = blocks[:, 2:4].unsqueeze(-1) >> _PAIR_PLACES & 3
    low = blocks[:, 4:8].unsqueeze(-1) >> torch.tensor([0, 4], dtype=torch.uint8) & 15
    scales = (low.flatten(1) | high.flatten(1) << 4).float() - 32
    values = _iq4_values(blocks[:, 8:].reshape(-1, 8, 16))
    return (_halves(blocks, 0) * scales).unsqueeze(-1) * values


def _bit_pairs(packed: Tensor) -> Tensor:
    """Return the numbers of 2 bits of Q2_K and Q3_K, [blocks, 16, 16].

    Each 32 bytes hold four sets of 32 values, the first one in their lowest bits.
    """
    pairs = packed.reshape(-1, 2, 1, 32) >> _PAIR_PLACES.view(4, 1) & 3
    return pairs.reshape(-1, 16, 16)


def _q2_k(blocks: Tensor) -> Tensor:
    scales = _halves(blocks, 80) * (blocks[:, :16] & 15).float()
    minima = _halves(blocks, 82) * (blocks[:, :16] >> 4).float()
    return scales.unsqueeze(-1) * _bit_pairs(blocks[:, 16:80]).float() - minima.unsqueeze(-1)


def _q3_k(blocks: Tensor) -> Tensor:
    # Of a scale with 6 bits, the low four are a nibble of bytes 96 to 103, and the high two are in
    # bytes 104 to 107. A bit of bytes 0 to 31 that is 0 subtracts 4.
    low = _nibbles(blocks[:, 96:104])
    high = (blocks[:, 104:108].unsqueeze(1) >> _PAIR_PLACES.view(4, 1) & 3).flatten(1)
    scales = _halves(blocks, 108) * ((low | high << 4).float() - 32)
    places = torch.arange(8, dtype=torch.uint8).view(8, 1)
    third = (blocks[:, :32].unsqueeze(1) >> places & 1).reshape(-1, 16, 16)
    codes = (_bit_pairs(blocks[:, 32:96]) | third << 2).float() - 4
    return scales.unsqueeze(-1) * codes


def _sub_block_scales(packed: Tensor) -> tuple[Tensor, Tensor]:
    """Return the scales and the minima of Q4_K and Q5_K.

    Args:
        packed: uint8 `[blocks, 12]`, bytes 4 to 15 of blocks. They hold 16 numbers of 6 bits.

    Returns:
        Two uint8 tensors `[blocks, 8]`, one number for each 32 values.
    """
    first, second, third = packed.split(4, -1)
    scales = torch.cat((first & 63, third & 15 | first >> 6 << 4), -1)
    minima = torch.cat((second & 63, third >> 4 | second >> 6 << 4), -1)
    return scales, minima


def _with_minima(blocks: Tensor, codes: Tensor) -> Tensor:
    """Return the values of codes [blocks, 8, 32] by the scales of Q4_K and Q5_K."""
    scales, minima = _sub_block_scales(blocks[:, 4:16])
    scale, minimum = _halves(blocks, 0) * scales.float(), _halves(blocks, 2) * minima.float()
    return scale.unsqueeze(-1) * codes.float() - minimum.unsqueeze(-1)


def _pairs_of_sub_blocks(packed: Tensor) -> Tensor:
    """Return the nibbles of Q4_K and Q5_K, [blocks, 8, 32].

    Each 32 bytes hold a sub-block in their low nibbles and the next one in their high nibbles.
    """
    return _nibbles(packed.reshape(-1, 4, 32)).view(-1, 8, 32)


def _q4_k(blocks: Tensor) -> Tensor:
    return _with_minima(blocks, _pairs_of_sub_blocks(blocks[:, 16:]))


def _q5_k(blocks: Tensor) -> Tensor:
    # Bit s of a byte belongs to sub-block s.
    places = torch.arange(8, dtype=torch.uint8).view(8, 1)
    fifth = (blocks[:, 16:48].unsqueeze(1) >> places & 1) << 4
    return _with_minima(blocks, _pairs_of_sub_blocks(blocks[:, 48:]) | fifth)


def _q6_k(blocks: Tensor) -> Tensor:
    # Half h of a block has four parts of 32 values: the low nibbles of its 64 bytes, then the high
    # ones. Bits 2p and 2p + 1 of 32 further bytes belong to part p.
    low = _nibbles(blocks[:, :128].reshape(-1, 2, 64)).view(-1, 2, 4, 32)
    high = (blocks[:, 128:192].reshape(-1, 2, 1, 32) >> _PAIR_PLACES.view(4, 1) & 3) << 4
    codes = (low | high).view(-1, 16, 16).float() - 32
    scales = blocks[:, 192:208].contiguous().view(torch.int8).float()
    return (_halves(blocks, 208) * scales).unsqueeze(-1) * codes


_VALUES: Final[Mapping[str, Callable[[Tensor], Tensor]]] = MappingProxyType(
    {
        "F32": lambda blocks: blocks.clone().view(torch.float32),
        "F16": lambda blocks: _halves(blocks, 0),
        "BF16": lambda blocks: blocks.clone().view(torch.bfloat16).float(),
        "Q4_0": _q4_0,
        "Q4_1": _q4_1,
        "Q5_0": _q5_0,
        "Q5_1": _q5_1,
        "Q8_0": _q8_0,
        "Q2_K": _q2_k,
        "Q3_K": _q3_k,
        "Q4_K": _q4_k,
        "Q5_K": _q5_k,
        "Q6_K": _q6_k,
        "IQ4_NL": _iq4_nl,
        "IQ4_XS": _iq4_xs,
    }
)
"""The values of blocks by the name of their type."""
