"""The cases of `draftgate bench kernels` in the interpreter at tiny shapes."""

from __future__ import annotations

import pytest
import torch

from bench.engine.kernel_cases import Inputs, KernelCase, Sizes, cases

_TINY = Sizes(
    sequences=3,
    context=70,
    verified=5,
    chunk=9,
    query_heads=4,
    kv_heads=2,
    head_dim=16,
    layers=2,
    hidden=48,
    intermediate=40,
    vocab=300,
)
_CASES = list(cases(Inputs(_TINY, "cpu", torch.float32)))


@pytest.mark.parametrize("case", _CASES, ids=lambda case: case.name)
def test_bench_case_equals_its_reference(case: KernelCase) -> None:
    """A case equals its reference in the first run and in a repeated run."""
    case.check()
    case.run()
    case.check()
    assert case.bytes_moved > 0
