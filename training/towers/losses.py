"""Contrastive loss and distillation of the towers."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional

MOST_SCALE = 50.0
"""Limit of the learned scale, as in CLIP (there 100). Larger scales overfit to the hardest
passages of a batch."""


def contrastive(queries: Tensor, passages: Tensor, log_scale: Tensor) -> Tensor:
    """Return the symmetric cross-entropy of a batch (InfoNCE) in nats.

    Args:
        queries: unit vectors [B, D].
        passages: unit vectors [B, D]. Each row answers the same row of queries.
        log_scale: logarithm of the factor of the cosines.
    """
    scores = queries @ passages.T * log_scale.exp().clamp(max=MOST_SCALE)
    labels = torch.arange(len(scores))
    rows = functional.cross_entropy(scores, labels)
    return (rows + functional.cross_entropy(scores.T, labels)) / 2


def distillation(student: Tensor, teacher: Tensor, passages: Tensor, scale: float) -> Tensor:
    """Return how far a query tower is from its teacher.

    The first term is the squared distance of unit vectors. The second one is the KL of their
    distributions over passages, in nats.

    Args:
        student, teacher: unit vectors of the same queries [B, D].
        passages: unit vectors of passages [P, D].
        scale: factor of the cosines.
    """
    wanted = torch.log_softmax(teacher @ passages.T * scale, -1)
    found = torch.log_softmax(student @ passages.T * scale, -1)
    kl = functional.kl_div(found, wanted, reduction="batchmean", log_target=True)
    return (student - teacher).pow(2).sum(-1).mean() + kl
