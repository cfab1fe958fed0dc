"""Reads from `config.json` how a checkpoint quantises its weights.

A scheme only describes a format. `fp8.py` and `int4.py` read its tensors.

Sources: the `quantization_config` of transformers and vLLM, and the documentation of AutoAWQ,
GPTQModel and compressed-tensors.
"""

from __future__ import annotations

import re
import reprlib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any, Final, Literal

from draftgate.backends.engine.checkpoint import BASE_PREFIX, OTHER_PREFIXES
from draftgate.backends.engine.fields import UPSTREAM_HINT, Fields

LM_HEAD: Final = "lm_head"
SECTION: Final = "quantization_config"

Layout = Literal["awq", "gptq", "packed"]


@dataclass(frozen=True, slots=True)
class Fp8Scheme:
    """Weights in FP8 (E4M3). Each product also rounds its activations to FP8.

    Attributes:
        skipped: patterns of the modules that are not quantised.
        scale: name of the tensor with the scales of a weight.
        block: outputs and inputs that share a scale of the weight, or None for a scale per output
            or per matrix. A scale of the activations is of one token and of one block of inputs.
        static: whether the checkpoint stores the scale of the activations, one per module.
    """

    skipped: tuple[re.Pattern[str], ...]
    scale: str = "weight_scale"
    block: tuple[int, int] | None = None
    static: bool = False

    @property
    def name(self) -> str:
        """The name of the format."""
        size = "channel" if self.block is None else "x".join(map(str, self.block))
        return f"fp8-{size}{'-static' if self.static else ''}"

    def loaded_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a loaded weight, which has a float32 scale per output and group."""
        groups = 1 if self.block is None else -(-inputs // self.block[1])
        return outputs * (inputs + 4 * groups)


@dataclass(frozen=True, slots=True)
class Int4Scheme:
    """Weights of 4 bits, with a scale and a zero for each group of inputs.

    Attributes:
        skipped: patterns of the modules that are not quantised.
        layout: how the checkpoint packs the weights.
        group: inputs of a group, or None for a single group of all inputs.
        added_to_zeros: number that GPTQ subtracts from the zeros before it stores them.
        ordered: whether the groups of GPTQ consist of inputs in any order (`desc_act`).
        zeros: whether the checkpoint stores zeros. Otherwise every zero is 8.
    """

    skipped: tuple[re.Pattern[str], ...]
    layout: Layout
    group: int | None
    added_to_zeros: int = 0
    ordered: bool = False
    zeros: bool = True

    @property
    def name(self) -> str:
        """The name of the format."""
        return f"int4-{self.layout}-{self.group or 'channel'}"

    def loaded_bytes(self, outputs: int, inputs: int) -> int:
        """Return the bytes of a loaded weight.

        Every output and group has a scale in 16 bits and a zero of a byte. An order of the inputs
        is int64.
        """
        groups = -(-inputs // (self.group or inputs))
        return outputs * (inputs // 2 + 3 * groups) + (8 * inputs if self.ordered else 0)


Scheme = Fp8Scheme | Int4Scheme


def quantises(scheme: Scheme | None, module: str) -> bool:
    """Return whether a scheme quantises the weight of a module, given by its name in the engine."""
    return scheme is not None and not any(
        pattern.search(name) for pattern in scheme.skipped for name in _listed_names(module)
    )


def _listed_names(module: str) -> tuple[str, ...]:
    """Return the names that a list of skipped modules may use for a module.

    They follow the modules of transformers, whose prefix can differ from that of the tensors.
    """
    rest = module.removeprefix(BASE_PREFIX)
    if rest == module:
        return module, f"language_model.{module}"
    return tuple(prefix + rest for prefix in (BASE_PREFIX, *OTHER_PREFIXES))


def read_scheme(config: Fields) -> Scheme | None:
    """Return the scheme of a checkpoint, or None if its weights are not quantised.

    Args:
        config: the fields of `config.json`.

    Raises:
        CheckpointError: a field is invalid, or the engine does not support the format. The message
            names the file and the field.
    """
    if SECTION not in config:
        return None
    fields = config.section(SECTION)
    return _METHODS[_choice(fields, "quant_method", tuple(_METHODS))](fields)


def _fp8(fields: Fields) -> Fp8Scheme:
    _choice(fields, "fmt", ("e4m3", "float8_e4m3fn"), "e4m3")
    _choice(fields, "scale_fmt", ("float",), "float")
    static = _choice(fields, "activation_scheme", ("dynamic", "static"), "dynamic") == "static"
    names = "modules_to_not_convert" if "modules_to_not_convert" in fields else "ignored_layers"
    skipped = _skipped(fields, names)
    if "weight_block_size" not in fields:
        return Fp8Scheme(skipped, static=static)
    if static:
        raise _unsupported(fields, "activation_scheme", "static", ("dynamic",))
    block = _block(fields, "weight_block_size")
    return Fp8Scheme(skipped, "weight_scale_inv", block)


def _gptq(fields: Fields) -> Int4Scheme:
    name = "checkpoint_format" if "checkpoint_format" in fields else "format"
    version = _choice(fields, name, ("gptq", "gptq_v2"), "gptq")
    _choice(fields, "bits", (4,))
    _choice(fields, "pack_dtype", ("int32",), "int32")
    _absent(fields, "lm_head", "dynamic", "modules_in_block_to_quantize")
    return Int4Scheme(
        _skipped(fields, "modules_to_not_convert"),
        "gptq",
        _group(fields, "group_size"),
        added_to_zeros=1 if version == "gptq" else 0,
        ordered=fields.flag("desc_act"),
    )


def _awq(fields: Fields) -> Int4Scheme:
    _choice(fields, "version", ("gemm",), "gemm")
    _choice(fields, "bits" if "bits" in fields else "w_bit", (4,))
    if not fields.flag("zero_point", default=True):
        raise _unsupported(fields, "zero_point", False, (True,))
    size = "group_size" if "group_size" in fields else "q_group_size"
    return Int4Scheme(_skipped(fields, "modules_to_not_convert"), "awq", _group(fields, size))


def _compressed_tensors(fields: Fields) -> Scheme:
    formats = ("float-quantized", "naive-quantized", "pack-quantized")
    packed = _choice(fields, "format", formats) == "pack-quantized"
    _absent(fields.section("sparsity_config"), "format")
    groups = fields.section("config_groups")
    if len(groups.names) != 1:
        raise fields.error(
            "config_groups", f"must be one group, not {len(groups.names)}; {UPSTREAM_HINT}"
        )
    group = groups.section(groups.names[0])
    if group.get("targets") != ["Linear"]:
        raise _unsupported(group, "targets", group.get("targets"), (["Linear"],))
    skipped = _ignored(fields)
    weights, inputs = group.section("weights"), group.section("input_activations")
    return _packed(weights, inputs, skipped) if packed else _float(weights, inputs, skipped)


def _float(weights: Fields, inputs: Fields, skipped: tuple[re.Pattern[str], ...]) -> Fp8Scheme:
    for fields in (weights, inputs):
        _choice(fields, "type", ("float",))
        _choice(fields, "num_bits", (8,))
    _choice(weights, "dynamic", (False,), False)
    strategy = _choice(weights, "strategy", ("channel", "tensor", "block"))
    dynamic = _choice(inputs, "dynamic", (True, False), False)
    if strategy == "block":
        _choice(inputs, "strategy", ("group",))
        _choice(inputs, "dynamic", (True,))
        block = _block(weights, "block_structure")
        _choice(inputs, "group_size", (block[1],))
        return Fp8Scheme(skipped, block=block)
    _choice(inputs, "strategy", ("token",) if dynamic else ("tensor",))
    return Fp8Scheme(skipped, static=not dynamic)


def _packed(weights: Fields, inputs: Fields, skipped: tuple[re.Pattern[str], ...]) -> Int4Scheme:
    _absent(inputs, "num_bits")
    _choice(weights, "type", ("int",), "int")
    _choice(weights, "num_bits", (4,))
    _choice(weights, "actorder", ("static", "weight"), "static")
    channel = _choice(weights, "strategy", ("group", "channel")) == "channel"
    return Int4Scheme(
        skipped,
        "packed",
        None if channel else _group(weights, "group_size"),
        zeros=not weights.flag("symmetric", default=True),
    )


def _choice(fields: Fields, name: str, supported: tuple[Any, ...], default: Any = None) -> Any:
    """Return the value of a field that must be one of `supported`. Text may be in any case."""
    value = default if name not in fields else fields.get(name)
    if value is None:
        raise fields.error(name, "is missing")
    found = value.lower() if isinstance(value, str) else value
    # 1 equals True
    if not any(found == one and type(found) is type(one) for one in supported):
        raise _unsupported(fields, name, value, supported)
    return found


def _unsupported(fields: Fields, name: str, value: object, supported: Iterable[Any]) -> Exception:
    listed = ", ".join(map(str, supported))
    shown = reprlib.repr(value)
    return fields.error(name, f"{shown} is not supported; supported: {listed}; {UPSTREAM_HINT}")


def _absent(fields: Fields, *names: str) -> None:
    for name in names:
        if fields.get(name):
            raise fields.error(
                name, f"({reprlib.repr(fields.get(name))}) is not supported; {UPSTREAM_HINT}"
            )


def _group(fields: Fields, name: str) -> int | None:
    """Return the inputs of a group, or None for -1: all inputs."""
    if fields.get(name) == -1:
        return None
    size = fields.count(name)
    if size % 8:
        raise fields.error(name, f"must be -1 or a multiple of 8, not {size}")
    return size


def _block(fields: Fields, name: str) -> tuple[int, int]:
    value = fields.get(name)
    if (
        not isinstance(value, list)
        or len(value) != 2
        or not all(type(size) is int and size > 0 for size in value)
    ):
        shown = reprlib.repr(value)
        raise fields.error(name, f"must be two positive whole numbers, not {shown}")
    return value[0], value[1]


def _skipped(fields: Fields, name: str) -> tuple[re.Pattern[str], ...]:
    """Return patterns of the names in a list, and of the LM head, which transformers also skips.

    A name, or a regular expression, matches whole parts of a module's dotted name.
    """
    return tuple(
        _pattern(fields, name, rf"(?:^|\.)(?:{part})(?:\.|$)")
        for part in (*_texts(fields, name), LM_HEAD)
    )


def _ignored(fields: Fields) -> tuple[re.Pattern[str], ...]:
    """Return patterns of the modules in `ignore`: whole names, or expressions after `re:`."""
    return tuple(
        _pattern(fields, "ignore", f"^(?:{text[3:]})")
        if text.startswith("re:")
        else re.compile(f"^{re.escape(text)}$")
        for text in _texts(fields, "ignore")
    )


def _texts(fields: Fields, name: str) -> list[str]:
    value = [] if name not in fields else fields.get(name)
    if not isinstance(value, list) or not all(isinstance(text, str) for text in value):
        raise fields.error(name, f"must be a list of modules, not {reprlib.repr(value)}")
    return value


def _pattern(fields: Fields, name: str, expression: str) -> re.Pattern[str]:
    try:
        return re.compile(expression)
    except re.error as error:
        raise fields.error(name, f"holds an invalid expression: {error}") from None


_METHODS: Final[Mapping[str, Callable[[Fields], Scheme]]] = MappingProxyType(
    {"fp8": _fp8, "awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed_tensors}
)
