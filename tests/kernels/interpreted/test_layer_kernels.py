"""The layer kernels in the interpreter, whose bfloat16 conversions truncate."""

from __future__ import annotations

import pytest
import torch

from draftgate.backends.engine.kernels import (
    kv_move,
    kv_move_ref,
    rms_norm,
    rms_norm_ref,
    rope_kv,
    rope_kv_ref,
    swiglu,
    swiglu_ref,
)
from tests.kernels.layer_cases import PATHS, normal, path_moves, rope_case

_EPS = 1e-5


@pytest.mark.parametrize("hidden", [1, 20, 64, 576, 1001])
def test_rms_norm_equals_the_reference(hidden: int) -> None:
    """The norm of rows of any size equals the reference with and without the residual."""
    x, residual, weight = normal((3, hidden), 1), normal((3, hidden), 2), normal((hidden,), 3)
    expected = rms_norm_ref.rms_norm(x, weight, _EPS)
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, _EPS), expected, rtol=1e-6, atol=0)
    summed, expected_sum = residual.clone(), residual.clone()
    normed = rms_norm.add_rms_norm(x, summed, weight, _EPS)
    expected = rms_norm_ref.add_rms_norm(x, expected_sum, weight, _EPS)
    torch.testing.assert_close(normed, expected, rtol=1e-6, atol=0)
    assert torch.equal(summed, expected_sum)


@pytest.mark.parametrize("scale", [0.0, 1e-3])
def test_eps_bounds_the_norm_of_small_rows(scale: float) -> None:
    """The norm divides rows near zero by the root of eps."""
    x, weight = normal((2, 24), 4) * scale, normal((24,), 5)
    expected = rms_norm_ref.rms_norm(x, weight, _EPS)
    torch.testing.assert_close(rms_norm.rms_norm(x, weight, _EPS), expected, rtol=1e-6, atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_fused_residual_sum_changes_no_bit(dtype: torch.dtype) -> None:
    """The fused norm has the same bits as the norm of the rounded sum."""
    x, weight = normal((4, 90), 6, dtype) * 1.7, normal((90,), 8, dtype)
    summed = normal((4, 90), 7, dtype)
    normed = rms_norm.add_rms_norm(x, summed, weight, _EPS)
    assert torch.equal(normed, rms_norm.rms_norm(summed, weight, _EPS))


def test_normed_rows_do_not_depend_on_each_other() -> None:
    """A row has the same bits alone and in a batch."""
    x, weight = normal((5, 64), 9), normal((64,), 10)
    together = rms_norm.rms_norm(x, weight, _EPS)
    for row in range(5):
        assert torch.equal(rms_norm.rms_norm(x[row : row + 1], weight, _EPS)[0], together[row])


@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(4, 4, 16), (6, 2, 32), (9, 3, 64), (7, 1, 80), (14, 2, 20)]
)
def test_rotation_has_the_bits_of_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    """Queries and the KV memory equal the reference for odd head sizes and groups."""
    case = rope_case(5, heads, kv_heads, head_dim, normed=False)
    arguments, expected = case.arguments(), case.arguments()
    queries = rope_kv.rope_kv(*arguments, **case.options())
    assert torch.equal(queries, rope_kv_ref.rope_kv(*expected, **case.options()))
    assert torch.equal(arguments[-1], expected[-1])


@pytest.mark.parametrize(("head_dim", "share"), [(16, 0.75), (64, 0.5), (80, 0.3), (20, 0.1)])
def test_partial_rotation_has_the_bits_of_the_reference(head_dim: int, share: float) -> None:
    """The first dimensions of a head rotate and the others stay."""
    case = rope_case(5, 6, 2, head_dim, normed=False, share=share)
    arguments, expected = case.arguments(), case.arguments()
    queries = rope_kv.rope_kv(*arguments, **case.options())
    assert torch.equal(queries, rope_kv_ref.rope_kv(*expected, **case.options()))
    assert torch.equal(arguments[-1], expected[-1])


def test_partly_rotated_heads_are_normed_and_scaled() -> None:
    """The norm covers all dimensions of a head that rotates in part, and queries have any scale."""
    case = rope_case(5, 6, 2, 32, normed=True, share=0.5)
    arguments, expected = case.arguments(), case.arguments()
    options = {**case.options(), "query_scale": 0.3}
    queries = rope_kv.rope_kv(*arguments, **options)
    close = {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(queries, rope_kv_ref.rope_kv(*expected, **options), **close)
    torch.testing.assert_close(arguments[-1], expected[-1], **close)


@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (7, 1, 80), (14, 2, 20)])
def test_normed_heads_equal_the_reference(heads: int, kv_heads: int, head_dim: int) -> None:
    """Each head is normed by its own weight, and values are copied unchanged."""
    case = rope_case(5, heads, kv_heads, head_dim, normed=True)
    arguments, expected = case.arguments(), case.arguments()
    queries = rope_kv.rope_kv(*arguments, **case.options())
    close = {"rtol": 1e-6, "atol": 2e-6}
    torch.testing.assert_close(queries, rope_kv_ref.rope_kv(*expected, **case.options()), **close)
    torch.testing.assert_close(arguments[-1], expected[-1], **close)
    assert torch.equal(arguments[-1][kv_heads:], expected[-1][kv_heads:])


