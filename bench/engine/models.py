"""The measured models, which are checkpoints or shapes with random weights."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Final, Protocol

import torch
from safetensors.torch import save_file

from bench.engine.random_model import (
    LEAST_PROMPT,
    MOST_PROMPT,
    SHAPES,
    RandomModel,
    arbitrary_prompts,
)
from bench.harness.prompts import held_out_prompts
from draftgate.backends.checkpoints import SHIPPED_MODEL
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.weights import Weights, layer_shapes, load_weights
from draftgate.backends.tokenizer import Tokenizer

SHAPE_82M: Final[dict[str, Any]] = {
    "vocab_size": 32000,
    "hidden_size": 768,
    "intermediate_size": 2048,
    "num_hidden_layers": 9,
    "num_attention_heads": 12,
    "num_key_value_heads": 4,
    "max_position_embeddings": 8192,
    "tie_word_embeddings": True,
}

SHARDS: Final = 2

SHIPPED: Final = "shipped"
FILED_SHAPE: Final = "random-82m"
MODELS: Final = {"cpu": (SHIPPED, FILED_SHAPE), "cuda": ("random-8b", "random-1b", SHIPPED)}
"""The default models by type of device. The first model gives the profile."""


class Model(Protocol):
    """A model in a single dtype on a single device."""

    @property
    def name(self) -> str:
        """Name of the model in results."""
        ...

    @property
    def config(self) -> ModelConfig:
        """Shape of the model."""
        ...

    @property
    def dtype(self) -> torch.dtype:
        """Dtype of the model's computations."""
        ...

    @property
    def device(self) -> torch.device:
        """Device of the model's weights."""
        ...

    @property
    def tokenizer(self) -> Tokenizer:
        """Tokenizer of the model, or of the shipped model."""
        ...

    @property
    def directory(self) -> Path | None:
        """A checkpoint that a worker can load, or None if weights or tokenizer are missing."""
        ...

    def weights(self, *, exact: bool) -> Weights:
        """Return the weights, for exact or plain products."""
        ...

    def transformers(self) -> Any:
        """Return a new `transformers` model with the same weights.

        Raises:
            ImportError: `transformers` is not installed.
        """
        ...

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        """Return prompts of `LEAST_PROMPT` to `MOST_PROMPT` tokens, identical in each call."""
        ...


@dataclass(frozen=True)
class StoredModel:
    """A model from a checkpoint."""

    name: str
    path: Path
    dtype: torch.dtype
    device: torch.device

    @cached_property
    def config(self) -> ModelConfig:
        return read_model_config(self.path)

    @property
    def directory(self) -> Path | None:
        return self.path if (self.path / "tokenizer.json").is_file() else None

    @cached_property
    def tokenizer(self) -> Tokenizer:
        return Tokenizer(self.directory or SHIPPED_MODEL)

    def weights(self, *, exact: bool) -> Weights:
        return load_weights(self.path, self.config, self.dtype, device=self.device, exact=exact)

    def transformers(self) -> Any:
        from transformers import AutoModelForCausalLM

        model = AutoModelForCausalLM.from_pretrained(self.path, dtype=self.dtype)
        return model.to(self.device).eval()

    def prompts(self, count: int) -> list[tuple[int, ...]]:
        if self.directory is None:
            return arbitrary_prompts(self.config, count)
        return held_out_prompts(self.tokenizer, count, least=LEAST_PROMPT, most=MOST_PROMPT)


def make_model(name: str, folder: Path, dtype: torch.dtype, device: torch.device) -> Model:
    """Return a model by its name, or by the directory of a checkpoint.

    Args:
        folder: an empty folder for files of random models.

    Raises:
        SystemExit: the model is unknown.
    """
    if name in SHAPES:
        return RandomModel(name, folder, SHAPES[name], dtype, device)
    if name == FILED_SHAPE:
        return StoredModel(name, random_checkpoint(folder, **SHAPE_82M), dtype, device)
    path = SHIPPED_MODEL if name == SHIPPED else Path(name)
    if not path.is_dir():
        known = ", ".join((SHIPPED, FILED_SHAPE, *SHAPES))
        raise SystemExit(f"unknown model {name!r}: expected a directory or one of {known}")
    return StoredModel(name, path, dtype, device)


def random_checkpoint(directory: Path, **shape: object) -> Path:
    """Write a random Llama in bfloat16 shards, and return its directory."""
    raw = {
        "architectures": ["LlamaForCausalLM"],
        "model_type": "llama",
        "max_position_embeddings": 2048,
        "tie_word_embeddings": False,
        **shape,
    }
    (directory / "config.json").write_text(json.dumps(raw), encoding="utf-8")
    config = read_model_config(directory)
    matrix = (config.vocab_size, config.hidden_size)
    shapes = layer_shapes(config) | {"model.norm.weight": (config.hidden_size,)}
    shapes |= {"model.embed_tokens.weight": matrix}
    if not config.tied_embeddings:
        shapes |= {"lm_head.weight": matrix}
    names = sorted(shapes)
    per_shard = -(-len(names) // SHARDS)
    weight_map = {}
    for index in range(SHARDS):
        file = f"model-{index + 1:05}-of-{SHARDS:05}.safetensors"
        part = names[index * per_shard : (index + 1) * per_shard]
        tensors = {name: _random(shapes[name]) for name in part}
        save_file(tensors, directory / file, metadata={"format": "pt"})
        weight_map.update(dict.fromkeys(part, file))
    index_path = directory / "model.safetensors.index.json"
    index_path.write_text(json.dumps({"metadata": {}, "weight_map": weight_map}), encoding="utf-8")
    return directory


def _random(shape: tuple[int, ...]) -> torch.Tensor:
    return torch.empty(shape, dtype=torch.bfloat16).uniform_(-0.05, 0.05)
