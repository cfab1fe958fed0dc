"""Reads the tokenizer of a checkpoint."""

from __future__ import annotations

from pathlib import Path

from draftgate.backends.engine.config import ModelConfig
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer


def read_tokenizer(directory: Path, model: ModelConfig) -> Tokenizer:
    """Return the tokenizer of a model.

    Raises:
        CheckpointError: the tokenizer is missing or damaged, or has ids beyond the model's
            vocabulary.
    """
    tokenizer = Tokenizer(directory)
    if tokenizer.vocab_size > model.vocab_size:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'}: the tokenizer's largest id is "
            f"{tokenizer.vocab_size - 1}, but config.json has vocab_size {model.vocab_size}"
        )
    return tokenizer
