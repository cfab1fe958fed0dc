"""An EAGLE-3 head with random weights for a tiny model of one layer."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import Tensor

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.engine.eagle.config import HeadConfig
from draftgate.backends.engine.eagle.head import EagleHead
from draftgate.backends.engine.eagle.weights import HeadWeights
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.weights import Weights
from tests.engine.tiny_model import VOCAB


def tiny_head(config: ModelConfig, weights: Weights) -> EagleHead:
    """Return a random head that drafts every second token, on the device of the weights, with exact
    products."""
    device = weights.embedding.device
    generator = torch.Generator().manual_seed(3)

    def random(*shape: int) -> Tensor:
        return (torch.randn(shape, generator=generator) / shape[-1] ** 0.5).to(device)

    hidden = config.hidden_size
    (layer,) = weights.layers
    own = torch.arange(0, VOCAB, 2, device=device)
    parts = HeadWeights(
        fuse=Linear(random(hidden, 3 * hidden), exact=True),
        hidden_norm=1 + random(hidden),
        layer=replace(layer, qkv=Linear(random(layer.qkv.out_features, 2 * hidden), exact=True)),
        final_norm=1 + random(hidden),
        lm_head=Linear(random(len(own), hidden), exact=True),
        embedding=weights.embedding,
        token_ids=own,
        checkpoint_hash="",
    )
    return EagleHead(HeadConfig(config, len(own), hidden, (0, 1, 1), False), parts, 64)
