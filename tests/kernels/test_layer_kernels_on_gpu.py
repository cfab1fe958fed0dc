"""The layer kernels on a GPU, compared with their references."""

from __future__ import annotations

import os

import pytest
import torch

pytest.importorskip("triton")

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

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(
        not torch.cuda.is_available() or os.environ.get("TRITON_INTERPRET", "0") == "1",
        reason="needs a CUDA device and compiled kernels",
    ),
]

_EPS = 1e-5
# Another order of additions can change the final rounding.
_TOLERANCES = [(torch.float32, 2e-6), (torch.bfloat16, 8e-3)]
_DTYPES = [torch.float32, torch.bfloat16]


@pytest.mark.parametrize(("dtype", "tolerance"), _TOLERANCES)
@pytest.mark.parametrize("hidden", [64, 576, 1001, 4096, 8192])
def test_norm_equals_the_reference(hidden: int, dtype: torch.dtype, tolerance: float) -> None:
    """Norms of rows of any size equal the reference, and the residual sum has the same bits."""
    x = normal((37, hidden), 1, dtype, "cuda")
    residual = normal((37, hidden), 2, dtype, "cuda")
    weight = normal((hidden,), 3, dtype, "cuda")
    expected = rms_norm_ref.rms_norm(x, weight, _EPS)
    plain = rms_norm.rms_norm(x, weight, _EPS)
    torch.testing.assert_close(plain, expected, rtol=tolerance, atol=0)
    summed, expected_sum = residual.clone(), residual.clone()
    normed = rms_norm.add_rms_norm(x, summed, weight, _EPS)
    expected = rms_norm_ref.add_rms_norm(x, expected_sum, weight, _EPS)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=0)
    assert torch.equal(summed, expected_sum)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize("hidden", [576, 4096])
def test_normed_rows_do_not_depend_on_batch_or_fusion(hidden: int, dtype: torch.dtype) -> None:
    """A row has the same bits alone, in a batch, and with a fused or separate sum."""
    x = normal((33, hidden), 4, dtype, "cuda")
    residual = normal((33, hidden), 5, dtype, "cuda")
    weight = normal((hidden,), 6, dtype, "cuda")
    summed = residual.clone()
    together = rms_norm.add_rms_norm(x, summed, weight, _EPS)
    assert torch.equal(rms_norm.rms_norm(summed, weight, _EPS), together)
    for row in range(0, 33, 4):
        one = slice(row, row + 1)
        alone = rms_norm.add_rms_norm(x[one], residual[one].clone(), weight, _EPS)
        assert torch.equal(alone[0], together[row])


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(
    ("heads", "kv_heads", "head_dim"), [(32, 8, 128), (14, 2, 64), (9, 3, 64), (7, 1, 80)]
)
def test_rotation_has_the_bits_of_the_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype
) -> None:
    """The rotation on the GPU writes queries and KV memory with the same bits as the reference on
    the CPU."""
    case = rope_case(19, heads, kv_heads, head_dim, normed=False, dtype=dtype)
    arguments, expected = case.arguments("cuda"), case.arguments()
    queries = rope_kv.rope_kv(*arguments, **case.options("cuda"))
    assert torch.equal(queries.cpu(), rope_kv_ref.rope_kv(*expected, **case.options()))
    assert torch.equal(arguments[-1].cpu(), expected[-1])


@pytest.mark.parametrize("dtype", _DTYPES)
def test_fp8_has_the_bits_of_the_reference(dtype: torch.dtype) -> None:
    """The GPU rounds keys and values to FP8 as the reference on the CPU does."""
    case = rope_case(19, 32, 8, 128, normed=False, dtype=dtype, fp8=True)
    arguments, expected = case.arguments("cuda"), case.arguments()
    rope_kv.rope_kv(*arguments, **case.options("cuda"))
    rope_kv_ref.rope_kv(*expected, **case.options())
    assert torch.equal(arguments[-1].cpu().float(), expected[-1].float())


@pytest.mark.parametrize(("dtype", "tolerance"), _TOLERANCES)
@pytest.mark.parametrize(("heads", "kv_heads", "head_dim"), [(32, 8, 128), (7, 1, 80)])
def test_normed_heads_equal_the_reference(
    heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype, tolerance: float
) -> None:
    """Head norms have the values of the reference, and the GPU copies values exactly."""
    case = rope_case(19, heads, kv_heads, head_dim, normed=True, dtype=dtype)
    arguments, expected = case.arguments("cuda"), case.arguments()
    queries = rope_kv.rope_kv(*arguments, **case.options("cuda")).cpu()
    wanted = rope_kv_ref.rope_kv(*expected, **case.options())
    written = arguments[-1].cpu()
    torch.testing.assert_close(queries, wanted, rtol=tolerance, atol=4e-6)
    torch.testing.assert_close(written, expected[-1], rtol=tolerance, atol=4e-6)
    assert torch.equal(written[kv_heads:], expected[-1][kv_heads:])


