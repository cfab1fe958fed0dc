"""The modules after an encoder, from the configuration of sentence-transformers.

A checkpoint in the layout of sentence-transformers lists its modules in `modules.json`: the
transformer, a pooling, any number of dense layers, and a normalisation. The gateway normalises
every embedding, so the engine skips that module. A checkpoint without this file gets mean pooling,
as in sentence-transformers.
"""

from __future__ import annotations

import hashlib
import reprlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import torch
from torch import Tensor

from draftgate.backends.engine.checkpoint import Checkpoint, TensorReader
from draftgate.backends.engine.fields import Fields
from draftgate.backends.engine.linear import Linear, padded_rows
from draftgate.backends.engine.pooling import (
    DEFAULT_MODE,
    LAST_TOKEN,
    pooling_modes,
    read_modules,
)
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json

MODES: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "cls_token": lambda states: states[0],
    DEFAULT_MODE: lambda states: states.mean(0),
    LAST_TOKEN: lambda states: states[-1],
}
"""Functions that pool the states of a text, [tokens, hidden_size], by their mode."""

_ACTIVATIONS: Final[dict[str, Callable[[Tensor], Tensor]]] = {
    "Identity": lambda x: x,
    "Tanh": torch.tanh,
    "GELU": torch.nn.functional.gelu,
    "ReLU": torch.relu,
    "Sigmoid": torch.sigmoid,
}
"""The activations of dense layers, by the names of their classes in `torch.nn`."""

TRANSFORMER_FILES: Final = ("sentence_bert_config.json", "sentence_xlm-roberta_config.json")

_KINDS: Final = ("Transformer", "Pooling", "Dense", "Normalize")
"""The modules in their order."""


@dataclass(frozen=True, slots=True)
class Dense:
    """A dense layer after the pooling."""

    linear: Linear
    activation: Callable[[Tensor], Tensor]


@dataclass(frozen=True, slots=True)
class SentenceModules:
    """The modules after the transformer.

    Attributes:
        mode: one of `MODES`.
        dense: dense layers in order.
        max_tokens: the longest text in tokens, or None for the limit of the encoder.
        digest: 12 hex digits that identify the modules by the contents of their files.
    """

    mode: str
    dense: tuple[Dense, ...]
    max_tokens: int | None
    digest: str

    def pool(self, states: Tensor) -> Tensor:
        """Return the embedding of a text, float32 [embedding_size], not normalised.

        Args:
            states: last hidden states, [tokens, hidden_size].
        """
        pooled = MODES[self.mode](states.float())
        for layer in self.dense:
            rows = pooled.expand(padded_rows(1), -1).contiguous()
            pooled = layer.activation(layer.linear(rows)[0])
        return pooled

    def size(self, hidden_size: int) -> int:
        """Return the dimensions of an embedding."""
        return self.dense[-1].linear.out_features if self.dense else hidden_size


def read_sentence_modules(
    directory: Path, hidden_size: int, device: torch.device
) -> SentenceModules:
    """Read the modules of a checkpoint.

    Raises:
        CheckpointError: a file is missing or damaged, or the engine does not support a module.
    """
    listed = directory / "modules.json"
    pooling, dense, width, stage = "1_Pooling", [], hidden_size, 0
    files = [listed, *(directory / name for name in TRANSFORMER_FILES)]
    for module in read_modules(listed):
        kind, path = str(module.get("type", "")).rpartition(".")[2], str(module.get("path", ""))
        if kind not in _KINDS or _KINDS.index(kind) < stage:
            raise CheckpointError(
                f"{listed}: the engine does not support module {reprlib.repr(kind)} at this place; "
                f"supported: {', '.join(_KINDS)}, in this order"
            )
        stage = _KINDS.index(kind)
        if kind == "Pooling":
            pooling = path
        elif kind == "Dense":
            place = _folder(listed, path)
            dense.append(_read_dense(place, width, device))
            width = dense[-1].linear.out_features
            files += [place / "config.json", place / "model.safetensors"]
    settings = _folder(listed, pooling) / "config.json"
    mode = _pooling_mode(settings)
    return SentenceModules(
        mode, tuple(dense), max_text_tokens(directory), digest_of([*files, settings])
    )


def _folder(listed: Path, path: str) -> Path:
    """Return the folder of a module. An untrusted file must not name one outside the checkpoint."""
    if path in {"", ".."} or Path(path).name != path:
        raise CheckpointError(f"{listed}: {reprlib.repr(path)} is not a folder of the checkpoint")
    return listed.parent / path


