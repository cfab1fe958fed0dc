"""The products of rows with the matrices of their experts in torch.

``grouped_product``: place i of expert e has the product of its row with the matrix of e:

    out[i] = weights[e] x[row(i)],     starts[e] <= i < starts[e + 1]

``combine``: the result of a row is the sum of the results of its pairs, times their shares, in the
order of the pairs. A row of padding has the result 0.

All sums are in float32, rounded once.
"""

from __future__ import annotations

import itertools

import torch
from torch import Tensor

from draftgate.backends.engine.kernels.expert_routes_ref import Groups, Routes


def grouped_product(x: Tensor, weights: Tensor, groups: Groups, per_row: int | None) -> Tensor:
    """Return the products of all places.

    Args:
      x: ``[rows, inputs]``, or ``[pairs, inputs]`` in the order of experts.
      weights: ``[num_experts, outputs, inputs]``.
      groups: the pairs by expert.
      per_row: pairs of a row of x, or None if x is in the order of experts.

    Returns:
      ``[pairs, outputs]`` in the order of experts, in the dtype of x. Places of padding are
      undefined.
    """
    rows = x if per_row is None else x[(groups.sources // per_row).long()]
    out = x.new_zeros(len(groups.sources), weights.shape[1])
    starts = groups.starts.tolist()
    for expert, (start, end) in enumerate(itertools.pairwise(starts)):
        product = rows[start:end].to(torch.float32) @ weights[expert].to(torch.float32).T
        out[start:end] = product.to(x.dtype)
    return out


def combine(results: Tensor, places: Tensor, routes: Routes, num_experts: int) -> Tensor:
    """Return the results of all rows, ``[rows, outputs]`` in the dtype of the results.

    Args:
      results: ``[pairs, outputs]`` in the order of experts.
      places: int32 ``[pairs]``, the place of each pair.
      routes: the experts of each row, and their shares.
      num_experts: number of experts, which marks rows of padding.
    """
    rows, per_row = routes.experts.shape
    of_pairs = results[places.long()].view(rows, per_row, -1).to(torch.float32)
    total = torch.zeros(rows, results.shape[1], device=results.device)
    for rank in range(per_row):
        live = routes.experts[:, rank, None] < num_experts
        total += torch.where(live, of_pairs[:, rank] * routes.shares[:, rank, None], 0.0)
    return total.to(results.dtype)
