"""The references of the layer kernels, compared with the decoder on a CPU."""

from __future__ import annotations

import pytest
import torch
from torch.nn import functional

from draftgate.backends.engine.kernels import kv_move_ref, rms_norm_ref, rope_kv_ref, swiglu_ref
from tests.kernels.layer_cases import PATHS, normal, path_moves, rope_case


@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-6), (torch.bfloat16, 8e-3)])
def test_rms_norm_equals_torch(dtype: torch.dtype, tolerance: float) -> None:
    """The norm equals torch up to rounding, and the residual sum has equal bits."""
    x, residual, weight = (normal(shape, 1, dtype) for shape in [(5, 48), (5, 48), (48,)])
    summed = residual.clone()
    normed = rms_norm_ref.add_rms_norm(x, summed, weight, 1e-5)
    assert torch.equal(summed, residual + x)
    expected = functional.rms_norm(summed, (48,), weight, 1e-5)
    torch.testing.assert_close(normed, expected, rtol=tolerance, atol=0)


def test_rotation_has_the_bits_of_the_cpu_decoder() -> None:
    """The reference computes float32 queries, keys and values with the same bits as the decoder on
    a CPU."""
    case = rope_case(6, 4, 2, 20, normed=False)
    arguments = case.arguments()
    queries = rope_kv_ref.rope_kv(*arguments, **case.options())
    cos, sin = case.cos[case.positions], case.sin[case.positions]
    cosines, signed_sines = torch.cat([cos, cos], -1), torch.cat([-sin, sin], -1)
    heads = case.qkv.view(6, 8, 20)
    swapped = heads[:, :6].roll(10, dims=-1)
    turned = heads[:, :6] * cosines[:, None] + swapped * signed_sines[:, None]
    assert torch.equal(queries, turned[:, :4] * 20**-0.5)
    written = arguments[-1][:, case.slots].transpose(0, 1)
    assert torch.equal(written, torch.cat([turned[:, 4:], heads[:, 6:]], 1))


def test_heads_are_normed_before_they_are_rotated() -> None:
    """The result equals rotated normed heads up to rounding, and values are unchanged."""
    case = rope_case(6, 4, 2, 20, normed=True)
    arguments = case.arguments()
    queries = rope_kv_ref.rope_kv(*arguments, **case.options())
    heads = case.qkv.clone().view(6, 8, 20)
    heads[:, :6] = functional.rms_norm(heads[:, :6], (20,), eps=case.eps) * case.qk_norm
    plain = case.arguments()
    expected = rope_kv_ref.rope_kv(heads.view(6, -1), *plain[1:], qk_norm=None, eps=0.0)
    torch.testing.assert_close(queries, expected, rtol=1e-5, atol=1e-6)
    torch.testing.assert_close(arguments[-1], plain[-1], rtol=1e-5, atol=1e-6)


def test_gate_has_the_bits_of_the_decoder() -> None:
    """The reference computes the float32 gated activation with the same bits as the decoder on a
    CPU."""
    gate_up = normal((5, 70), 2) * 3
    gate, up = gate_up.chunk(2, dim=-1)
    assert torch.equal(swiglu_ref.swiglu(gate_up), functional.silu(gate) * up)
    assert torch.equal(swiglu_ref.geglu(gate_up), functional.gelu(gate, approximate="tanh") * up)


def test_moves_are_those_of_the_pool() -> None:
    """Every accepted token moves to its depth unchanged, and other slots keep their values."""
    sources, targets = path_moves(PATHS, 6, 60, seed=3)
    memory = normal((4, 60, 8), 4)
    expected = memory.clone()
    for source, target in zip(sources.flatten().tolist(), targets.flatten().tolist(), strict=True):
        if target != kv_move_ref.NO_MOVE:
            expected[:, target] = memory[:, source]
    kv_move_ref.kv_move(memory, sources, targets)
    assert torch.equal(memory, expected)
