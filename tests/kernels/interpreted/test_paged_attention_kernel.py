"""Paged attention in the interpreter, in float32 because its bfloat16 products are wrong."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import read_model_config
from draftgate.backends.engine.kernels import paged_attention_ref
from draftgate.backends.engine.kernels import paged_attention_sizes as sizes
from draftgate.backends.engine.kernels.attention_work import plan_work
from draftgate.backends.engine.kernels.paged_attention import paged_attention
from draftgate.backends.engine.kv_pool import KvPool
from tests.examples import grid
from tests.kernels.attention_cases import WORK, AttentionCase, attention_case, comb

# A chunk, a decode, a verification, an empty (padding) sequence, a verification that starts in one
# split and ends in the next, the first token of a sequence, and a whole prompt.
_QUERY_LENS = [20, 1, 5, 0, 4, 1, 18]
_CONTEXT_LENS = [40, 100, 70, 3, 66, 1, 18]


def _equals_the_reference(
    case: AttentionCase, window: int | None, softcap: float | None = None
) -> None:
    """Check that whole and cut pairs equal the reference and have the same bits."""
    bounds = {"window": window, "softcap": softcap}
    whole, cut, default = (case.attend(work, **bounds, split_size=64) for work in WORK)
    expected = paged_attention_ref.paged_attention(*case.arguments(), **case.keywords(), **bounds)
    # A bounded score has the rounding error of a number of the size of the bound.
    tolerance = 2e-6 if softcap is None else 2e-5
    torch.testing.assert_close(whole, expected, rtol=tolerance, atol=tolerance)
    assert torch.equal(whole, cut)
    assert torch.equal(whole, default)


@pytest.mark.parametrize(
    ("query_heads", "kv_heads", "head_dim"),
    [
        pytest.param(4, 4, 16, marks=pytest.mark.long),
        (6, 2, 32),
        pytest.param(8, 2, 64, marks=pytest.mark.long),
        (7, 1, 80),
    ],
)
def test_ragged_batch_equals_the_reference(query_heads: int, kv_heads: int, head_dim: int) -> None:
    """Attention of a mixed batch equals the reference for odd head sizes and groups."""
    case = attention_case(
        _QUERY_LENS, _CONTEXT_LENS, query_heads=query_heads, kv_heads=kv_heads, head_dim=head_dim
    )
    _equals_the_reference(case, None)


@pytest.mark.parametrize("window", grid((1, 30, 64, 1000), quick={30, 1000}.__contains__))
def test_windows_equal_the_reference(window: int) -> None:
    """Windows that end in a tile, at a tile boundary or before the sequence equal the reference."""
    case = attention_case(
        [20, 1, 0, 5, 17], [40, 300, 3, 130, 97], query_heads=3, kv_heads=1, head_dim=16, seed=3
    )
    _equals_the_reference(case, window)


# The exponential of a score far below the bound is infinite, as expected.
@pytest.mark.parametrize("softcap", [0.4, 50.0])
def test_bounded_scores_equal_the_reference(softcap: float) -> None:
    """Scores are bounded before their mask and their softmax, also far beyond the bound."""
    case = attention_case(
        [20, 1, 0, 5], [40, 100, 3, 130], query_heads=3, kv_heads=1, head_dim=16, seed=5
    )
    _equals_the_reference(replace(case, query=case.query * 5), 50, softcap)


@pytest.mark.parametrize("work", ["whole", "cut"])
def test_tiles_outside_every_window_are_not_read(work: str) -> None:
    """The kernel does not read blocks outside every window, which contain NaN."""
    case = attention_case([2, 1], [290, 200], query_heads=4, kv_heads=2, head_dim=16, seed=4)
    window = 60
    kept = case.attend(work, window=window, split_size=128)
    layer_kv = case.layer_kv.clone()
    for table, oldest in zip(case.block_tables, (290 - 2 - window + 1, 200 - window), strict=True):
        for block in table[: oldest // 64 * 4].tolist():
            layer_kv[:, block * 16 : block * 16 + 16] = torch.nan
    overwritten = replace(case, layer_kv=layer_kv)
    assert torch.equal(overwritten.attend(work, window=window, split_size=128), kept)


@pytest.mark.parametrize(("window", "softcap"), [(None, None), (30, None), (30, 2.0)])
@pytest.mark.parametrize("work", ["whole", "cut"])
def test_verified_rows_have_the_bits_of_decodes(
    work: str, window: int | None, softcap: float | None
) -> None:
    """Each row of a chunk or verify step has the same bits as a separate decode of its token."""
    case = attention_case([4, 2, 3], [66, 18, 130], query_heads=6, kv_heads=2, head_dim=32, seed=2)
    bounds = {"window": window, "softcap": softcap, "split_size": 64}
    together = case.attend(work, **bounds)
    for token, (sequence, index) in enumerate(case.rows()):
        alone = case.decode_of(sequence, index).attend(**bounds)
        assert torch.equal(alone[0], together[token]), (sequence, index)


_LONG = pytest.mark.long
_SKEWED = ([1] * 9, [20, 70, 33, 1500, 64, 65, 1, 40, 128])
_EQUAL = ([1] * 6, [150] * 6)
_DRAFTS = ([5] * 7, [20, 70, 33, 900, 64, 65, 6])


@pytest.mark.parametrize(
    ("window", "lens", "trees"),
    [
        pytest.param(window, lens, trees, id=f"{window}-{name}", marks=() if quick else _LONG)
        for window, lens, trees, name, quick in [
            (None, _SKEWED, False, "skewed", True),
            (100, _SKEWED, False, "skewed", False),
            (None, _EQUAL, False, "equal", True),
            (100, _EQUAL, False, "equal", False),
            (None, ([1], [1500]), False, "single", True),
            (100, ([1], [1500]), False, "single", False),
            (None, _DRAFTS, True, "trees", False),
            (100, _DRAFTS, True, "trees", True),
        ]
    ],
)
def test_row_has_the_same_bits_alone_and_among_other_contexts(
    lens: tuple[list[int], list[int]], trees: bool, window: int | None
) -> None:
    """The other contexts of a step decide where a context is cut, and change no bit."""
    drafts = [comb(4) for _ in lens[0]] if trees else None
    case = attention_case(
        *lens, query_heads=4, kv_heads=2, head_dim=16, drafts=drafts, padding=3, seed=6
    )
    together = case.attend(window=window, split_size=64)
    tokens = sum(lens[0])
    expected = paged_attention_ref.paged_attention(
        *case.arguments(), **case.keywords(), window=window
    )
    torch.testing.assert_close(together[:tokens], expected[:tokens], rtol=2e-6, atol=2e-6)
    for token, (sequence, index) in enumerate(case.rows()):
        alone = case.decode_of(sequence, index).attend(window=window, split_size=64)
        assert torch.equal(alone[0], together[token]), (sequence, index)


def test_long_context_among_short_ones_is_cut() -> None:
    """The default list of a skewed step cuts the long context alone."""
    case = attention_case(*_SKEWED, query_heads=4, kv_heads=2, head_dim=16)
    work = plan_work(*case.arguments(), block_size=case.block_size, split_size=64)
    assert work.partials[:, 1].tolist() == [0, 0, 0, 24, 0, 0, 0, 0, 0]


@pytest.mark.parametrize("work", ["whole", "cut"])
def test_tiles_of_16_bits_equal_the_reference(work: str) -> None:
    """The 16-bit tiles, which are four times as large as float32 tiles, equal the reference."""
    case = attention_case(
        _QUERY_LENS, _CONTEXT_LENS, query_heads=6, kv_heads=2, head_dim=32, dtype=torch.bfloat16
    )
    out = case.attend(work, split_size=64)
    expected = paged_attention_ref.paged_attention(*case.arguments(), **case.keywords())
    torch.testing.assert_close(out, expected, rtol=2e-2, atol=2e-2)


@pytest.mark.parametrize(("head_dim", "window"), [(32, None), (80, 30)])
def test_fp8_caches_have_the_bits_of_the_same_numbers(head_dim: int, window: int | None) -> None:
    """Attention to FP8 equals the reference, and attention to the same numbers in float32."""
    case = attention_case(
        _QUERY_LENS, _CONTEXT_LENS, query_heads=6, kv_heads=2, head_dim=head_dim, seed=11
    )
    fp8 = replace(case, layer_kv=case.layer_kv.to(torch.float8_e4m3fn))
    _equals_the_reference(fp8, window)
    wide = replace(case, layer_kv=fp8.layer_kv.float())
    found, expected = (
        paged_attention(*one.arguments(), **one.keywords(), window=window) for one in (fp8, wide)
    )
    assert torch.equal(found, expected)


def test_offsets_of_64_bits_change_no_bit(monkeypatch: pytest.MonkeyPatch) -> None:
    """64-bit offsets, which pools of over 2**31 elements per strip need, change no bit."""
    case = attention_case([1, 5], [40, 70], query_heads=4, kv_heads=2, head_dim=16, seed=7)
    narrow = paged_attention(*case.arguments(), **case.keywords())
    monkeypatch.setattr(sizes, "is_wide", lambda layer_kv: True)
    assert torch.equal(paged_attention(*case.arguments(), **case.keywords()), narrow)


def test_wider_block_tables_change_no_bit() -> None:
    """The width of the block tables does not change the result."""
    case = attention_case([1, 2], [40, 70], query_heads=4, kv_heads=4, head_dim=16)
    wide = replace(case, block_tables=torch.nn.functional.pad(case.block_tables, (0, 20), value=-1))
    assert torch.equal(wide.attend(split_size=64), case.attend(split_size=64))


def test_layers_of_the_pool_are_read_in_place() -> None:
    """The kernel reads layers of a target and of a draft model with another page size in place."""
    target = replace(read_model_config(SHIPPED_MODEL), num_layers=2, num_kv_heads=2, head_dim=32)
    draft = replace(target, num_layers=1, num_kv_heads=1, head_dim=16)
    pool = KvPool(target, 16, torch.float32)
    view = pool.draft_layers(draft)
    lens = ([3, 1], [50, 77])
    heads = {"query_heads": 4, "seed": 5}
    for layer, case in (
        (pool.layers[1], attention_case(*lens, **heads, kv_heads=2, head_dim=32)),
        (view.layers[0], attention_case(*lens, **heads, kv_heads=1, head_dim=16, block_size=32)),
    ):
        # The values of the other model precede the slots of the case.
        layer.fill_(torch.nan)
        layer[:, : case.layer_kv.shape[1]] = case.layer_kv
        _equals_the_reference(replace(case, layer_kv=layer), None)
    assert view.page_tokens == 32


def test_unsupported_layouts_are_rejected() -> None:
    """The kernel raises ValueError for a layout that it cannot read."""
    case = attention_case([1], [4], query_heads=3, kv_heads=3, head_dim=16)
    query, layer_kv, *rest = case.arguments()
    keywords = case.keywords()
    with pytest.raises(ValueError, match="query heads"):
        paged_attention(query, layer_kv[:4], *rest, **keywords)
    with pytest.raises(ValueError, match="unit stride"):
        paged_attention(query[..., ::2], layer_kv[..., ::2], *rest, **keywords)
    with pytest.raises(ValueError, match="head_dim"):
        paged_attention(query, layer_kv[..., :8], *rest, **keywords)
    with pytest.raises(ValueError, match="dtype"):
        paged_attention(query, layer_kv.half(), *rest, **keywords)
    with pytest.raises(ValueError, match="multiple"):
        paged_attention(query, layer_kv, *rest, **keywords, split_size=100)
    with pytest.raises(ValueError, match="window"):
        paged_attention(query, layer_kv, *rest, **keywords, window=0)
    with pytest.raises(ValueError, match="softcap"):
        paged_attention(query, layer_kv, *rest, **keywords, softcap=0.0)
    with pytest.raises(ValueError, match="positive"):
        paged_attention(query, layer_kv, *rest, block_size=16, scale=0.0)
