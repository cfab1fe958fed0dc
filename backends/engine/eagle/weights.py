"""Loads the weights of an EAGLE-3 head.

Published heads name their layer `midlayer` or `layers.0`, with or without the prefix `model.`.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor

from draftgate.backends.engine.checkpoint import (
    BASE_PREFIX,
    Checkpoint,
    StoredTensor,
    TensorReader,
    checkpoint_hash,
)
from draftgate.backends.engine.eagle.config import TAPS, HeadConfig
from draftgate.backends.engine.linear import Linear
from draftgate.backends.engine.mlp import DenseMlp
from draftgate.backends.engine.numerics import CPU
from draftgate.backends.engine.operators.packed import PackedMatrix
from draftgate.backends.engine.stored_linear import FusedModules, read_linear
from draftgate.backends.engine.weights import LayerWeights, Weights, layer_products
from draftgate.backends.errors import CheckpointError

LAYER: Final = "layers.0."
FUSION: Final = "fc.weight"
_EMBEDDING: Final = "embed_tokens.weight"
_HEAD: Final = "lm_head.weight"
TO_TARGET, FROM_TARGET = "d2t", "t2d"
IGNORED: Final = "rotary_emb.inv_freq"
"""End of the name of a tensor that older checkpoints store and that the config determines."""


@dataclass(frozen=True, slots=True)
class HeadWeights:
    """The weights of a head.

    Attributes:
        fuse: the product of three hidden states of the target.
        hidden_norm: norm of the hidden state, beside the `input_norm` of the embedding.
        layer: the layer, whose `qkv` multiplies embedding and hidden state together.
        embedding: [vocab_size of the target, hidden_size].
        token_ids: the target's id of each of the head's tokens, int64 [draft_vocab_size].
        checkpoint_hash: identifies the head by its content.
    """

    fuse: Linear
    hidden_norm: Tensor
    layer: LayerWeights
    final_norm: Tensor
    lm_head: Linear
    embedding: Tensor | PackedMatrix
    token_ids: Tensor
    checkpoint_hash: str


def load_head_weights(
    directory: Path,
    config: HeadConfig,
    target: Weights,
    dtype: torch.dtype,
    device: torch.device = CPU,
) -> HeadWeights:
    """Load a head, which shares the target's embedding unless it has its own.

    Raises:
        CheckpointError: a file or tensor is missing, damaged, of the wrong shape, or unknown.
    """
    checkpoint = _open(directory)
    shapes = _shapes(config, checkpoint)
    checkpoint.require(shapes)
    _check_unknown(checkpoint, shapes, directory)
    with TensorReader(checkpoint, dtype, lambda _bytes: None) as reader:

        def matrix(name: str) -> Linear:
            return Linear(reader.read([name]).to(device))

        def norm(name: str) -> Tensor:
            return reader.read([f"{name}.weight"], torch.float32).to(device)

        qkv, output, gate_up, down = (
            read_linear(reader, modules, device, exact=False) for modules in _products(config)
        )
        return HeadWeights(
            fuse=matrix(FUSION),
            hidden_norm=norm(f"{LAYER}hidden_norm"),
            layer=LayerWeights(
                input_norm=norm(f"{LAYER}input_layernorm"),
                qkv=qkv,
                qk_norm=None,
                output=output,
                mlp_norm=norm(f"{LAYER}post_attention_layernorm"),
                mlp=DenseMlp(gate_up, down),
            ),
            final_norm=norm("norm"),
            lm_head=matrix(_HEAD),
            embedding=_embedding(reader, checkpoint, config, target, directory, device),
            token_ids=_token_ids(checkpoint, config, target.embedding.shape[0]).to(device),
            checkpoint_hash=checkpoint_hash(directory),
        )


def _open(directory: Path) -> Checkpoint:
    """Return the head's checkpoint with uniform tensor names.

    Raises:
        CheckpointError: the weights are missing, damaged, or in another format.
    """
    if not any(directory.glob("*.safetensors")) and any(directory.glob("*.bin")):
        raise CheckpointError(
            f"{directory}: the head has only *.bin files; convert them to model.safetensors "
            "(docs/guide/speculation.md, EAGLE-3 heads)"
        )
    return Checkpoint(directory, _plain)


def _plain(name: str) -> str:
    return name.removeprefix(BASE_PREFIX).replace("midlayer.", LAYER)


def _shapes(config: HeadConfig, checkpoint: Checkpoint) -> dict[str, tuple[int, ...]]:
    """Return the name and shape of every tensor of the head, except its token tables."""
    model, hidden = config.model, config.model.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        FUSION: (hidden, TAPS * config.target_hidden_size),
        "norm.weight": (hidden,),
        _HEAD: (config.draft_vocab_size, hidden),
    }
    for norm in ("input_layernorm", "hidden_norm", "post_attention_layernorm"):
        shapes[f"{LAYER}{norm}.weight"] = (hidden,)
    for modules in _products(config):
        shapes |= modules.shapes()
    if _EMBEDDING in checkpoint.tensors:
        shapes[_EMBEDDING] = (model.vocab_size, hidden)
    return shapes


def _products(config: HeadConfig) -> tuple[FusedModules, ...]:
    """Return the products of the layer. The first one multiplies embedding and hidden state."""
    first, *others = layer_products(config.model)
    first = replace(first, inputs=2 * config.model.hidden_size)
    return tuple(modules.below(LAYER) for modules in (first, *others))


def _check_unknown(
    checkpoint: Checkpoint, shapes: dict[str, tuple[int, ...]], directory: Path
) -> None:
    known = {*shapes, TO_TARGET, FROM_TARGET}
    unknown = [name for name in checkpoint.tensors if name not in known]
    for name in unknown:
        if not name.endswith(IGNORED):
            raise CheckpointError(
                f"{directory}: tensor {name} is not supported; supported: EAGLE-3 heads of one "
                "layer with fc, norm, lm_head, d2t, t2d and embed_tokens"
            )


def _embedding(
    reader: TensorReader,
    checkpoint: Checkpoint,
    config: HeadConfig,
    target: Weights,
    directory: Path,
    device: torch.device,
) -> Tensor | PackedMatrix:
    if _EMBEDDING in checkpoint.tensors:
        return reader.read([_EMBEDDING]).to(device)
    if target.embedding.shape[1] != config.model.hidden_size:
        raise CheckpointError(
            f"{directory}: tensor {_EMBEDDING} is missing, and the model's embedding has "
            f"{target.embedding.shape[1]} columns, not {config.model.hidden_size}"
        )
    return target.embedding


def _token_ids(checkpoint: Checkpoint, config: HeadConfig, vocab_size: int) -> Tensor:
    """Return the target's ids of the head's tokens.

    `d2t` stores the difference between the two ids. `t2d` says which of the target's tokens the
    head has.

    Raises:
        CheckpointError: the tables are missing, damaged, or contradict each other.
    """
    own = torch.arange(config.draft_vocab_size)
    stored = checkpoint.tensors.get(TO_TARGET)
    if stored is None:
        if config.draft_vocab_size == vocab_size:
            return own
        raise CheckpointError(f"the head lacks the tensor {TO_TARGET}, its table of token ids")
    if stored.shape != own.shape or stored.dtype not in {"I64", "I32"}:
        raise CheckpointError(
            f"{stored.path}: tensor {TO_TARGET} must be {len(own)} integers, "
            f"not {stored.dtype} of shape {stored.shape}"
        )
    token_ids = own + _read(stored).long()
    inside = bool(((token_ids >= 0) & (token_ids < vocab_size)).all())
    if not inside or len(token_ids.unique()) != len(token_ids):
        raise CheckpointError(
            f"{stored.path}: tensor {TO_TARGET} must name different tokens of the model"
        )
    mask = checkpoint.tensors.get(FROM_TARGET)
    if mask is not None:
        expected = torch.zeros(vocab_size, dtype=torch.bool)
        expected[token_ids] = True
        if mask.shape != expected.shape or not torch.equal(_read(mask).bool(), expected):
            raise CheckpointError(
                f"{mask.path}: tensor {FROM_TARGET} must mark the tokens of {TO_TARGET}"
            )
    return token_ids


def _read(stored: StoredTensor) -> Tensor:
    try:
        with safe_open(str(stored.path), framework="pt") as file:
            tensor: Tensor = file.get_tensor(stored.stored_name)
    except (OSError, SafetensorError) as error:
        raise CheckpointError(
            f"damaged {stored.path}: tensor {stored.stored_name}: {error}"
        ) from error
    return tensor
