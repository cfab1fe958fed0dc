"""Recall of retrieval: the share of queries whose passage is among the best."""

from __future__ import annotations

from typing import Final

from torch import Tensor

CUTS: Final = (1, 5, 20)


def recall(scores: Tensor) -> dict[str, float]:
    """Return recall at `CUTS`.

    Args:
        scores: of each query and passage, [N, N]. Row n answers query n. Of equal scores, the right
            passage is last, so that constant scores find nothing.
    """
    right = scores.diagonal()[:, None]
    better = (scores >= right).sum(1) - 1
    return {str(cut): round((better < cut).float().mean().item(), 4) for cut in CUTS}
