"""A query tower that starts from a language model, with low-rank updates of its weights.

ScalingNote (Huang et al., arXiv 2411.15766) starts both towers from one language model and trains
them with LoRA (Hu et al., arXiv 2106.09685).
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import LlamaModel

from training.towers.student import Texts, Vectors, pooled


class LowRank(nn.Module):
    """A frozen linear layer plus the product of two small matrices, which is 0 at first."""

    def __init__(self, layer: nn.Linear, rank: int) -> None:
        super().__init__()
        self.layer = layer
        self.down = nn.Parameter(torch.randn(rank, layer.in_features) / layer.in_features**0.5)
        self.up = nn.Parameter(torch.zeros(layer.out_features, rank))

    def forward(self, states: Tensor) -> Tensor:
        """Return the outputs of states, [..., in] -> [..., out]."""
        update = functional.linear(functional.linear(states, self.down), self.up)
        found: Tensor = self.layer(states) + update
        return found


class LanguageTower(nn.Module):
    """Means of the hidden states of a language model, and a dense layer.

    Args:
        size: entries of a vector.
        rank: rank of the updates of all linear layers.
    """

    def __init__(self, model: LlamaModel, size: int, rank: int) -> None:
        super().__init__()
        self.model = model.requires_grad_(False)
        for block in model.layers:
            for part in (block.self_attn, block.mlp):
                for name, layer in list(part.named_children()):
                    if isinstance(layer, nn.Linear):
                        setattr(part, name, LowRank(layer, rank))
        self.dense = nn.Linear(model.config.hidden_size, size)

    @torch.no_grad()
    def regress(self, states: Vectors, wanted: Vectors, ridge: float) -> None:
        """Set the dense layer to the ridge regression from states, [B, H], to vectors, [B, D]."""
        middle, target = states.mean(0), wanted.mean(0)
        inputs, outputs = states - middle, wanted - target
        gram = inputs.T @ inputs + ridge * len(inputs) * np.eye(states.shape[1], dtype=np.float32)
        weight = np.linalg.solve(gram, inputs.T @ outputs).T
        self.dense.weight.copy_(torch.from_numpy(weight))
        self.dense.bias.copy_(torch.from_numpy(target - weight @ middle))

    def states(self, texts: Texts) -> Tensor:
        """Return the mean hidden states of texts, [B, H]."""
        return pooled(self.model, texts)

    def forward(self, texts: Texts) -> Tensor:
        """Return the vectors of texts, [B, D], which are not normalised."""
        found: Tensor = self.dense(self.states(texts))
        return found

    def groups(self, rate: float) -> list[dict[str, object]]:
        """Return the updates and the dense layer for an optimiser."""
        return [{"params": [p for p in self.parameters() if p.requires_grad], "lr": rate}]
