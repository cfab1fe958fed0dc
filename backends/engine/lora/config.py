"""Reads the `adapter_config.json` of a LoRA adapter in the format of PEFT."""

from __future__ import annotations

import re
import reprlib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, TypeVar

from draftgate.backends.engine.fields import Fields
from draftgate.backends.tokenizer import read_json

CONFIG_FILE: Final = "adapter_config.json"

ALL_LINEAR: Final = "all-linear"
"""The value of `target_modules` for every product but the LM head."""

_UNSUPPORTED: Final = (
    "use_dora",
    "lora_bias",
    "use_qalora",
    "use_bdlora",
    "fan_in_fan_out",
    "modules_to_save",
    "trainable_token_indices",
    "layer_replication",
    "alora_invocation_tokens",
    "target_parameters",
    "megatron_config",
    "arrow_config",
    "kasa_config",
    "monteclora_config",
    "velora_config",
)
"""Fields of other kinds of adapters. Their values must be false, null or empty."""

_CHANGES_BASE: Final = ("pissa", "olora", "corda", "loftq", "lora_ga")
"""Beginnings of the values of `init_lora_weights` that also change the weights of the model."""

Target = re.Pattern[str] | tuple[str, ...]
"""A regular expression for the full name of a module, or the ends of names."""

Value = TypeVar("Value")

EVERY_MODULE: Final = re.compile(".*")


@dataclass(frozen=True, slots=True)
class LoraConfig:
    """The modules of an adapter, with their ranks and scales.

    Attributes:
        target: the modules of the adapter.
        excluded: modules of `target` that the adapter leaves out.
        layers: the layers of the adapter, or None for all layers.
        ranks, alphas: values of some modules, by a pattern for their names. The first one counts.
    """

    rank: int
    alpha: float
    rank_stabilised: bool
    target: Target
    excluded: Target
    layers: frozenset[int] | None
    ranks: Mapping[re.Pattern[str], int]
    alphas: Mapping[re.Pattern[str], float]

    def adapts(self, module: str, layer: int) -> bool:
        """Return whether the adapter changes a module, given its full name and its layer."""
        if self.layers is not None and layer not in self.layers:
            return False
        return _matches(self.target, module) and not _matches(self.excluded, module)

    def unmatched(self, modules: Iterable[str]) -> list[str]:
        """Return the listed targets that are none of these modules."""
        if isinstance(self.target, re.Pattern):
            return []
        names = list(modules)
        return [one for one in self.target if not any(_matches((one,), name) for name in names)]

    def rank_of(self, module: str) -> int:
        """Return the rank of a module."""
        return _value_of(self.ranks, module, self.rank)

    def scale_of(self, module: str) -> float:
        """Return the factor of a module's low-rank product."""
        alpha = _value_of(self.alphas, module, self.alpha)
        rank = self.rank_of(module)
        return float(alpha / (rank**0.5 if self.rank_stabilised else rank))


def read_lora_config(directory: Path) -> LoraConfig:
    """Return the config of an adapter after checking it.

    Raises:
        CheckpointError: a field is missing or invalid, or the engine does not support the adapter.
            The message names the file and the field.
    """
    path = directory / CONFIG_FILE
    fields = Fields(read_json(path), str(path))
    _check_kind(fields)
    target = _target(fields, "target_modules")
    if not target:
        raise fields.error("target_modules", "must name at least one module")
    ranks, alphas = fields.section("rank_pattern"), fields.section("alpha_pattern")
    return LoraConfig(
        rank=fields.count("r"),
        alpha=fields.number("lora_alpha"),
        rank_stabilised=fields.flag("use_rslora"),
        target=target,
        excluded=_target(fields, "exclude_modules"),
        layers=_layers(fields),
        ranks={_name_pattern(ranks, name): ranks.count(name) for name in ranks.names},
        alphas={_name_pattern(alphas, name): alphas.number(name) for name in alphas.names},
    )


def _check_kind(fields: Fields) -> None:
    kind = fields.get("peft_type")
    if kind != "LORA":
        raise fields.error("peft_type", f"{reprlib.repr(kind)} is not supported; supported: LORA")
    for name in _UNSUPPORTED:
        if value := fields.get(name):
            raise fields.error(name, f"{reprlib.repr(value)} is not supported")
    bias = fields.get("bias") or "none"
    if bias != "none":
        raise fields.error("bias", f"{reprlib.repr(bias)} is not supported; supported: 'none'")
    start = fields.get("init_lora_weights")
    if isinstance(start, str) and start.lower().startswith(_CHANGES_BASE):
        raise fields.error(
            "init_lora_weights",
            f"{reprlib.repr(start)} is not supported, because it changes the weights of the model; "
            "convert the adapter with PEFT's path_initial_model_for_weight_conversion",
        )
    if fields.get("layers_pattern") not in (None, [], "layers", ["layers"]):
        raise fields.error("layers_pattern", "is not supported; supported: 'layers'")


def _target(fields: Fields, name: str) -> Target:
    value = fields.get(name)
    if value is None:
        return ()
    if isinstance(value, str):
        return EVERY_MODULE if value == ALL_LINEAR else _compiled(fields, name, value)
    if not isinstance(value, list) or not all(isinstance(one, str) for one in value):
        raise fields.error(name, f"must be a text or a list of texts, not {reprlib.repr(value)}")
    return tuple(value)


def _layers(fields: Fields) -> frozenset[int] | None:
    name = "layers_to_transform"
    value = fields.get(name)
    if value is None:
        return None
    layers = value if isinstance(value, list) else [value]
    if not all(type(one) is int and one >= 0 for one in layers):
        raise fields.error(name, f"must list layers, not {reprlib.repr(value)}")
    return frozenset(layers)


def _name_pattern(fields: Fields, key: str) -> re.Pattern[str]:
    """Return what the name of a module must match, as in PEFT: usually, its end must match."""
    return _compiled(fields, key, key if key.startswith("^") else rf"(.*\.)?({key})$")


def _compiled(fields: Fields, name: str, pattern: str) -> re.Pattern[str]:
    try:
        return re.compile(pattern)
    except (re.error, OverflowError, RecursionError) as error:
        shown = reprlib.repr(pattern)
        raise fields.error(name, f"has the invalid pattern {shown}: {error}") from error


def _matches(target: Target, module: str) -> bool:
    if isinstance(target, re.Pattern):
        return target.fullmatch(module) is not None
    return any(module == one or module.endswith(f".{one}") for one in target)


def _value_of(values: Mapping[re.Pattern[str], Value], module: str, default: Value) -> Value:
    """Return the value of the first pattern for a module, or the default, as PEFT does."""
    return next((value for pattern, value in values.items() if pattern.match(module)), default)
