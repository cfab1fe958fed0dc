"""Weights of a Hugging Face checkpoint, fused as the decoder wants them."""

from __future__ import annotations

import hashlib
from dataclasses import dataclass
from pathlib import Path

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from backends.engine.config import ModelConfig
from backends.engine.linear import Linear
from backends.errors import CheckpointError
from backends.tokenizer import read_json


@dataclass(frozen=True, slots=True)
class LayerWeights:
    """One layer: queries, keys and values fused into one product, gate and up into another."""

    input_norm: Tensor
    qkv: Linear
    output: Linear
    mlp_norm: Tensor
    gate_up: Linear
    down: Linear


@dataclass(frozen=True, slots=True)
class Weights:
    """All weights of a decoder. `embedding` is [vocab_size, hidden_size]."""

    embedding: Tensor
    layers: tuple[LayerWeights, ...]
    final_norm: Tensor
    lm_head: Linear


class _Checkpoint:
    """Tensors by name, from one or more safetensors files."""

    def __init__(self, directory: Path, dtype: torch.dtype) -> None:
        self._directory = directory
        self._dtype = dtype
        self._files = _tensor_files(directory)

    def tensor(self, name: str, *shape: int) -> Tensor:
        """Return a tensor in the wanted dtype, checked against the shape."""
        if name not in self._files:
            raise CheckpointError(f"{self._directory}: tensor {name} is missing")
        path = self._files[name]
        with _open(path) as file:
            tensor: Tensor = file.get_tensor(name)
        if tuple(tensor.shape) != shape:
            raise CheckpointError(
                f"{path}: tensor {name} is {tuple(tensor.shape)}, config.json says {shape}"
            )
        return tensor.to(self._dtype)


def load_weights(directory: Path, config: ModelConfig, dtype: torch.dtype) -> Weights:
    """Load, convert, fuse and prepack the weights.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, or of the wrong shape.
    """
    checkpoint = _Checkpoint(directory, dtype)
    hidden, vocab = config.hidden_size, config.vocab_size
    embedding = checkpoint.tensor("model.embed_tokens.weight", vocab, hidden)
    head = (
        embedding if config.tied_embeddings else checkpoint.tensor("lm_head.weight", vocab, hidden)
    )
    return Weights(
        embedding,
        tuple(_load_layer(checkpoint, config, index) for index in range(config.num_layers)),
        checkpoint.tensor("model.norm.weight", hidden),
        Linear(head),
    )


def _load_layer(checkpoint: _Checkpoint, config: ModelConfig, index: int) -> LayerWeights:
    hidden, inner = config.hidden_size, config.intermediate_size
    queries, keys = config.num_heads * config.head_dim, config.num_kv_heads * config.head_dim
    prefix = f"model.layers.{index}"

    def weight(name: str, *shape: int) -> Tensor:
        return checkpoint.tensor(f"{prefix}.{name}.weight", *shape)

    qkv = [
        weight("self_attn.q_proj", queries, hidden),
        weight("self_attn.k_proj", keys, hidden),
        weight("self_attn.v_proj", keys, hidden),
    ]
    gate_up = [weight("mlp.gate_proj", inner, hidden), weight("mlp.up_proj", inner, hidden)]
    return LayerWeights(
        input_norm=weight("input_layernorm", hidden),
        qkv=Linear(torch.cat(qkv)),
        output=Linear(weight("self_attn.o_proj", hidden, queries)),
        mlp_norm=weight("post_attention_layernorm", hidden),
        gate_up=Linear(torch.cat(gate_up)),
        down=Linear(weight("mlp.down_proj", hidden, inner)),
    )


def checkpoint_hash(directory: Path) -> str:
    """Return 12 hex digits of SHA-256 over `config.json` and the weight files."""
    digest = hashlib.sha256()
    for path in [directory / "config.json", *sorted(set(_tensor_files(directory).values()))]:
        with path.open("rb") as file:
            digest.update(hashlib.file_digest(file, "sha256").digest())
    return digest.hexdigest()[:12]


def count_parameters(directory: Path) -> int:
    """Return the number of weights in the checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged.
    """
    total = 0
    for name, path in _tensor_files(directory).items():
        with _open(path) as file:
            size = 1
            for length in file.get_slice(name).get_shape():
                size *= length
            total += size
    return total


def _tensor_files(directory: Path) -> dict[str, Path]:
    """Return which file holds which tensor."""
    index = directory / "model.safetensors.index.json"
    if index.is_file():
        weight_map = read_json(index).get("weight_map")
        if not isinstance(weight_map, dict):
            raise CheckpointError(f"damaged {index}: no weight_map")
        return {name: directory / str(file) for name, file in weight_map.items()}
    single = directory / "model.safetensors"
    if not single.is_file():
        raise CheckpointError(f"no weights: {single} does not exist, nor does {index.name}")
    with _open(single) as file:
        return dict.fromkeys(file.keys(), single)


def _open(path: Path) -> safe_open:
    try:
        return safe_open(str(path), framework="pt")
    except (OSError, SafetensorError) as error:
        raise CheckpointError(f"damaged or missing weights {path}: {error}") from error
