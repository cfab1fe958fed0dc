"""The noise of a request: a Philox4x32-10 word for every (seed, choice, position, purpose, token).

    key     = (seed low 32 bits, seed high 32 bits xor choice)
    counter = (position, purpose, token // 4, 0),      word = token % 4
    u       = ((word >> 9) + 0.5) / 2**23              in (0, 1), exact in float32
    g       = -log(-log u)                             standard Gumbel, float32

Words and ``u`` are identical on every device. ``g`` may differ in its last bits between
implementations of the logarithm, so texts are identical only within one numerics class.

One Philox call (ten rounds, two 32 x 32 -> 64 bit products each) serves four tokens. On a CPU, one
``[2, rows, counters]`` array holds both halves of the generator's state, so a round is five passes
over memory. The size of a block fits the second-level cache.

Source: Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). The
constants and known answers are from the Random123 library.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Final, TypeAlias

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

PURPOSE_OUTPUT: Final = 0
"""Purpose of the output token, the only purpose of coupled verification."""
PURPOSE_ACCEPT: Final = 1
"""Purpose of the acceptance test of ``verify: rejection``."""
PURPOSE_RESIDUAL: Final = 2
"""Purpose of the residual draw of ``verify: rejection``."""

_ROUNDS: Final = 10
_MULTIPLIERS: Final = (0xD2511F53, 0xCD9E8D57)
_KEY_STEPS: Final = (0x9E3779B9, 0xBB67AE85)
_LOW_WORD: Final = 0xFFFFFFFF
_TOKENS_PER_CALL: Final = 4
# 8192 counters make each working array 128 KiB. Three arrays and the result fit a 1 MiB cache.
_COUNTERS_PER_BLOCK: Final = 8192

_U64: TypeAlias = npt.NDArray[np.uint64]
_Float32: TypeAlias = npt.NDArray[np.float32]

# The shapes broadcast against [2, rows, counters].
_PRODUCT_FACTORS: Final[_U64] = np.array(_MULTIPLIERS, dtype=np.uint64).reshape(2, 1, 1)
_ROUND_KEY_STEPS: Final[_U64] = (
    np.arange(_ROUNDS, dtype=np.uint64)[:, None] * np.array(_KEY_STEPS, dtype=np.uint64)
).reshape(_ROUNDS, 2, 1, 1)


def philox_words(
    seed: Tensor, choice: Tensor, position: Tensor, purpose: int, num_tokens: int
) -> Tensor:
    """Return the 32-bit noise words of tokens ``0 .. num_tokens - 1`` for every row.

    Args:
      seed: int64 ``[rows]``, the bit pattern of an unsigned 64-bit seed.
      choice: integer ``[rows]``, index of the completion among ``n``.
      position: integer ``[rows]``, absolute position in the sequence of the drawn token.
      purpose: a ``PURPOSE_*`` constant.
      num_tokens: size of the vocabulary.

    Returns:
      int64 ``[rows, num_tokens]`` with values in ``[0, 2**32)``, on the device of ``seed``.
    """
    if seed.device.type != "cpu":
        return _philox_words_torch(seed, choice, position, purpose, num_tokens)
    blocks = _philox_blocks(seed, choice, position, purpose, num_tokens)
    return _assemble(blocks, np.int64, lambda words: words.view(np.int64), len(seed), num_tokens)


def uniform(
    seed: Tensor, choice: Tensor, position: Tensor, purpose: int, num_tokens: int
) -> Tensor:
    """Return ``u = ((word >> 9) + 0.5) / 2**23``: float32 ``[rows, num_tokens]`` in (0, 1).

    The arguments are those of ``philox_words``.
    """
    if seed.device.type != "cpu":
        words = _philox_words_torch(seed, choice, position, purpose, num_tokens)
        return (words >> 9).to(torch.float32).add_(0.5).mul_(2.0**-23)
    blocks = _philox_blocks(seed, choice, position, purpose, num_tokens)
    return _assemble(blocks, np.float32, _uniform_of_words, len(seed), num_tokens)


def gumbel(seed: Tensor, choice: Tensor, position: Tensor, purpose: int, num_tokens: int) -> Tensor:
    """Return standard Gumbel noise ``g = -log(-log u)``: float32 ``[rows, num_tokens]``.

    The arguments are those of ``philox_words``. The values of a row do not depend on the other
    rows.
    """
    if seed.device.type != "cpu":
        noise = uniform(seed, choice, position, purpose, num_tokens)
        return noise.log_().neg_().log_().neg_()
    blocks = _philox_blocks(seed, choice, position, purpose, num_tokens)
    # Convert block by block, while the uniforms are still in the cache.
    return _assemble(
        blocks,
        np.float32,
        lambda words: _gumbel_of_uniform(_uniform_of_words(words)),
        len(seed),
        num_tokens,
    )


def _assemble(
    blocks: Iterator[tuple[slice, slice, _U64]],
    dtype: npt.DTypeLike,
    convert: Callable[[_U64], npt.NDArray[Any]],
    rows: int,
    num_tokens: int,
) -> Tensor:
    """Convert blocks of words and put them in order: ``[rows, num_tokens]``."""
    result = np.empty((rows, num_tokens), dtype=dtype)
    for row_slice, columns, words in blocks:
        planes, out = convert(words), result[row_slice, columns]
        # Token 4 * c + w is word w of call c. The last call may have surplus words.
        for word in range(_TOKENS_PER_CALL):
            calls = -(-(out.shape[1] - word) // _TOKENS_PER_CALL)
            out[:, word::_TOKENS_PER_CALL] = planes[word, :, :calls]
    return torch.from_numpy(result)


def _uniform_of_words(words: _U64) -> _Float32:
    """Map words to (0, 1), and overwrite ``words``."""
    words >>= np.uint64(9)
    # A signed source converts faster, and 23 bits fit both types.
    result = words.view(np.int64).astype(np.float32)
    result += np.float32(0.5)
    result *= np.float32(2.0**-23)
    return result


def _gumbel_of_uniform(values: _Float32) -> _Float32:
    """Map (0, 1) to Gumbel noise in place."""
    np.log(values, out=values)
    np.negative(values, out=values)
    np.log(values, out=values)
    np.negative(values, out=values)
    return values


def _philox_blocks(
    seed: Tensor, choice: Tensor, position: Tensor, purpose: int, num_tokens: int
) -> Iterator[tuple[slice, slice, _U64]]:
    """Yield ``(rows, tokens, words [4, rows, calls])`` for blocks that cover all tokens."""
    counters = -(-num_tokens // _TOKENS_PER_CALL)
    num_rows = seed.shape[0]
    seeds = seed.numpy().view(np.uint64)
    choices = choice.numpy().astype(np.uint64)
    positions = position.numpy().astype(np.uint64)
    columns_per_block = min(max(counters, 1), _COUNTERS_PER_BLOCK)
    rows_per_block = max(1, _COUNTERS_PER_BLOCK // columns_per_block)
    for row in range(0, num_rows, rows_per_block):
        rows = slice(row, min(row + rows_per_block, num_rows))
        keys = _key_schedule(seeds[rows], choices[rows])
        for first in range(0, counters, columns_per_block):
            last = min(first + columns_per_block, counters)
            words = _philox_numpy(keys, positions[rows], purpose, first, last)
            tokens = slice(first * _TOKENS_PER_CALL, min(last * _TOKENS_PER_CALL, num_tokens))
            yield rows, tokens, words


def _key_schedule(seed: _U64, choice: _U64) -> _U64:
    """Return the keys of all rounds, ``[10, 2, rows, 1]``."""
    first = np.stack([seed, (seed >> np.uint64(32)) ^ choice])[None, :, :, None]
    keys: _U64 = (first + _ROUND_KEY_STEPS) & np.uint64(_LOW_WORD)
    return keys


def _philox_numpy(keys: _U64, position: _U64, purpose: int, first: int, last: int) -> _U64:
    """Return ``[4, rows, last - first]`` words for the counters ``(position, purpose, i, 0)``."""
    shape = (2, position.shape[0], last - first)
    even = np.empty(shape, dtype=np.uint64)
    odd = np.empty(shape, dtype=np.uint64)
    even[0] = position[:, None]
    even[1] = np.arange(first, last, dtype=np.uint64)
    odd[0] = purpose
    odd[1] = 0
    return _philox_rounds(keys, even, odd)


def _philox_rounds(keys: _U64, even: _U64, odd: _U64) -> _U64:
    """Run all rounds in place.

    Args:
      keys: ``[10, 2, rows, 1]``.
      even: ``[2, rows, calls]``, counter words 0 and 2, the factors of the products.
      odd: ``[2, rows, calls]``, counter words 1 and 3.

    Returns:
      ``[4, rows, calls]`` output words.
    """
    products = np.empty_like(even)
    for key in keys:
        # Low halves keep garbage above bit 31. The xor moves the garbage into ``even``, and the
        # mask at the end of the round removes it.
        np.multiply(even, _PRODUCT_FACTORS, out=products)
        # The product of word 0 feeds words 2 and 3, and the product of word 2 words 0 and 1.
        crossed = products[::-1]
        np.right_shift(crossed, np.uint64(32), out=even)
        np.bitwise_xor(even, odd, out=even)
        np.bitwise_xor(even, key, out=even)
        np.bitwise_and(even, np.uint64(_LOW_WORD), out=even)
        products, odd = odd, crossed
    words = np.empty((_TOKENS_PER_CALL, *even.shape[1:]), dtype=np.uint64)
    words[0::2] = even
    np.bitwise_and(odd, np.uint64(_LOW_WORD), out=words[1::2])
    return words


def _philox_words_torch(
    seed: Tensor, choice: Tensor, position: Tensor, purpose: int, num_tokens: int
) -> Tensor:
    """Return the same words by torch operations, for devices that NumPy cannot reach."""
    counters = -(-num_tokens // _TOKENS_PER_CALL)
    keys = [(seed & _LOW_WORD)[:, None], ((seed >> 32) ^ choice).bitwise_and_(_LOW_WORD)[:, None]]
    c0 = position.to(torch.int64)[:, None]
    c1: Tensor = torch.full_like(c0, purpose)
    c2 = torch.arange(counters, dtype=torch.int64, device=seed.device)[None, :]
    c3 = torch.zeros_like(c0)
    for _ in range(_ROUNDS):
        # Products wrap around in int64, which keeps their 64 bits. ``>>`` copies the sign into the
        # upper half of the high word. The mask removes these copies.
        low, high = c0 * _MULTIPLIERS[0], c2 * _MULTIPLIERS[1]
        c0 = ((high >> 32) ^ c1 ^ keys[0]) & _LOW_WORD
        c2 = ((low >> 32) ^ c3 ^ keys[1]) & _LOW_WORD
        c1, c3 = high & _LOW_WORD, low & _LOW_WORD
        keys = [(key + step) & _LOW_WORD for key, step in zip(keys, _KEY_STEPS, strict=True)]
    words = torch.stack(torch.broadcast_tensors(c0, c1, c2, c3), dim=-1)
    return words.reshape(seed.shape[0], -1)[:, :num_tokens].contiguous()
