"""Noise and sampling on a GPU, compared with their references."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels import (
    noise,
    sample_verify,
    sample_verify_ref,
    token_mask,
    token_mask_ref,
)
from tests.kernels import noise_kernel
from tests.kernels import sampling_cases as cases
from tests.kernels.synchronisation import forbid_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]


def _assert_same_tokens(
    logits: torch.Tensor,
    rows: sample_verify_ref.RowSampling,
    tokens: list[int],
    expected: list[int],
) -> None:
    """Compare tokens and allow near-ties, because the last bits of logarithms differ."""
    differ = [row for row, token in enumerate(tokens) if token != expected[row]]
    assert len(differ) <= max(1, len(tokens) // 100)
    for row in differ:
        assert cases.score_gap(logits.float(), rows, row, tokens[row]) < 1e-4


def test_noise_equals_the_reference() -> None:
    """The GPU draws the same words and uniforms as the CPU, and Gumbel noise is equal up to
    rounding."""
    rows = cases.mixed_row_sampling(7, seed=1)
    arguments = (rows.seed, rows.choice, rows.position)
    on_gpu = cases.to_device(arguments, "cuda")
    words = noise_kernel.philox_words(*on_gpu, noise.PURPOSE_OUTPUT, 50_001).cpu()
    assert torch.equal(words, noise.philox_words(*arguments, noise.PURPOSE_OUTPUT, 50_001))
    uniform = noise_kernel.uniform(*on_gpu, noise.PURPOSE_OUTPUT, 50_001).cpu()
    assert torch.equal(uniform, noise.uniform(*arguments, noise.PURPOSE_OUTPUT, 50_001))
    gumbel = noise_kernel.gumbel(*on_gpu, noise.PURPOSE_OUTPUT, 50_001).cpu()
    expected = noise.gumbel(*arguments, noise.PURPOSE_OUTPUT, 50_001)
    torch.testing.assert_close(gumbel, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("vocab", [7, 4096, 50_257, 151_936])
def test_tokens_equal_the_reference(vocab: int, dtype: torch.dtype) -> None:
    """The GPU samples the same tokens as the CPU with mixed filters and ties."""
    rows = cases.mixed_row_sampling(160, seed=vocab)
    logits = cases.random_logits(160, vocab, seed=vocab).to(dtype)
    expected = sample_verify_ref.sample(logits, rows).tolist()
    tokens = sample_verify.sample(logits.cuda(), cases.to_device(rows, "cuda")).tolist()
    _assert_same_tokens(logits, rows, tokens, expected)


def test_tokens_do_not_depend_on_batch_and_tile() -> None:
    """A row has the same token alone, in a batch, and with another tiling."""
    rows = cases.to_device(cases.mixed_row_sampling(64, seed=3), "cuda")
    logits = cases.random_logits(64, 50_257, seed=3).cuda()
    together = sample_verify.sample(logits, rows).tolist()
    assert sample_verify.sample(logits, rows, tile=1024).tolist() == together
    for row in range(0, 64, 7):
        index = torch.tensor([row], device="cuda")
        alone = sample_verify.sample(logits[index], rows.select(index))
        assert alone.tolist() == [together[row]]


def test_sampling_does_not_synchronise() -> None:
    """The host does not wait for the GPU."""
    rows = cases.to_device(cases.mixed_row_sampling(8, seed=5), "cuda")
    logits = cases.random_logits(8, 4096, seed=5).cuda()
    # The first call compiles the kernels.
    sample_verify.sample(logits, rows)
    with forbid_synchronisation():
        sample_verify.sample(logits, rows)


@pytest.mark.parametrize("vocab", [7, 50_257, 151_936])
def test_masked_logits_equal_the_reference(vocab: int) -> None:
    """The GPU forbids the same tokens as the CPU."""
    logits, rows = cases.random_logits(16, vocab, seed=vocab), torch.tensor([3, 15, 0])
    masks = cases.random_masks(3, -(-vocab // 32), seed=vocab)
    found = logits.cuda()
    token_mask.forbid_tokens(found, rows.cuda(), masks.cuda())
    token_mask_ref.forbid_tokens(logits, rows, masks)
    assert torch.equal(found.cpu(), logits)