def _pooling_mode(path: Path) -> str:
    settings = read_json(path, missing={})
    modes = pooling_modes(settings)
    if len(modes) != 1 or modes[0] not in MODES:
        raise CheckpointError(
            f"{path}: the engine does not support pooling by {' and '.join(modes)}; "
            f"supported: {', '.join(MODES)}"
        )
    if settings.get("include_prompt") is False:
        raise CheckpointError(f"{path}: include_prompt must be true, because prompts are pooled")
    return modes[0]


def _read_dense(directory: Path, width: int, device: torch.device) -> Dense:
    path = directory / "config.json"
    fields = Fields(read_json(path), str(path))
    inputs, outputs = fields.count("in_features"), fields.count("out_features")
    if inputs != width:
        raise fields.error("in_features", f"must be {width}, not {inputs}")
    named = str(fields.get("activation_function") or "torch.nn.modules.activation.Tanh")
    activation = activation_of(fields, "activation_function", named)
    bias, shape = fields.flag("bias", default=True), (outputs, inputs)
    linear = load_linear(Checkpoint(directory), "linear", shape, device, bias=bias)
    return Dense(linear, activation)


def activation_of(fields: Fields, field: str, named: str) -> Callable[[Tensor], Tensor]:
    """Return the activation of a class of `torch.nn`.

    Args:
        field: the field with the name of the class.

    Raises:
        CheckpointError: the engine does not support the activation.
    """
    activation = _ACTIVATIONS.get(named.rpartition(".")[2])
    if activation is None:
        known = ", ".join(_ACTIVATIONS)
        raise fields.error(field, f"{reprlib.repr(named)} is not one of {known}")
    return activation


def load_linear(
    checkpoint: Checkpoint,
    name: str,
    shape: tuple[int, int],
    device: torch.device,
    *,
    bias: bool = True,
) -> Linear:
    """Load a linear layer in float32.

    Args:
        shape: outputs and inputs.

    Raises:
        CheckpointError: a tensor is missing, damaged, or of the wrong shape or dtype.
    """
    shapes: dict[str, tuple[int, ...]] = {f"{name}.weight": shape}
    if bias:
        shapes[f"{name}.bias"] = shape[:1]
    checkpoint.require(shapes)
    with TensorReader(checkpoint, torch.float32, lambda _bytes: None) as reader:
        return Linear(*(reader.read([each]).to(device) for each in shapes))


def max_text_tokens(directory: Path) -> int | None:
    """Return the maximum length of a text in tokens, or None for the limit of the encoder.

    Raises:
        CheckpointError: a file is damaged.
    """
    for name in TRANSFORMER_FILES:
        path = directory / name
        fields = Fields(read_json(path, missing={}), str(path))
        if "max_seq_length" in fields:
            return fields.count("max_seq_length")
    return None


def digest_of(paths: list[Path]) -> str:
    """Return 12 hex digits that identify files by name and content, whether or not they exist."""
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.name.encode() + b"\0")
        if path.is_file():
            digest.update(hashlib.sha256(path.read_bytes()).digest())
    return digest.hexdigest()[:12]


def read_prompts(directory: Path) -> tuple[tuple[str, str], ...]:
    """Return the prompts of a checkpoint, as in `ModelCard.prompts`.

    `config_sentence_transformers.json` names prompts freely. The names are those that
    sentence-transformers tries for queries and documents, and the task names of Nomic's models.

    Raises:
        CheckpointError: the file is damaged.
    """
    path = directory / "config_sentence_transformers.json"
    settings = read_json(path, missing={})
    prompts: Any = settings.get("prompts") or {}
    if not isinstance(prompts, dict) or not all(isinstance(p, str) for p in prompts.values()):
        raise CheckpointError(f"{path}: prompts must be an object of texts")
    default = settings.get("default_prompt_name")
    if default is not None and not (isinstance(default, str) and default in prompts):
        raise CheckpointError(f"{path}: default_prompt_name {default!r} is not one of the prompts")
    names = {
        "": [default],
        "query": ["query", "search_query", default],
        "document": ["document", "passage", "corpus", "search_document", default],
    }
    chosen = {kind: [prompts[n] for n in some if prompts.get(n)] for kind, some in names.items()}
    return tuple((kind, some[0]) for kind, some in chosen.items() if some)
