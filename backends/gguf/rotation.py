"""The rotation of a model in a GGUF file, as `rope_parameters` of a `config.json`.

Factors of frequencies are tensors of the file.
"""

from __future__ import annotations

import math
import struct
from typing import Any, Final

from draftgate.backends.errors import CheckpointError
from draftgate.backends.gguf.keys import UPSTREAM_HINT, ArchitectureKeys
from draftgate.backends.gguf.reader import GgufTensor

_FREQUENCIES: Final = "rope_freqs.weight"
LONG_FACTORS: Final = "rope_factors_long.weight"
_SHORT_FACTORS: Final = "rope_factors_short.weight"
FACTORS: Final = frozenset({_FREQUENCIES, LONG_FACTORS, _SHORT_FACTORS})
"""The tensors with factors of frequencies."""


def _values(stored: GgufTensor) -> list[float]:
    """Return the values of a short vector in float32."""
    if stored.kind.name != "F32" or len(stored.shape) != 1:
        raise CheckpointError(f"{stored.path}: the factors of the rotation must be F32 vectors")
    with stored.path.open("rb") as file:
        file.seek(stored.offset)
        return list(struct.unpack(f"<{stored.shape[0]}f", file.read(stored.num_bytes)))


def check_full_rotation(keys: ArchitectureKeys) -> None:
    """Check that all dimensions of a head rotate.

    Raises:
        CheckpointError: only some do.
    """
    rotated, dim = keys.count("rope.dimension_count", keys.head_dim), keys.head_dim
    if rotated != dim:
        raise keys.error("rope.dimension_count", f"must be {dim}, not {rotated}; {UPSTREAM_HINT}")


def plain_rotation(keys: ArchitectureKeys) -> dict[str, Any]:
    """Return the settings of a rotation that is the same for contexts of any length.

    Raises:
        CheckpointError: the type of the scaling is not supported.
    """
    theta = {"rope_theta": keys.number("rope.freq_base", 10000.0)}
    kind = keys.metadata.text(keys.key("rope.scaling.type"), "linear")
    factor = keys.number("rope.scaling.factor", keys.number("rope.scale_linear", 1.0))
    plain = kind == "none" or (kind == "linear" and factor == 1.0)
    if _FREQUENCIES in keys.model.tensors and plain:
        # The factors of Llama 3.1 for each frequency. LongRoPE with equal sets has the same form.
        divisors = _values(keys.model.tensors[_FREQUENCIES])
        equal = {"short_factor": divisors, "long_factor": divisors, "attention_factor": 1.0}
        return {**theta, "rope_type": "longrope", **equal}
    if plain:
        return {**theta, "rope_type": "default"}
    if kind == "linear" and _FREQUENCIES not in keys.model.tensors:
        return {**theta, "rope_type": "linear", "factor": factor}
    if kind != "yarn" or _FREQUENCIES in keys.model.tensors:
        raise keys.error("rope.scaling.type", f"{kind} is not supported; {UPSTREAM_HINT}")
    softening = 0.1 * math.log(factor) + 1.0 if factor > 1.0 else 1.0
    return {
        **theta,
        "rope_type": "yarn",
        "factor": factor,
        "original_max_position_embeddings": keys.count("rope.scaling.original_context_length"),
        "attention_factor": softening * keys.number("rope.scaling.attn_factor", 1.0),
        "beta_fast": keys.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": keys.number("rope.scaling.yarn_beta_slow", 1.0),
    }


def long_rotation(keys: ArchitectureKeys) -> dict[str, Any]:
    """Return the settings of LongRoPE, with factors for short and for long contexts.

    Raises:
        CheckpointError: the file lacks the factors for short contexts.
    """
    tensors = keys.model.tensors
    if _SHORT_FACTORS not in tensors:
        raise CheckpointError(f"{keys.model.path}: tensor {_SHORT_FACTORS} is missing")
    name = "rope.scaling.attn_factor"
    return {
        "rope_theta": keys.number("rope.freq_base", 10000.0),
        "rope_type": "longrope",
        "long_factor": _values(tensors[LONG_FACTORS]),
        "short_factor": _values(tensors[_SHORT_FACTORS]),
        **({"attention_factor": keys.number(name)} if name in keys else {}),
    }
