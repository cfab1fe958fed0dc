"""Attention on a GPU, compared with its reference."""

from __future__ import annotations

import os
from dataclasses import replace

import pytest
import torch

pytest.importorskip("triton")

from draftgate.backends.engine.kernels import (
    attention_work_ref,
    merge_splits,
    merge_splits_ref,
    paged_attention_ref,
)
from draftgate.backends.engine.kernels.attention_work import plan_work
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from tests.kernels.attention_cases import (
    WORK,
    AttentionCase,
    attention_case,
    bushy,
    chain,
    comb,
    star,
)
from tests.kernels.synchronisation import forbid_synchronisation

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

_QUERY_LENS = [200, 1, 5, 0, 9, 1, 64]
_CONTEXT_LENS = [700, 1500, 1030, 3, 514, 1, 64]


def _trees(dtype: torch.dtype, *, query_heads: int, kv_heads: int, head_dim: int) -> AttentionCase:
    """Return trees across tile and split boundaries, beside a chunk, a decode and padding."""
    return attention_case(
        [13, 9, 66, 0, 1, 40, 5],
        [520, 1032, 700, 3, 1500, 40, 513],
        query_heads=query_heads,
        kv_heads=kv_heads,
        head_dim=head_dim,
        dtype=dtype,
        drafts=[comb(12), star(8), bushy(64, 1), [], [], [], chain(4)],
        seed=1,
    )


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim", "dtype", "tolerance"),
    [
        (32, 8, 128, torch.bfloat16, 2e-2),
        (14, 2, 64, torch.bfloat16, 2e-2),
        (8, 8, 80, torch.float16, 4e-3),
        (8, 2, 64, torch.float32, 2e-5),
        (8, 2, 128, torch.float32, 2e-5),
        (8, 2, 256, torch.bfloat16, 2e-2),
    ],
)
def test_attention_equals_the_reference(
    query_heads: int,
    kv_heads: int,
    head_dim: int,
    dtype: torch.dtype,
    tolerance: float,
    window: int | None,
    work: str,
) -> None:
    """Attention of mixed batches equals the reference with and without trees."""
    shape = {"query_heads": query_heads, "kv_heads": kv_heads, "head_dim": head_dim}
    plain = attention_case(_QUERY_LENS, _CONTEXT_LENS, dtype=dtype, **shape)
    for case in (plain, _trees(dtype, **shape)):
        out = case.attend(work, device="cuda", window=window)
        expected = paged_attention_ref.paged_attention(
            *case.arguments(), **case.keywords(), window=window
        )
        torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("work", WORK)
@pytest.mark.parametrize(
    ("head_dim", "dtype"),
    [
        (128, torch.bfloat16),
        (256, torch.bfloat16),
        (80, torch.float16),
        (64, torch.float32),
    ],
)
def test_fp8_caches_have_the_results_of_the_same_numbers(
    head_dim: int, dtype: torch.dtype, work: str
) -> None:
    """Attention to FP8 equals its reference, and a row of any branch has the bits of its decode."""
    case = _trees(dtype, query_heads=8, kv_heads=2, head_dim=head_dim)
    case = replace(case, layer_kv=case.layer_kv.to(torch.float8_e4m3fn))
    out = case.attend(work, device="cuda")
    expected = paged_attention_ref.paged_attention(*case.arguments(), **case.keywords())
    tolerance = 2e-5 if dtype is torch.float32 else 2e-2
    torch.testing.assert_close(out.cpu(), expected, rtol=tolerance, atol=tolerance)
    for token, (sequence, index) in enumerate(case.rows()):
        alone = case.decode_of(sequence, index).attend(device="cuda")
        assert torch.equal(alone[0], out[token]), (sequence, index)


@pytest.mark.parametrize("window", [None, 100])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32])
def test_verified_rows_have_the_bits_of_decodes(dtype: torch.dtype, window: int | None) -> None:
    """A row of any branch has the same bits as a separate decode of its token."""
    plain = attention_case(
        [6, 5, 9], [1030, 21, 2050], query_heads=8, kv_heads=2, head_dim=64, dtype=dtype
    )
    for case in (plain, _trees(dtype, query_heads=8, kv_heads=2, head_dim=64)):
        whole, cut, default = (case.attend(work, device="cuda", window=window) for work in WORK)
        assert torch.equal(whole, cut)
        assert torch.equal(whole, default)
        for token, (sequence, index) in enumerate(case.rows()):
            alone = case.decode_of(sequence, index).attend(device="cuda", window=window)
            assert torch.equal(alone[0], whole[token]), (sequence, index)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
