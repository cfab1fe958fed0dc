"""Reads the shape of an EAGLE-3 head from the `config.json` of a published checkpoint.

Three layouts are in use: of the authors (SafeAILab/EAGLE), of SGLang (`LlamaForCausalLMEagle3`),
and of vLLM's speculators (`Eagle3Speculator`), which nests the shape of the layer.
"""

from __future__ import annotations

import reprlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

from draftgate.backends.engine.config import ModelConfig, parse_model_config
from draftgate.backends.engine.fields import Fields
from draftgate.backends.errors import CheckpointError
from draftgate.backends.tokenizer import read_json

ARCHITECTURES: Final = (
    "LlamaForCausalLMEagle3",
    "Eagle3LlamaForCausalLM",
    "Eagle3Speculator",
    "Eagle3DraftModel",
)
"""Architectures of heads with a layer of Llama."""

TAPS: Final = 3
"""Number of tapped layers."""

_LAYERS: Final = "eagle_aux_hidden_state_layer_ids"
_SIZE: Final = "draft_vocab_size"
_NESTED: Final = "transformer_layer_config"


@dataclass(frozen=True, slots=True)
class HeadConfig:
    """The shape of a head.

    Attributes:
        model: shape of its layer. `vocab_size` is that of the target.
        draft_vocab_size: number of tokens that the head can draft.
        target_hidden_size: width of the target's hidden states.
        taps: tapped layers of the target (`Taps`), or None for the layers that EAGLE-3 taps.
        norm_before_residual: whether the layer adds to the normalised hidden state. Without the
            field, as in vLLM, heads of speculators do, and other heads do not.
    """

    model: ModelConfig
    draft_vocab_size: int
    target_hidden_size: int
    taps: tuple[int, ...] | None
    norm_before_residual: bool

    def taps_of(self, target: ModelConfig) -> tuple[int, ...]:
        """Return the tapped layers of a target.

        Raises:
            ValueError: the target has too few layers.
        """
        layers = target.num_layers
        taps = (2, layers // 2, layers - 3) if self.taps is None else self.taps
        if not all(0 <= tap <= layers for tap in taps):
            raise ValueError(f"the head taps the layers {taps}, but the model has {layers} layers")
        return taps


def is_head(directory: Path) -> bool:
    """Return whether a checkpoint is an EAGLE-3 head."""
    raw = read_json(directory / "config.json", missing={})
    # The authors' heads name the architecture of their target.
    return _is_named(raw) or _SIZE in raw


def _is_named(raw: Mapping[str, Any]) -> bool:
    """Return whether a config names an architecture of heads."""
    named = raw.get("architectures")
    return isinstance(named, list) and bool(named) and named[0] in ARCHITECTURES


def read_head_config(directory: Path) -> HeadConfig:
    """Return the shape of a head after checking its `config.json`.

    Raises:
        CheckpointError: a field is missing or invalid, or the engine does not support the head. The
            message names the file and the field.
    """
    path = directory / "config.json"
    raw = read_json(path)
    fields = Fields(raw, str(path))
    layer = _layer_fields(raw, fields)
    model = parse_model_config(layer, path)
    if model.num_layers != 1:
        raise fields.error(
            "num_hidden_layers",
            f"{model.num_layers} is not supported; supported: EAGLE-3 heads of 1 layer",
        )
    if not fields.section("eagle_config").flag("use_aux_hidden_state", default=True):
        raise fields.error(
            "eagle_config.use_aux_hidden_state",
            "false is not supported; supported: heads that read three layers of the model",
        )
    return HeadConfig(
        model,
        draft_vocab_size=fields.count(_SIZE, model.vocab_size, maximum=model.vocab_size),
        target_hidden_size=fields.count("target_hidden_size", model.hidden_size),
        taps=_taps(fields),
        norm_before_residual=fields.flag("norm_before_residual", default=_NESTED in fields),
    )


def _layer_fields(raw: Mapping[str, Any], fields: Fields) -> dict[str, Any]:
    """Return the fields of the head's layer, as those of a Llama with one layer."""
    nested = raw.get(_NESTED)
    layer = dict(nested if isinstance(nested, Mapping) else raw)
    if not _is_named(raw):
        layer["num_hidden_layers"] = 1  # some of the authors' heads state the layers of the target
    kind = layer.get("model_type", "llama")
    if kind != "llama":
        raise fields.error("model_type", f"{reprlib.repr(kind)} is not supported; supported: llama")
    # Published heads state a small bound or none, and serve the contexts of their target.
    layer.setdefault("max_position_embeddings", 2048)
    return {**layer, "architectures": ["LlamaForCausalLM"]}


def _taps(fields: Fields) -> tuple[int, ...] | None:
    """Return the tapped layers, or None if the config names none.

    At the top level, speculators list layers by their input. In `eagle_config`, SGLang lists layers
    by their output.
    """
    nested = fields.section("eagle_config")
    for holder, shift in ((fields, 0), (nested, 1)):
        if _LAYERS not in holder:
            continue
        ids = holder.get(_LAYERS)
        valid = isinstance(ids, list) and all(type(one) is int and one >= 0 for one in ids)
        if not valid or len(ids) != TAPS:
            raise holder.error(
                _LAYERS, f"must list {TAPS} layers of the model, not {reprlib.repr(ids)}"
            )
        return tuple(one + shift for one in ids)
    return None


def check_target(config: HeadConfig, target: ModelConfig, directory: Path) -> None:
    """Check that a head fits its target.

    Raises:
        CheckpointError: the hidden states, the vocabulary or the tapped layers differ.
    """
    fields = Fields({}, str(directory / "config.json"))
    if config.target_hidden_size != target.hidden_size:
        raise fields.error(
            "hidden_size",
            f"{config.target_hidden_size} differs from the model's, {target.hidden_size}; "
            "choose a head that was trained for this model",
        )
    if config.model.vocab_size != target.vocab_size:
        raise fields.error(
            "vocab_size",
            f"{config.model.vocab_size} differs from the model's, {target.vocab_size}; "
            "choose a head that was trained for this model",
        )
    try:
        config.taps_of(target)
    except ValueError as error:
        raise CheckpointError(f"{directory / 'config.json'}: {error}") from error
