"""The cases of `draftgate bench kernels`, compiled for a Hopper GPU without a GPU."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.engine.kernel_cases import FULL, Inputs, KernelCase, cases
from tests.kernels.compiling import assert_lean, launches_of, meta_tensor


class _MetaInputs(Inputs):
    """Inputs of the full shapes without memory."""

    def __init__(self) -> None:
        self.sizes, self.device, self.dtype = FULL, "meta", torch.bfloat16

    def normal(self, *shape: int) -> torch.Tensor:
        return meta_tensor(*shape, dtype=self.dtype)

    def below(self, limit: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return meta_tensor(*shape, dtype=dtype)

    def shuffled(self, count: int) -> torch.Tensor:
        return meta_tensor(count, dtype=torch.int64)

    def up_to(self, count: int, step: int = 1) -> torch.Tensor:
        # Arithmetic on tensors without memory would import torch's compiler, which takes seconds.
        return meta_tensor(count + 1, dtype=torch.int32)


@pytest.mark.parametrize("case", list(cases(_MetaInputs())), ids=lambda case: case.name)
def test_bench_case_does_not_spill(case: KernelCase) -> None:
    """No kernel spills at full shapes.

    A multiprocessor runs two programs, except of the search of a cutoff, whose 16 warps keep enough
    loads in flight alone, and of products, whose tiles for prompts have 128 rows.
    """
    alone = {"_cutoff_kernel", "_fp8_product_kernel", "_int4_product_kernel"}
    launches = launches_of(case.run)
    assert_lean([one for one in launches if one.name in alone])
    assert_lean([one for one in launches if one.name not in alone], programs=2)
