"""The noise kernel in the interpreter."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import noise
from tests.kernels import noise_kernel


def _rows() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    seeds = torch.tensor([0, -1, 0x123456789ABCDEF0, -(2**63)])
    choices = torch.tensor([0, 1, 2, 3], dtype=torch.int32)
    return seeds, choices, torch.tensor([0, 12, 100_000, 2**31 - 1], dtype=torch.int32)


@pytest.mark.parametrize("num_tokens", [1, 3, 1001, 2048])
def test_words_and_uniforms_equal_the_reference(num_tokens: int) -> None:
    """Words and uniforms equal the reference exactly for any vocabulary size."""
    arguments = (*_rows(), noise.PURPOSE_ACCEPT, num_tokens)
    words = noise_kernel.philox_words(*arguments)
    assert torch.equal(words, noise.philox_words(*arguments))
    assert torch.equal(noise_kernel.uniform(*arguments), noise.uniform(*arguments))


def test_gumbel_equals_the_reference() -> None:
    """Gumbel noise equals the reference up to float32 rounding."""
    arguments = (*_rows(), noise.PURPOSE_OUTPUT, 1001)
    torch.testing.assert_close(
        noise_kernel.gumbel(*arguments), noise.gumbel(*arguments), rtol=1e-6, atol=3e-7
    )