def test_long_context_among_short_ones_has_the_bits_of_its_own_step(dtype: torch.dtype) -> None:
    """Programs share a context of 32k tokens among short ones, and no row changes a bit."""
    case = attention_case(
        [1] * 64,
        [1024] * 63 + [32768],
        query_heads=32,
        kv_heads=8,
        head_dim=128,
        dtype=dtype,
        padding=5,
    )
    together = case.attend(device="cuda")
    assert torch.equal(together[:64], case.attend("whole", device="cuda")[:64])
    for sequence in (0, 31, 63):
        alone = case.decode_of(sequence, 0).attend(device="cuda")
        assert torch.equal(alone[0], together[sequence])


def test_captured_graph_attends_to_new_inputs() -> None:
    """A graph captured for a batch of trees lists and attends another batch of the same shapes."""
    first = _trees(torch.bfloat16, query_heads=8, kv_heads=2, head_dim=64)
    second = attention_case(
        [13, 9, 66, 1, 0, 40, 5],
        [20, 32, 1500, 700, 2, 400, 5],
        query_heads=8,
        kv_heads=2,
        head_dim=64,
        dtype=torch.bfloat16,
        drafts=[star(13), comb(9), comb(64), [], [], chain(40), bushy(5, 2)],
        seed=2,
    )
    inputs, keywords = first.arguments("cuda"), first.keywords("cuda")
    slots = max(first.layer_kv.shape[1], second.layer_kv.shape[1])
    layer_kv = torch.zeros((4, slots, 64), dtype=torch.bfloat16, device="cuda")
    inputs = (inputs[0], layer_kv, *inputs[2:])
    # The first call compiles the kernel.
    paged_attention(*inputs, **keywords)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = paged_attention(*inputs, **keywords)
    for case in (first, second):
        layer_kv[:, : case.layer_kv.shape[1]].copy_(case.layer_kv)
        query, _, *lens, tables = case.arguments()
        buffers = (inputs[0], *inputs[2:4], *inputs[4][:2])
        for buffer, tensor in zip(buffers, (query, *lens, *tables[:2]), strict=True):
            buffer.copy_(tensor)
        for buffer, tensor in zip(keywords["trees"], case.keywords()["trees"], strict=True):
            buffer.copy_(tensor)
        graph.replay()
        assert torch.equal(out, case.attend(device="cuda"))


def test_attention_does_not_synchronise() -> None:
    """The host does not wait for the GPU."""
    case = _trees(torch.bfloat16, query_heads=8, kv_heads=2, head_dim=64)
    inputs, keywords = case.arguments("cuda"), case.keywords("cuda")
    # The first call compiles the kernel.
    paged_attention(*inputs, **keywords, window=100)
    with forbid_synchronisation():
        paged_attention(*inputs, **keywords, window=100)


@pytest.mark.parametrize("window", [None, 700])
def test_work_list_equals_the_reference(window: int | None) -> None:
    """The list of a skewed step equals the reference, with all programs of the GPU."""
    case = attention_case(
        [1, 5] * 31 + [0, 1], [1030] * 63 + [32768], query_heads=32, kv_heads=8, head_dim=16
    )
    keywords = case.keywords("cuda")
    del keywords["scale"]
    work = plan_work(*case.arguments("cuda"), **keywords, window=window)
    expected = attention_work_ref.plan_work(
        case.cu_query_lens,
        case.context_lens,
        None,
        tokens=len(case.query),
        block_tokens=4,
        kv_heads=8,
        window=window,
        split_size=512,
        key_tile=64,
        programs=len(work.starts),
        slots=work.slots,
    )
    for found, wanted in zip(work[:3], expected[:3], strict=True):
        assert torch.equal(found.cpu(), wanted)


def test_merge_equals_the_reference() -> None:
    """The merge of splits equals the reference."""
    generator = torch.Generator().manual_seed(1)
    weighted = torch.randn((40, 4, 128), generator=generator)
    stats = torch.randn((40, 4, 2), generator=generator).abs() + 1
    partials = torch.tensor([[0, 1], [1, 9], [0, 0], [10, 30]], dtype=torch.int32)
    tensors = (weighted, stats, partials)
    expected = merge_splits_ref.merge_splits(torch.zeros((4, 4, 128)), *tensors)
    out = merge_splits.merge_splits(
        torch.zeros((4, 4, 128), device="cuda"), *(tensor.cuda() for tensor in tensors)
    )
    torch.testing.assert_close(out.cpu(), expected, rtol=1e-5, atol=1e-6)
