"""A kernel that writes the noise of `noise_triton` to memory. Sampling keeps this noise in
registers."""

from __future__ import annotations

import torch
import triton
import triton.language as tl

from draftgate.backends.engine.kernels.noise_triton import (
    gumbel_tile,
    noise_key,
    uniform_of_words,
    words_tile,
)

_TILE = 1024


@triton.jit
def _noise_kernel(
    out_ptr,
    seed_ptr,
    choice_ptr,
    position_ptr,
    purpose,
    num_tokens,
    KIND: tl.constexpr,  # noqa: N803
    TILE: tl.constexpr,  # noqa: N803
):
    """Write words (KIND 0, int64), uniforms (1) or Gumbel noise (2), on a grid of (rows, tiles)."""
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


def philox_words(*arguments: object) -> torch.Tensor:
    """Return the words of `noise.philox_words` as int64 [rows, num_tokens]."""
    return _launch(0, torch.int64, *arguments)


def uniform(*arguments: object) -> torch.Tensor:
    """Return the numbers of `noise.uniform` as float32 [rows, num_tokens]."""
    return _launch(1, torch.float32, *arguments)


def gumbel(*arguments: object) -> torch.Tensor:
    """Return the noise of `noise.gumbel` as float32 [rows, num_tokens]."""
    return _launch(2, torch.float32, *arguments)


def _launch(
    kind: int,
    dtype: torch.dtype,
    seed: torch.Tensor,
    choice: torch.Tensor,
    position: torch.Tensor,
    purpose: int,
    num_tokens: int,
) -> torch.Tensor:
    out = torch.empty((len(seed), num_tokens), dtype=dtype, device=seed.device)
    _noise_kernel[(len(seed), triton.cdiv(num_tokens, _TILE))](
        out,
        seed,
        choice.to(torch.int32),
        position.to(torch.int32),
        purpose,
        num_tokens,
        KIND=kind,
        TILE=_TILE,
    )
    return out
