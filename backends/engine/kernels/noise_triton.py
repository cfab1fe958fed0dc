"""The noise of ``noise`` in Triton: ``tl.philox`` keyed by the 64-bit seed is this generator.

The key is ``seed ^ (choice << 32)``: its low word is the seed's low word, its high word the seed's
high word xor the choice. One Philox call serves four neighbouring tokens; the four words are
interleaved in registers. About 100 integer instructions per call make random numbers, not memory,
the bottleneck of sampling, so the generator must not run once per token.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl


@triton.jit
def noise_key(seed, choice):
    """Returns the Philox key of a row, a 64-bit integer.

    The choice is masked, so that only its low 32 bits reach the key.
    """
    return seed ^ ((choice.to(tl.int64) & 0xFFFFFFFF) << 32)


@triton.jit
def words_tile(key, position, purpose, first_token, TILE: tl.constexpr):
    """Returns the words of tokens ``first_token + 0 .. TILE - 1``: uint32 [TILE].

    ``first_token`` and TILE must be multiples of 4.
    """
    call = first_token // 4 + tl.arange(0, TILE // 4)
    w0, w1, w2, w3 = tl.philox(key, position, purpose, call, call * 0)
    return tl.interleave(tl.interleave(w0, w2), tl.interleave(w1, w3))


@triton.jit
def uniform_of_words(words):
    """Returns ``((word >> 9) + 0.5) / 2**23``, exact in float32."""
    return ((words >> 9).to(tl.int32).to(tl.float32) + 0.5) * 1.1920928955078125e-07


@triton.jit
def gumbel_tile(key, position, purpose, first_token, TILE: tl.constexpr):
    """Returns the Gumbel noise of tokens ``first_token + 0 .. TILE - 1``: float32 [TILE]."""
    u = uniform_of_words(words_tile(key, position, purpose, first_token, TILE))
    return -tl.log(-tl.log(u))


@triton.jit
def _noise_kernel(
    out_ptr,
    seed_ptr,
    choice_ptr,
    position_ptr,
    purpose,
    num_tokens,
    KIND: tl.constexpr,
    TILE: tl.constexpr,
):
    """Grid (rows, tiles): writes words (KIND 0, int64), uniforms (1) or Gumbel noise (2)."""
    row = tl.program_id(0)
    first = tl.program_id(1) * TILE
    key = noise_key(tl.load(seed_ptr + row), tl.load(choice_ptr + row))
    position = tl.load(position_ptr + row)
    tokens = first + tl.arange(0, TILE)
    out = out_ptr + row.to(tl.int64) * num_tokens + tokens
    if KIND == 0:
        values = words_tile(key, position, purpose, first, TILE).to(tl.int64)
    elif KIND == 1:
        values = uniform_of_words(words_tile(key, position, purpose, first, TILE))
    else:
        values = gumbel_tile(key, position, purpose, first, TILE)
    tl.store(out, values, mask=tokens < num_tokens)


def philox_words(
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    purpose: int,
    num_tokens: int,
) -> torch.Tensor:
    """As ``noise.philox_words``: int64 ``[rows, num_tokens]``."""
    return _launch(0, torch.int64, seed, choice, position, purpose, num_tokens)


def uniform(
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    purpose: int,
    num_tokens: int,
) -> torch.Tensor:
    """As ``noise.uniform``: float32 ``[rows, num_tokens]``."""
    return _launch(1, torch.float32, seed, choice, position, purpose, num_tokens)


def gumbel(
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    purpose: int,
    num_tokens: int,
) -> torch.Tensor:
    """As ``noise.gumbel``: float32 ``[rows, num_tokens]``."""
    return _launch(2, torch.float32, seed, choice, position, purpose, num_tokens)


def _launch(
    kind: int,
    dtype: torch.dtype,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    purpose: int,
    num_tokens: int,
) -> torch.Tensor:
    """Allocates the result and runs the kernel; writes ``rows * num_tokens`` elements."""
    tile = 1024
    rows = seed.shape[0]
    out = torch.empty((rows, num_tokens), dtype=dtype, device=seed.device)
    grid = (rows, triton.cdiv(num_tokens, tile))
    _noise_kernel[grid](
        out,
        seed,
        choice.to(torch.int32),
        position.to(torch.int32),
        purpose,
        num_tokens,
        KIND=kind,
        TILE=tile,
    )
    return out
