"""Target: GGUF files, with mutations of their metadata and of the descriptions of tensors."""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.errors import CheckpointError
from draftgate.backends.generation_defaults import read_generation_defaults
from draftgate.backends.gguf.folder import settings_folder
from draftgate.backends.tokenizer import Tokenizer
from tests.fuzz.gguf_trees import parsed
from tests.fuzz.mutation import Form
from tests.fuzz.target import Target
from tests.gguf.files import Pair, Tensor, header

MOST_VALUES = 1 << 18
"""Tensors up to this size are read."""


def read_model(data: bytes) -> None:
    """Read everything that serving reads."""
    with TemporaryDirectory() as name:
        path = Path(name) / "model.gguf"
        path.write_bytes(data)
        read_folder(settings_folder(path, Path(name) / "cache"))


def read_folder(folder: Path) -> ModelConfig:
    """Read everything of a model, except large tensors, and return its config."""
    config = read_model_config(folder)
    read_generation_defaults("auto", folder)
    tokenizer = Tokenizer(folder)
    tokenizer.decode(tokenizer.encode("ab <|end|> \U0001f600"))
    checkpoint = Checkpoint(folder)
    assert checkpoint.num_parameters >= 0
    with TensorReader(checkpoint, torch.float32, lambda _: None) as reader:
        for tensor, stored in checkpoint.tensors.items():
            if torch.Size(stored.shape).numel() <= MOST_VALUES:
                assert reader.read([tensor]).shape == stored.shape
    return config


def _decoded(data: bytes) -> list[Any]:
    model = parsed(data)
    pairs, tensors = map(list, model.pairs), map(list, model.tensors)
    return [model.version, list(pairs), list(tensors), model.data.decode("latin-1")]


def _encoded(tree: list[Any]) -> bytes:
    version, metadata, described, rest = tree
    pairs, tensors = [Pair(*one) for one in metadata], [Tensor(*one) for one in described]
    return header(pairs, tensors, version=version) + rest.encode("latin-1")


GGUF = Form(_decoded, _encoded)

TARGETS = [Target("gguf", read_model, (CheckpointError,), GGUF)]
