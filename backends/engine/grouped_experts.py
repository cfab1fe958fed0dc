"""A mixture of experts on a GPU: one product for the rows of all experts.

Nothing returns to the host, so that a graph can capture the block and replay it with other rows and
other experts.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.expert_routes import group, route
from draftgate.backends.engine.kernels.grouped_product import TILE_ROWS, combine, grouped_product
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.mlp import Gate, LiveRows


@dataclass(frozen=True, slots=True)
class GroupedExperts:
    """The experts of a layer with their matrices stacked.

    Attributes:
        gate_up: [experts, 2 * width, hidden_size].
        down: [experts, hidden_size, width].
        per_row: number of experts of a row.
        normalised: whether the shares of a row's experts add up to 1.
    """

    gate_up: Tensor
    down: Tensor
    per_row: int
    normalised: bool

    @property
    def linears(self) -> Iterator[Linear]:
        """No matrices, because no expert computes alone."""
        return iter(())

    def __call__(self, x: Tensor, logits: Tensor, gate: Gate, live_rows: LiveRows, /) -> Tensor:
        """Return the sums of the results of each row's experts, [rows, hidden_size]."""
        if isinstance(live_rows, int):
            live_rows = torch.full((1,), live_rows, dtype=torch.int32, device=x.device)
        count = len(self.gate_up)
        routes = route(logits, self.per_row, live_rows, normalised=self.normalised)
        groups = group(routes.experts, count, TILE_ROWS)
        inner = gate(grouped_product(x, self.gate_up, groups, self.per_row))
        results = grouped_product(inner, self.down, groups, None)
        return combine(results, groups.places, routes, count)
