"""The noise of ``noise`` in Triton, for kernels that draw: ``tl.philox`` is this generator.

The key is ``seed ^ (choice << 32)``. Its low word is the seed's low word, its high word the seed's
high word xor the choice. One Philox call serves four neighbouring tokens, whose words are
interleaved in registers. A call takes about 100 integer instructions, so random numbers limit the
speed of sampling more than memory does. The generator must therefore not run once per token.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def noise_key(seed, choice):
    """Return the Philox key of a row, a 64-bit integer.

    The mask keeps the sign of a negative choice out of the seed's bits.
    """
    return seed ^ ((choice.to(tl.int64) & 0xFFFFFFFF) << 32)


@triton.jit
def words_tile(key, position, purpose, first_token, TILE: tl.constexpr):
    """Return the words of tokens ``first_token + 0 .. TILE - 1``: uint32 [TILE].

    ``first_token`` and TILE must be multiples of 4.
    """
    call = first_token // 4 + tl.arange(0, TILE // 4)
    w0, w1, w2, w3 = tl.philox(key, position, purpose, call, call * 0)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def uniform_of_words(words):
    """Return ``((word >> 9) + 0.5) / 2**23``, exact in float32."""
    return ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbel_tile(key, position, purpose, first_token, TILE: tl.constexpr):
    """Return the Gumbel noise of tokens ``first_token + 0 .. TILE - 1``: float32 [TILE]."""
    u = uniform_of_words(words_tile(key, position, purpose, first_token, TILE))
    return -tl.log(-tl.log(u))
