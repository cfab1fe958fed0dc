"""EAGLE-3 heads with random weights in the layouts of published checkpoints, and their arithmetic
in plain torch."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor
from torch.nn import functional

from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import ModelConfig, read_model_config

DRAFT_TOKENS = 1500
EPS = 1e-5
THETA = 10000.0

Change = Callable[[dict[str, Any], dict[str, Tensor]], None]
"""Changes the config and the tensors of a head before they are written."""


def write_head(folder: Path, change: Change | None = None, seed: int = 0) -> Path:
    """Write a random head for the shipped model, in the layout of SGLang."""
    target = read_model_config(SHIPPED_MODEL)
    generator = torch.Generator().manual_seed(seed)

    def random(*shape: int) -> Tensor:
        return torch.randn(shape, generator=generator) / shape[-1] ** 0.5

    def norm() -> Tensor:
        return 1 + 0.1 * torch.randn(target.hidden_size, generator=generator)

    tensors = _layer(target, random, norm)
    own = torch.randperm(target.vocab_size, generator=generator)[:DRAFT_TOKENS].sort().values
    mask = torch.zeros(target.vocab_size, dtype=torch.bool)
    mask[own] = True
    tensors |= {
        "fc.weight": random(target.hidden_size, 3 * target.hidden_size),
        "norm.weight": norm(),
        "lm_head.weight": 4 * random(DRAFT_TOKENS, target.hidden_size),
        "d2t": own - torch.arange(DRAFT_TOKENS),
        "t2d": mask,
    }
    config = {
        "architectures": ["LlamaForCausalLMEagle3"],
        "model_type": "llama",
        "hidden_size": target.hidden_size,
        "intermediate_size": 96,
        "num_hidden_layers": 1,
        "num_attention_heads": 8,
        "num_key_value_heads": 4,
        "head_dim": 32,
        "rms_norm_eps": EPS,
        "rope_theta": THETA,
        "vocab_size": target.vocab_size,
        "draft_vocab_size": DRAFT_TOKENS,
    }
    if change is not None:
        change(config, tensors)
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file(tensors, folder / "model.safetensors")
    return folder


def _layer(
    target: ModelConfig, random: Callable[..., Tensor], norm: Callable[[], Tensor]
) -> dict[str, Tensor]:
    hidden = target.hidden_size
    products = {
        "self_attn.q_proj": (256, 2 * hidden),
        "self_attn.k_proj": (128, 2 * hidden),
        "self_attn.v_proj": (128, 2 * hidden),
        "self_attn.o_proj": (hidden, 256),
        "mlp.gate_proj": (96, hidden),
        "mlp.up_proj": (96, hidden),
        "mlp.down_proj": (hidden, 96),
    }
    norms = ("input_layernorm", "hidden_norm", "post_attention_layernorm")
    layer = {name: random(*shape) for name, shape in products.items()}
    layer |= {name: norm() for name in norms}
    return {f"midlayer.{name}.weight": tensor for name, tensor in layer.items()}


@dataclass
class ReferenceHead:
    """The published arithmetic of a head, which recomputes all rows in every call.

    Attributes:
        tensors: the head's tensors by their published names.
        embedding: [vocab_size, hidden_size].
        norm_first: whether the layer adds to the normalised hidden state.
        window: number of rows that a row attends to, or None for all earlier rows.
    """

    tensors: Mapping[str, Tensor]
    embedding: Tensor
    norm_first: bool = False
    window: int | None = None

    def features(self, tapped: list[Tensor]) -> Tensor:
        return self._product("fc", torch.cat(tapped, -1))

    def rows(self, token_ids: list[int], features: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden state of every row and its logits over the head's tokens.

        Args:
            token_ids: the token of each row.
            features: a feature or an earlier hidden state for each row.
        """
        embedded = self.embedding[torch.tensor(token_ids)]
        normed = self._norm("midlayer.hidden_norm", features)
        residual = normed if self.norm_first else features
        pairs = torch.cat([self._norm("midlayer.input_layernorm", embedded), normed], -1)
        hidden = residual + self._product("midlayer.self_attn.o_proj", self._attend(pairs))
        inner = self._norm("midlayer.post_attention_layernorm", hidden)
        gate = functional.silu(self._product("midlayer.mlp.gate_proj", inner))
        up = self._product("midlayer.mlp.up_proj", inner)
        hidden = hidden + self._product("midlayer.mlp.down_proj", gate * up)
        return hidden, self._product("lm_head", self._norm("norm", hidden))

    def token_ids(self) -> Tensor:
        return self.tensors["d2t"] + torch.arange(len(self.tensors["d2t"]))

    def _attend(self, pairs: Tensor) -> Tensor:
        queries, keys, values = (
            self._product(f"midlayer.self_attn.{name}_proj", pairs)
            .view(len(pairs), -1, 32)
            .transpose(0, 1)
            for name in "qkv"
        )
        queries, keys = _rotated(queries), _rotated(keys)
        keys, values = (part.repeat_interleave(2, 0) for part in (keys, values))
        rows = torch.arange(len(pairs))
        distance = rows[:, None] - rows
        mask = (distance >= 0) & (distance < (self.window or len(pairs)))
        out = functional.scaled_dot_product_attention(queries, keys, values, mask)
        return out.transpose(0, 1).flatten(1)

    def _product(self, name: str, x: Tensor) -> Tensor:
        return functional.linear(x, self.tensors[f"{name}.weight"])

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return functional.rms_norm(x, x.shape[-1:], self.tensors[f"{name}.weight"], EPS)


def _rotated(x: Tensor) -> Tensor:
    """Rotate [heads, rows, 32] by the positions of the rows."""
    rates = THETA ** (-torch.arange(0, 32, 2) / 32)
    angles = torch.arange(x.shape[1])[:, None] * rates
    angles = torch.cat([angles, angles], -1)
    low, high = x.chunk(2, -1)
    return x * angles.cos() + torch.cat([-high, low], -1) * angles.sin()


def repeating(config: dict[str, Any], tensors: dict[str, Tensor]) -> None:
    """Change a head into one that drafts what the target's last layer predicted a token earlier."""
    target = load_file(SHIPPED_MODEL / "model.safetensors")
    own = tensors["d2t"] + torch.arange(len(tensors["d2t"]))
    width = config["hidden_size"]
    config["eagle_aux_hidden_state_layer_ids"] = [1, 3, 6]
    tensors["fc.weight"] = torch.cat([torch.zeros(width, 2 * width), torch.eye(width)], 1)
    tensors["midlayer.self_attn.o_proj.weight"] *= 0.1
    tensors["midlayer.mlp.down_proj.weight"] *= 0.1
    tensors["norm.weight"] = target["model.norm.weight"].float()
    tensors["lm_head.weight"] = target["model.embed_tokens.weight"].float()[own]
