"""Loads the draft model of a worker: a smaller model, or an EAGLE-3 head."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

import torch

from draftgate.backends.checkpoints import (
    SHIPPED_DRAFT,
    SHIPPED_DRAFT_WINDOW,
    find_checkpoint,
    is_shipped_model,
)
from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.config import ModelConfig, read_model_config
from draftgate.backends.engine.eagle.config import check_target, is_head, read_head_config
from draftgate.backends.engine.eagle.head import EagleHead
from draftgate.backends.engine.eagle.weights import load_head_weights
from draftgate.backends.engine.model import Decoder
from draftgate.backends.engine.quantisation.packed import choose_packing
from draftgate.backends.engine.weights import Weights, load_weights
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import Tokenizer
from draftgate.backends.worker_config import WorkerConfig


class LoadedDraft(NamedTuple):
    """The draft model or the head of a worker, or neither.

    Attributes:
        directory: its checkpoint, or None without one.
        checkpoint_hash: identifies its weights, and is empty without any.
    """

    decoder: Decoder | None = None
    head: EagleHead | None = None
    directory: Path | None = None
    checkpoint_hash: str = ""

    @property
    def models(self) -> tuple[Decoder | None, EagleHead | None]:
        """The draft model and the head."""
        return self.decoder, self.head

    def format_class(self, numerics_class: str) -> str:
        """Return the numerics class of KV blocks, which hold features of the head."""
        if self.head is None:
            return numerics_class
        return f"{numerics_class}/eagle-{self.checkpoint_hash}"


def find_draft(config: WorkerConfig) -> Path | None:
    """Return the directory of a worker's draft model or head, or None without one."""
    if config.draft_model is None:
        return SHIPPED_DRAFT if is_shipped_model(config.model) else None
    return find_checkpoint(config.draft_model)


def draft_proposer(directory: Path | None) -> str | None:
    """Return the proposer that runs a draft model or head, or None without one."""
    if directory is None:
        return None
    return "eagle" if is_head(directory) else "draft_model"


def load_draft(
    config: WorkerConfig,
    directory: Path | None,
    model: ModelConfig,
    weights: Weights,
    tokenizer: Tokenizer,
    max_model_len: int,
) -> LoadedDraft:
    """Return the draft model or the head of a worker, in the target's dtype and on its device.

    The result has neither if the worker has none, or if another proposer is chosen.

    Args:
        config: the worker's settings.
        directory: directory of the draft model or head.
        model, weights, tokenizer: the target.
        max_model_len: maximum tokens of a sequence.

    Raises:
        CheckpointError: the draft model or head cannot be loaded, or does not fit the target.
    """
    kind = draft_proposer(directory)
    if directory is None or config.proposer not in {None, kind}:
        return LoadedDraft()
    if kind == "eagle":
        head = _head(directory, model, weights, max_model_len, config.draft_window_tokens)
        return LoadedDraft(head=head, directory=directory, checkpoint_hash=head.checkpoint_hash)
    dtype, device = weights.embedding.dtype, weights.embedding.device
    quantization, window = config.quantization, _window(config)
    own, read = _draft_weights(directory, tokenizer, dtype, device, window, quantization)
    draft = Decoder(own, read, max_model_len)
    if device.type == "cpu":
        draft.compile_products()
    return LoadedDraft(draft, directory=directory, checkpoint_hash=read.checkpoint_hash)


def _draft_weights(
    directory: Path,
    target: Tokenizer,
    dtype: torch.dtype,
    device: torch.device,
    window: int | None,
    quantization: str,
) -> tuple[ModelConfig, Weights]:
    """Load the draft model.

    Args:
        window: attention window of each layer in tokens, or None for the model's own windows.
        quantization: as in `choose_packing`.

    Raises:
        CheckpointError: the draft model cannot be loaded, or its vocabulary differs from the
            target's.
    """
    model = read_model_config(directory)
    tokenizer = read_tokenizer(directory, model)
    if tokenizer.vocabulary != target.vocabulary:
        raise CheckpointError(
            f"{directory / 'tokenizer.json'}: the draft model's vocabulary differs from the "
            "model's; choose a draft model with the same tokenizer"
        )
    if window is not None:
        model = replace(model, windows=tuple(min(w or window, window) for w in model.windows))
    packing = choose_packing(quantization, Checkpoint(directory), device.type, dtype)
    return model, load_weights(directory, model, dtype, device=device, packing=packing)


def _head(
    directory: Path, model: ModelConfig, weights: Weights, max_model_len: int, window: int | None
) -> EagleHead:
    """Load an EAGLE-3 head for a model in the model's dtype and on its device.

    Args:
        window: attention window of the head in tokens, or None for no limit.

    Raises:
        CheckpointError: the head cannot be loaded, or does not fit the model.
    """
    shape = read_head_config(directory)
    check_target(shape, model, directory)
    if window is not None:
        shape = replace(shape, model=replace(shape.model, windows=(window,)))
    embedding = weights.embedding
    loaded = load_head_weights(directory, shape, weights, embedding.dtype, embedding.device)
    head = EagleHead(shape, loaded, max_model_len)
    if head.device.type == "cpu":
        head.compile_products()
    return head


def _window(config: WorkerConfig) -> int | None:
    """Return the attention window of the draft model in tokens, or None for no limit."""
    if config.draft_window_tokens is not None or config.draft_model is not None:
        return config.draft_window_tokens
    return SHIPPED_DRAFT_WINDOW


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
