"""What `draftgate bench kernels` launches compiles for a Hopper GPU without one; nothing spills."""

from __future__ import annotations

import pytest
import torch

pytest.importorskip("triton")

from bench.engine.kernel_cases import FULL, Inputs, KernelCase, cases
from tests.kernels.compiling import assert_lean, launches_of, on_paper


class _OnPaper(Inputs):
    """Inputs of the full shapes that have no memory."""

    def __init__(self) -> None:
        self.sizes, self.device, self.dtype = FULL, "meta", torch.bfloat16

    def normal(self, *shape: int) -> torch.Tensor:
        return on_paper(*shape, dtype=self.dtype)

    def below(self, limit: int, *shape: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
        return on_paper(*shape, dtype=dtype)

    def shuffled(self, count: int) -> torch.Tensor:
        return on_paper(count, dtype=torch.int64)


@pytest.mark.parametrize("case", list(cases(_OnPaper())), ids=lambda case: case.name)
def test_every_measured_case_is_lean(case: KernelCase) -> None:
    """At the shapes that have goals no kernel spills, and two programs share a multiprocessor."""
    assert_lean(launches_of(case.run), programs=2)
