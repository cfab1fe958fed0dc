"""The output layer and its loss in chunks, which avoids a [tokens, vocabulary] tensor."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

_CHUNK = 1024
"""Tokens per chunk: 1,024 x 4,096 float32 logits (16 MiB) stay near the cache."""


@dataclass(frozen=True)
class Teacher:
    """The source of distillation.

    Attributes:
        hidden: final hidden states, [N, D'].
        weight: output weight, [V, D'].
        share: share of KL in the loss.
    """

    hidden: Tensor
    weight: Tensor
    share: float


class _OutputLoss(torch.autograd.Function):
    """Mean cross-entropy (nats per token), blended with KL to a teacher if a teacher is given.

    Both terms have the gradient softmax(logits) - wanted, so the forward pass computes the
    gradient.
    """

    @staticmethod
    def forward(
        ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, teacher: Teacher | None
    ) -> Tensor:
        count = len(labels)
        low = weight.to(torch.bfloat16)
        grad_hidden = torch.empty_like(hidden)
        grad_weight = torch.zeros_like(weight)
        loss = torch.zeros((), dtype=torch.float64)
        for rows in (slice(at, at + _CHUNK) for at in range(0, count, _CHUNK)):
            part = hidden[rows].to(torch.bfloat16)
            log_probs = torch.log_softmax((part @ low.T).float(), -1)
            label = labels[rows, None]
            chosen = log_probs.gather(1, label)
            loss -= chosen.sum(dtype=torch.float64)
            grad = log_probs.exp_()
            if teacher is None:
                grad.scatter_add_(1, label, torch.full_like(chosen, -1.0))
            else:
                wanted = teacher.hidden[rows].to(torch.bfloat16) @ teacher.weight.T
                grad.sub_(torch.softmax(wanted.float(), -1), alpha=teacher.share)
                grad.scatter_add_(1, label, torch.full_like(chosen, teacher.share - 1.0))
            low_grad = grad.mul_(1.0 / count).to(torch.bfloat16)
            grad_hidden[rows] = (low_grad @ low).to(hidden.dtype)
            grad_weight += low_grad.T @ part
        ctx.save_for_backward(grad_hidden, grad_weight)
        return (loss / count).float()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor, None, None]:
        grad_hidden, grad_weight = ctx.saved_tensors
        return grad_hidden * grad, grad_weight * grad, None, None


def output_loss(
    hidden: Tensor, weight: Tensor, labels: Tensor, teacher: Teacher | None = None
) -> Tensor:
    """Return the mean cross-entropy in nats per token of hidden [N, D] with weight [V, D].

    With a teacher, the value is still the cross-entropy. The gradient is then that of `share`
    KL(teacher, student) + (1 - `share`) cross-entropy.
    """
    loss: Tensor = _OutputLoss.apply(hidden, weight, labels, teacher)
    return loss