@pytest.mark.parametrize("dtype", _DTYPES)
def test_rotated_rows_do_not_depend_on_the_batch(dtype: torch.dtype) -> None:
    """The queries, keys and values of a row have the same bits alone and in a batch."""
    case = rope_case(17, 32, 8, 128, normed=True, dtype=dtype)
    arguments = case.arguments("cuda")
    together = rope_kv.rope_kv(*arguments, **case.options("cuda"))
    for row in range(0, 17, 4):
        alone = case.row(row)
        own = alone.arguments("cuda")
        queries = rope_kv.rope_kv(*own, **alone.options("cuda"))
        assert torch.equal(queries[0], together[row])
        slot = int(case.slots[row])
        assert torch.equal(own[-1][:, slot], arguments[-1][:, slot])


# The exponential of a large gate differs by a few roundings.
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 5e-6), (torch.bfloat16, 8e-3)])
@pytest.mark.parametrize("intermediate", [90, 1536, 14336])
def test_gate_equals_the_reference(intermediate: int, dtype: torch.dtype, tolerance: float) -> None:
    """The gate on the GPU equals the reference for rows of any size."""
    gate_up = normal((21, 2 * intermediate), 7, dtype, "cuda") * 3
    gate_up[0, 0], gate_up[1, 0] = -100.0, 100.0
    expected = swiglu_ref.swiglu(gate_up)
    torch.testing.assert_close(swiglu.swiglu(gate_up), expected, rtol=tolerance, atol=1e-30)
    expected = swiglu_ref.geglu(gate_up)
    torch.testing.assert_close(swiglu.geglu(gate_up), expected, rtol=tolerance, atol=5e-6)


@pytest.mark.parametrize("dtype", _DTYPES)
@pytest.mark.parametrize(("strips", "head_dim"), [(512, 128), (37, 80), (6, 64)])
def test_moves_equal_the_reference(strips: int, head_dim: int, dtype: torch.dtype) -> None:
    """The GPU moves accepted paths as if all reads preceded all writes."""
    sources, targets = path_moves(PATHS * 9, 6, 400, seed=8)
    memory = normal((strips, 400, head_dim), 9, dtype)
    moved = memory.cuda()
    kv_move.kv_move(moved, sources.cuda(), targets.cuda())
    kv_move_ref.kv_move(memory, sources, targets)
    assert torch.equal(moved.cpu(), memory)


def test_layer_kernels_can_be_captured() -> None:
    """A graph of all four kernels gives the results of direct calls for new inputs."""
    case = rope_case(8, 8, 2, 64, normed=True, dtype=torch.bfloat16)
    x, residual = (normal((8, 256), seed, torch.bfloat16, "cuda") for seed in (1, 2))
    weight, gate_up = (normal(shape, 3, torch.bfloat16, "cuda") for shape in [(256,), (8, 512)])
    arguments, options = case.arguments("cuda"), case.options("cuda")
    layer_kv = arguments[-1]
    # The targets are slots that no row writes.
    free = sorted(set(range(layer_kv.shape[1])) - set(case.slots.tolist()))[:2]
    sources = case.slots[:2].view(1, 2).cuda()
    targets = torch.tensor([free], device="cuda")

    def step() -> tuple[torch.Tensor, ...]:
        summed = residual.clone()
        normed = rms_norm.add_rms_norm(x, summed, weight, _EPS)
        plain = rms_norm.rms_norm(summed, weight, _EPS)
        queries = rope_kv.rope_kv(*arguments, **options)
        kv_move.kv_move(layer_kv, sources, targets)
        return normed, summed, plain, queries, swiglu.swiglu(gate_up)

    # The first call compiles the kernels.
    step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    for tensor in (x, residual, gate_up, arguments[0]):
        tensor.neg_().add_(0.5)
    graph.replay()
    replayed = [tensor.clone() for tensor in captured]
    written = layer_kv.clone()
    layer_kv.fill_(7)
    direct = step()
    assert all(torch.equal(a, b) for a, b in zip(replayed, direct, strict=True))
    assert torch.equal(written, layer_kv)
    assert torch.equal(written[:, free], written[:, case.slots[:2].cuda()])
