"""The arithmetic of products with packed matrices, in torch: the reference of `packed.c`.

A block of 32 numbers of a row has a scale d = max |x| / 127 and codes a = x * (127 / max |x|),
rounded to nearest, ties to even. A (sub-)block of a weight has codes q, a scale s and perhaps a
minimum m, so that a weight is s q + m. An output is the sum over blocks, in order, of

    (s d) (sum of q a) + m (d sum of a)

The sums are exact integers. Each product is rounded once, and each addition is fused with its
product.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.gguf.block_types import BlockType

BLOCK: Final = 32
SMALLEST: Final = 1e-30
"""Maximum of a block below which all codes are 0."""

_OFFSETS: Final = {"Q4_0": 8, "Q5_0": 16, "Q6_K": 32}
_LEVELS: Final = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


@dataclass(frozen=True, slots=True)
class UnpackedBlocks:
    """The numbers of a packed matrix. A weight is scale * code + minimum.

    Attributes:
        codes: float32 integers [outputs, width].
        scales: float32 [outputs, width / 32 or 16].
        minima: float32 [outputs, width / 32], or None for types without minima.
    """

    codes: Tensor
    scales: Tensor
    minima: Tensor | None


def unpack_blocks(kind: BlockType, rows: Tensor) -> UnpackedBlocks:
    """Return the numbers of packed rows, uint8 [outputs, row_bytes]."""
    count, name = len(rows), kind.name
    blocks = rows.reshape(-1, kind.num_bytes)
    minima = None
    if kind.values == BLOCK:
        scales = _halves(blocks, 0)
        if name in {"Q4_1", "Q5_1"}:
            minima = _halves(blocks, 2).reshape(count, -1)
        codes = _small_codes(name, blocks)
    elif name == "Q6_K":
        scales = _halves(blocks, 208) * blocks[:, 192:208].contiguous().view(torch.int8).float()
        codes = torch.cat([_q6_codes(blocks, value // 128, value % 128 // 32) for value in
                           range(0, 256, 32)], 1)  # fmt: skip
    else:
        six = blocks[:, 4:16].int()
        low, middle, high = six[:, :4], six[:, 4:8], six[:, 8:]
        own = torch.cat([low & 63, high & 15 | low >> 6 << 4], 1)
        least = torch.cat([middle & 63, high >> 4 | middle >> 6 << 4], 1)
        scales = _halves(blocks, 0) * own.float()
        minima = (-_halves(blocks, 2) * least.float()).reshape(count, -1)
        codes = _super_codes(name, blocks)
    return UnpackedBlocks(codes.reshape(count, -1).float(), scales.reshape(count, -1), minima)


def _halves(blocks: Tensor, at: int) -> Tensor:
    return blocks[:, at : at + 2].contiguous().view(torch.float16).float()


def _small_codes(name: str, blocks: Tensor) -> Tensor:
    if name == "Q8_0":
        return blocks[:, 2:].contiguous().view(torch.int8)
    nibbles = blocks[:, -16:].int()
    codes = torch.cat([nibbles & 15, nibbles >> 4], 1)
    if name == "IQ4_NL":
        return torch.tensor(_LEVELS)[codes]
    if name in {"Q5_0", "Q5_1"}:
        octets = blocks[:, -20:-16].int()
        codes |= torch.cat([octets[:, i // 8, None] >> i % 8 & 1 for i in range(32)], 1) << 4
    return codes - _OFFSETS.get(name, 0)


def _super_codes(name: str, blocks: Tensor) -> Tensor:
    nibbles = blocks[:, -128:].int().view(-1, 4, 1, 32)
    codes = torch.cat([nibbles & 15, nibbles >> 4], 2).view(-1, 8, 32)
    if name == "Q5_K":
        fifth = blocks[:, 16:48].int()
        codes |= torch.stack([fifth >> sub & 1 for sub in range(8)], 1) << 4
    return codes


def _q6_codes(blocks: Tensor, half: int, part: int) -> Tensor:
    low = blocks[:, 64 * half + 32 * (part % 2) :][:, :32].int()
    high = blocks[:, 128 + 32 * half :][:, :32].int() >> 2 * part & 3
    return ((low >> 4 if part >= 2 else low & 15) | high << 4) - _OFFSETS["Q6_K"]


def round_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the codes and scales of rows.

    Args:
        x: [rows, width], of which each row has blocks of 32 numbers.

    Returns:
        float32 integers [rows, blocks, 32], and float32 [rows, blocks].
    """
    blocks = x.float().view(len(x), -1, BLOCK)
    limits = blocks.abs().amax(2)
    # torch divides a number by a tensor in two steps, which round twice.
    most = torch.full_like(limits, 127.0)
    inverses = torch.where(limits >= SMALLEST, most / limits, torch.zeros(()))
    return torch.round(blocks * inverses[..., None]), limits / most


def packed_product(x: Tensor, matrix: UnpackedBlocks, bias: Tensor | None = None) -> Tensor:
    """Return the product of rows with a packed matrix: float32 [rows, outputs].

    Args:
        x: [rows, width], of any dtype.
        matrix: the numbers of the matrix.
        bias: float32 [outputs].
    """
    codes, row_scales = round_rows(x)
    outputs, width = matrix.codes.shape
    scales = matrix.scales.view(outputs, width // BLOCK, -1)
    subs = scales.shape[2]
    weights = matrix.codes.view(outputs, width // BLOCK, subs, -1)
    total = torch.zeros(len(x), outputs)
    for block in range(width // BLOCK):
        row, row_scale = codes[:, block].view(len(x), subs, -1), row_scales[:, block, None]
        for sub in range(subs):
            sums = row[:, sub].double() @ weights[:, block, sub].double().T  # exact
            total = fused(scales[:, block, sub] * row_scale, sums.float(), total)
        if matrix.minima is not None:
            scaled_sum = row_scale * row.sum((1, 2))[:, None]
            total = fused(matrix.minima[:, block].expand_as(total), scaled_sum, total)
    return total if bias is None else total + bias


def fused(a: Tensor, b: Tensor, c: Tensor) -> Tensor:
    """Return a * b + c in float32, rounded once.

    float64 holds the product exactly. The sum is rounded to odd, which makes the second rounding
    to float32 correct (Boldo and Melquiond, Emulation of FMA and correctly rounded sums, 2008).
    """
    product, addend = a.double() * b.double(), c.double()
    total = product + addend
    part = total - product
    error = (product - (total - part)) + (addend - part)
    bits = total.view(torch.int64)
    toward_zero = (error < 0) == (total > 0)
    odd = torch.where(toward_zero, bits - 1 | 1, bits | 1)
    is_even = bits & 1 == 0
    return torch.where((error != 0) & is_even, odd.view(torch.float64), total).float()
