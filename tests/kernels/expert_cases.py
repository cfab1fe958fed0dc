"""Seeded inputs for the tests of the kernels of a mixture of experts."""

from __future__ import annotations

from typing import NamedTuple

import torch

from tests.kernels.layer_cases import normal


class ExpertCase(NamedTuple):
    """Rows, of which the last ones are padding, and the matrices of experts.

    Attributes:
      logits: float32 ``[rows, experts]``. Some are equal.
      live_rows: int32 ``[1]``.
      per_row: number of experts of a row.
      x: ``[rows, inputs]``.
      weights: ``[experts, outputs, inputs]``.
    """

    logits: torch.Tensor
    live_rows: torch.Tensor
    per_row: int
    x: torch.Tensor
    weights: torch.Tensor

    @property
    def num_experts(self) -> int:
        """The number of experts."""
        return self.logits.shape[1]

    def on(self, device: str) -> ExpertCase:
        """Return the case on a device."""
        return ExpertCase(*(part if isinstance(part, int) else part.to(device) for part in self))

    def rows(self, rows: slice) -> ExpertCase:
        """Return the batch of some rows, all of them live."""
        logits, x = self.logits[rows].contiguous(), self.x[rows].contiguous()
        return self._replace(logits=logits, live_rows=torch.full_like(self.live_rows, len(x)), x=x)


def expert_case(
    rows: int,
    experts: int,
    per_row: int,
    *,
    shape: tuple[int, int] = (40, 48),
    padding: int = 2,
    skew: float = 0.0,
    dtype: torch.dtype = torch.float32,
) -> ExpertCase:
    """Return random rows. With a large `skew`, all rows choose the first experts."""
    outputs, inputs = shape
    logits = (normal((rows, experts), 1) * 2).round(decimals=1)  # equal logits
    return ExpertCase(
        logits - skew * torch.arange(experts),
        torch.tensor([rows - padding], dtype=torch.int32),
        per_row,
        normal((rows, inputs), 2, dtype),
        normal((experts, outputs, inputs), 3, dtype) * inputs**-0.5,
    )
