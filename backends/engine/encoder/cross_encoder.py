"""The head of a cross-encoder, which scores a pair of texts.

A checkpoint for sequence classification maps the state of the first token by a dense layer with
tanh, and then by a classifier. With one label, the activation of its logit is the score. These
layers have the form of the modules of a sentence, so a score is an embedding of one dimension.
"""

from __future__ import annotations

import reprlib
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Final

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import Checkpoint
from draftgate.backends.engine.encoder.sentence import (
    Dense,
    SentenceModules,
    activation_of,
    digest_of,
    load_linear,
    max_text_tokens,
    read_prompts,
)
from draftgate.backends.engine.fields import Fields
from draftgate.backends.engine.pooling import read_modules
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json

HEADS: Final[Mapping[str, tuple[str, str]]] = {
    "BertForSequenceClassification": ("bert.pooler.dense", "classifier"),
    "RobertaForSequenceClassification": ("classifier.dense", "classifier.out_proj"),
    "XLMRobertaForSequenceClassification": ("classifier.dense", "classifier.out_proj"),
}
"""The names of the dense layer and of the classifier, by architecture."""

SETTINGS: Final = "config_sentence_transformers.json"


def find_head(directory: Path) -> str | None:
    """Return the architecture of a checkpoint with a classification head, or None without a head.

    Raises:
        CheckpointError: the engine does not support the head, or `config.json` is damaged.
    """
    path = directory / "config.json"
    listed = read_json(path).get("architectures") or []
    if not isinstance(listed, list):
        raise CheckpointError(f"{path}: architectures must be a list, not {reprlib.repr(listed)}")
    names = [str(name) for name in listed]
    heads = [name for name in names if name.endswith("ForSequenceClassification")]
    if heads and heads[0] not in HEADS:
        raise CheckpointError(
            f"{path}: the engine does not support {heads[0]}; supported: {', '.join(HEADS)}"
        )
    return heads[0] if heads else None


def read_head(
    directory: Path, head: str, hidden_size: int, device: torch.device
) -> SentenceModules:
    """Read the head of a cross-encoder.

    Args:
        head: one of `HEADS`.

    Raises:
        CheckpointError: a file or tensor is missing or damaged, or the engine does not support the
            head.
    """
    checkpoint, (dense, classifier) = Checkpoint(directory), HEADS[head]
    weight = checkpoint.tensors.get(f"{classifier}.weight")
    if weight is not None and weight.shape[0] != 1:
        raise CheckpointError(
            f"{weight.path}: the head of a cross-encoder must have one label, not {weight.shape[0]}"
        )
    if len(read_modules(directory / "modules.json")) > 1 or "" in dict(read_prompts(directory)):
        raise CheckpointError(
            f"{directory}: the engine does not support modules after a classification head, or a "
            "default prompt of a cross-encoder"
        )
    square, row = (hidden_size, hidden_size), (1, hidden_size)
    layers = (
        Dense(load_linear(checkpoint, dense, square, device), torch.tanh),
        Dense(load_linear(checkpoint, classifier, row, device), _activation(directory)),
    )
    digest = digest_of([directory / SETTINGS])
    return SentenceModules("cls_token", layers, _max_tokens(directory), digest)


def _activation(directory: Path) -> Callable[[Tensor], Tensor]:
    """Return the function of the logit, by default that of sentence-transformers for one label.

    The field with its name depends on the version of sentence-transformers.
    """
    config, settings = directory / "config.json", directory / SETTINGS
    fields = Fields(read_json(config), str(config))
    for section, name in (
        (Fields(read_json(settings, missing={}), str(settings)), "activation_fn"),
        (fields.section("sentence_transformers"), "activation_fn"),  # version 4
        (fields, "sbert_ce_default_activation_function"),  # before version 4
    ):
        if name in section:
            return activation_of(section, name, str(section.get(name)))
    return torch.sigmoid


def _max_tokens(directory: Path) -> int | None:
    """Return the maximum length of a pair in tokens, or None for the limit of the encoder."""
    settings = read_json(directory / "tokenizer_config.json", missing={})
    limits = (max_text_tokens(directory), settings.get("model_max_length"))
    # Tokenizers without a limit have one of 1e30.
    known = [limit for limit in limits if isinstance(limit, int) and limit > 0]
    return min(known, default=None)