@pytest.mark.parametrize("normed", [False, True])
def test_bfloat16_is_rounded_once(normed: bool) -> None:
    """The kernel computes bfloat16 inputs in float32 and rounds only the results."""
    case = rope_case(5, 6, 2, 32, normed=normed, dtype=torch.bfloat16)
    arguments, expected = case.arguments(), case.arguments()
    queries = rope_kv.rope_kv(*arguments, **case.options())
    close = {"rtol": 2**-7, "atol": 1e-6}
    torch.testing.assert_close(queries, rope_kv_ref.rope_kv(*expected, **case.options()), **close)
    torch.testing.assert_close(arguments[-1], expected[-1], **close)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(6, 2, 32), (7, 1, 80)])
def test_fp8_is_rounded_as_in_the_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """Keys and values in FP8 are rounded once, ties to even, and saturate."""
    case = rope_case(5, heads, kv_heads, head_dim, normed=False, dtype=dtype, fp8=True)
    arguments, expected = case.arguments(), case.arguments()
    rope_kv.rope_kv(*arguments, **case.options())
    rope_kv_ref.rope_kv(*expected, **case.options())
    written, wanted = arguments[-1].float(), expected[-1].float()
    assert torch.equal(written, wanted)
    assert wanted.abs().max() == 448
    assert ((wanted != 0) & (wanted.abs() < 2.0**-6)).any()


@pytest.mark.parametrize("normed", [False, True])
def test_rotated_rows_do_not_depend_on_each_other(normed: bool) -> None:
    """The queries, keys and values of a row have the same bits alone and in a batch."""
    case = rope_case(4, 6, 2, 32, normed=normed)
    arguments = case.arguments()
    together = rope_kv.rope_kv(*arguments, **case.options())
    for row in range(4):
        alone = case.row(row)
        own = alone.arguments()
        assert torch.equal(rope_kv.rope_kv(*own, **alone.options())[0], together[row])
        slot = int(case.slots[row])
        assert torch.equal(own[-1][:, slot], arguments[-1][:, slot])


def test_layers_of_a_pool_are_written_in_place() -> None:
    """The kernel writes a layer in a pool's memory and leaves its neighbours unchanged."""
    case = rope_case(3, 5, 2, 16, normed=False)
    slots = case.layer_kv.shape[1]
    memory = torch.full((20, slots, 16), 7.0)
    layer = memory.split(4)[1]
    expected = case.arguments()
    rope_kv.rope_kv(*case.arguments()[:-1], layer, **case.options())
    rope_kv_ref.rope_kv(*expected, **case.options())
    assert torch.equal(layer, expected[-1])
    assert bool((memory[:4] == 7).all())
    assert bool((memory[8:] == 7).all())


# The exponential of the largest gate is infinite, as expected.
@pytest.mark.parametrize("intermediate", [1, 90, 1024, 1601])
@pytest.mark.parametrize(("gate", "tolerance"), [("swiglu", 1e-37), ("geglu", 2e-6)])
def test_gate_equals_the_reference(gate: str, tolerance: float, intermediate: int) -> None:
    """The gated activation equals the reference for rows of any size and large gates of both
    signs."""
    gate_up = normal((3, 2 * intermediate), 11) * 4
    gate_up[0, 0], gate_up[1, 0] = -100.0, 100.0
    expected, found = (getattr(module, gate)(gate_up) for module in (swiglu_ref, swiglu))
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=tolerance)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(("strips", "head_dim"), [(3, 20), (16, 32), (37, 8)])
def test_moves_equal_the_reference(strips: int, head_dim: int, dtype: torch.dtype) -> None:
    """The moves of empty paths and of paths with gaps or overlaps equal the reference."""
    sources, targets = path_moves(PATHS, 6, 60, seed=12)
    memory = normal((strips, 60, head_dim), 13, dtype)
    expected = memory.clone()
    kv_move.kv_move(memory, sources, targets)
    kv_move_ref.kv_move(expected, sources, targets)
    assert torch.equal(memory, expected)


def test_unsupported_layouts_are_rejected() -> None:
    """The kernels raise ValueError for a layout that they cannot read."""
    x, weight = normal((4, 32), 14), normal((32,), 15)
    with pytest.raises(ValueError, match="contiguous"):
        rms_norm.rms_norm(x[:, ::2], weight[:16], _EPS)
    with pytest.raises(ValueError, match="same shape"):
        rms_norm.add_rms_norm(x, x[:2], weight, _EPS)
    with pytest.raises(ValueError, match="weight"):
        rms_norm.rms_norm(x, weight[:16], _EPS)
    with pytest.raises(ValueError, match="contiguous"):
        swiglu.swiglu(x[:, ::2])
    qkv, *rest = rope_case(3, 4, 2, 16, normed=False).arguments()
    with pytest.raises(ValueError, match="strips of heads"):
        rope_kv.rope_kv(qkv[:, :64].contiguous(), *rest, qk_norm=None, eps=0.0)
    with pytest.raises(ValueError, match="row for each query and key head"):
        rope_kv.rope_kv(qkv, *rest, qk_norm=normal((4, 16), 16), eps=0.0)
    with pytest.raises(ValueError, match="strips of the KV memory"):
        rope_kv.rope_kv(qkv, *rest[:-1], rest[-1].double(), qk_norm=None, eps=0.0)
    sources, targets = path_moves(PATHS, 6, 60, seed=17)
    with pytest.raises(ValueError, match="strips of the KV memory"):
        kv_move.kv_move(normal((4, 60, 16), 18)[..., ::2], sources, targets)
    with pytest.raises(ValueError, match="target"):
        kv_move.kv_move(normal((4, 60, 16), 18), sources, targets[:2])
