"""The Triton kernels against their references on a GPU, where there is one."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

from backends.engine.kernels import (
    noise,
    noise_triton,
    paged_attention_ref,
    sample_verify,
    sample_verify_ref,
)
from backends.engine.kernels.paged_attention import paged_attention
from tests.kernels import cases

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

_QUERY_LENS = [200, 1, 5, 0, 9, 1, 64]
_CONTEXT_LENS = [700, 1500, 1030, 3, 514, 1, 64]


def _assert_same_tokens(
    logits: torch.Tensor,
    rows: sample_verify_ref.RowSampling,
    tokens: list[int],
    expected: list[int],
) -> None:
    """Compares tokens; logarithms differ in the last bits, so exact ties of scores may flip."""
    differ = [row for row, token in enumerate(tokens) if token != expected[row]]
    assert len(differ) <= max(1, len(tokens) // 100)
    for row in differ:
        assert cases.score_gap(logits, rows, row, tokens[row]) < 1e-4


def test_noise_equals_the_reference() -> None:
    """The GPU draws the CPU's words and uniforms exactly, its Gumbels to rounding."""
    rows = cases.mixed_row_sampling(7, seed=1)
    arguments = (rows.seed, rows.choice, rows.position)
    on_gpu = cases.to_device(arguments, "cuda")
    words = noise_triton.philox_words(*on_gpu, noise.PURPOSE_OUTPUT, 50_001).cpu()
    assert torch.equal(words, noise.philox_words(*arguments, noise.PURPOSE_OUTPUT, 50_001))
    uniform = noise_triton.uniform(*on_gpu, noise.PURPOSE_OUTPUT, 50_001).cpu()
    assert torch.equal(uniform, noise.uniform(*arguments, noise.PURPOSE_OUTPUT, 50_001))
    gumbel = noise_triton.gumbel(*on_gpu, noise.PURPOSE_OUTPUT, 50_001).cpu()
    expected = noise.gumbel(*arguments, noise.PURPOSE_OUTPUT, 50_001)
    torch.testing.assert_close(gumbel, expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("vocab", [7, 4096, 50_257, 151_936])
def test_tokens_equal_the_reference(vocab: int) -> None:
    """The GPU samples the CPU's tokens, with mixed filters and ties."""
    rows = cases.mixed_row_sampling(160, seed=vocab)
    logits = cases.random_logits(160, vocab, seed=vocab)
    expected = sample_verify_ref.sample(logits, rows).tolist()
    tokens = sample_verify.sample(logits.cuda(), cases.to_device(rows, "cuda")).tolist()
    _assert_same_tokens(logits, rows, tokens, expected)


def test_tokens_do_not_depend_on_batch_and_tile() -> None:
    """A row alone, in a batch, and with another tiling gives the same token on the GPU."""
    rows = cases.to_device(cases.mixed_row_sampling(64, seed=3), "cuda")
    logits = cases.random_logits(64, 50_257, seed=3).cuda()
    together = sample_verify.sample(logits, rows).tolist()
    assert sample_verify.sample(logits, rows, tile=1024).tolist() == together
    for row in range(0, 64, 7):
        index = torch.tensor([row], device="cuda")
        alone = sample_verify.sample(logits[index], rows.select(index))
        assert alone.tolist() == [together[row]]


def test_accept_walk_equals_the_reference() -> None:
    """The GPU walks ragged chains as the reference does."""
    generator = torch.Generator().manual_seed(3)
    lengths = [1, 0, 5, 2, 150, 64, 65, 0] * 20
    total = sum(lengths)
    sampled = torch.randint(0, 1000, (total,), generator=generator)
    wrong = torch.rand(total, generator=generator) < 0.02
    drafts = torch.where(wrong, sampled + 1, sampled)
    cu_rows = torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    expected = sample_verify_ref.accept_walk_batch(sampled, drafts, cu_rows)
    walked = sample_verify.accept_walk_batch(sampled.cuda(), drafts.cuda(), cu_rows.cuda())
    assert [tensor.tolist() for tensor in walked] == [tensor.tolist() for tensor in expected]


@pytest.mark.parametrize("parallel", [False, True])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "dtype", "tolerance"),
    [
        (32, 8, 128, torch.bfloat16, 2e-2),
        (14, 2, 64, torch.bfloat16, 2e-2),
        (8, 8, 80, torch.float16, 4e-3),
        (8, 2, 64, torch.float32, 2e-5),
    ],
)
def test_attention_equals_the_reference(
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tolerance: float,
    parallel: bool,
) -> None:
    """A mixed batch over several splits gets the reference's values on the GPU."""
    case = cases.attention_case(
        _QUERY_LENS,
        _CONTEXT_LENS,
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
    )
    out = paged_attention(*case.arguments("cuda"), scale=case.scale, parallel_splits=parallel)
    expected = paged_attention_ref.paged_attention(*case.arguments(), scale=case.scale)
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_verified_rows_equal_decodes_bit_for_bit(dtype: torch.dtype) -> None:
    """On the GPU too a verified row has the bits of its token decoded alone, in either mode."""
    case = cases.attention_case(
        [6, 5, 9], [1030, 21, 2050], query_heads=8, kv_heads=2, head_dim=64, dtype=dtype
    )
    loops, parallel = (
        paged_attention(*case.arguments("cuda"), scale=case.scale, parallel_splits=mode)
        for mode in (False, True)
    )
    assert torch.equal(loops, parallel)
    token = 0
    for sequence, query_len in enumerate([6, 5, 9]):
        for index in range(query_len):
            alone = case.decode_of(sequence, index)
            one = paged_attention(*alone.arguments("cuda"), scale=case.scale)
            assert torch.equal(one[0], loops[token]), (sequence, index)
            token += 1


def test_sampling_does_not_synchronise() -> None:
    """Sampling and the accept walk leave the host running ahead of the GPU."""
    rows = cases.to_device(cases.mixed_row_sampling(8, seed=5), "cuda")
    logits = cases.random_logits(8, 4096, seed=5).cuda()
    cu_rows = torch.tensor([0, 3, 8], dtype=torch.int32, device="cuda")
    # Once before, for the compilation.
    tokens = sample_verify.sample(logits, rows)
    sample_verify.accept_walk_batch(tokens, tokens, cu_rows)
    torch.cuda.set_sync_debug_mode("error")
    try:
        sample_verify.accept_walk_batch(sample_verify.sample(logits, rows), tokens, cu_rows)
    finally:
        torch.cuda.set_sync_debug_mode("default")
