"""Reads the rotary embedding of a model from its config."""

from __future__ import annotations

import reprlib
from typing import Final

from draftgate.backends.engine.families import Family
from draftgate.backends.engine.fields import UPSTREAM_HINT, Fields
from draftgate.backends.engine.rope import (
    LinearScaling,
    Llama3Scaling,
    LongRopeScaling,
    Rope,
    YarnScaling,
    longrope_attention_factor,
    yarn_attention_factor,
)

ROPE_TYPES: Final = ("default", "linear", "llama3", "yarn", "longrope")


GLOBAL_THETA: Final = 1_000_000.0
LOCAL_THETA: Final = 10_000.0
"""Bases of the rotations of layers without and with a window, if a config names none (Gemma 3)."""


def read_rope(fields: Fields, family: Family, head_dim: int) -> tuple[Rope, int]:
    """Return the rotation and the longest context.

    Newer checkpoints have the settings in `rope_parameters`, older ones in `rope_scaling` and
    `rope_theta`.
    """
    name = "rope_scaling" if fields.get("rope_scaling") else "rope_parameters"
    settings = fields.section(name)
    if settings.nested:
        raise fields.error(name, f"that differ between layers are not supported; {UPSTREAM_HINT}")
    theta = fields.number("rope_theta", 10000.0, above=1.0)
    return _rope(fields, settings, family, head_dim, theta)


def read_ropes(fields: Fields, family: Family, head_dim: int) -> tuple[Rope, Rope, int]:
    """Return the rotations of layers without and with a window, and the longest context.

    Newer checkpoints have the settings in `rope_parameters` by the type of layer. Older ones have
    those of layers with a window in `rope_local_base_freq`.
    """
    settings = fields.section("rope_parameters")
    if settings.nested:
        everywhere, local = (
            settings.section(kind) for kind in ("full_attention", "sliding_attention")
        )
    else:
        everywhere, local = fields.section("rope_scaling"), settings.section("sliding_attention")
    theta = fields.number("rope_theta", GLOBAL_THETA, above=1.0)
    rope, positions = _rope(fields, everywhere, family, head_dim, theta)
    local_theta = fields.number("rope_local_base_freq", LOCAL_THETA, above=1.0)
    local_rope, _ = _rope(fields, local, family, head_dim, local_theta)
    return rope, local_rope, positions


def _rope(
    fields: Fields, settings: Fields, family: Family, head_dim: int, theta: float
) -> tuple[Rope, int]:
    share = _share(fields, settings, family, head_dim)
    theta = settings.number("rope_theta", theta, above=1.0)
    kind = _kind(settings, family)
    positions = fields.count("max_position_embeddings")
    if kind == "default":
        return Rope(theta, share=share), positions
    if kind == "linear":
        return Rope(theta, LinearScaling(settings.number("factor")), share), positions
    # The top-level field takes precedence if a checkpoint has both, as in transformers.
    holder = fields if "original_max_position_embeddings" in fields else settings
    original = holder.count("original_max_position_embeddings", positions, minimum=2)
    if kind == "llama3":
        return Rope(theta, _llama3(settings, original), share), positions
    if kind == "longrope":
        factor = settings.number("factor", positions / original)
        waves = Rope(theta, share=share).rotated(head_dim) // 2
        return Rope(theta, _longrope(settings, original, factor, waves), share), positions
    yarn = _yarn(settings, original, positions)
    # The field of some published YaRN checkpoints holds the context before its extension.
    return Rope(theta, yarn, share), max(positions, int(original * yarn.factor))


def _kind(settings: Fields, family: Family) -> str:
    kind = settings.get("rope_type") or settings.get("type") or "default"
    if isinstance(kind, str):
        kind = family.rope_types.get(kind, kind)
    if kind not in ROPE_TYPES:
        raise settings.error(
            "rope_type",
            f"{reprlib.repr(kind)} is not supported; "
            f"supported: {', '.join(ROPE_TYPES)}; {UPSTREAM_HINT}",
        )
    return str(kind)


def _share(fields: Fields, settings: Fields, family: Family, head_dim: int) -> float:
    """Return the share of a head's dimensions that rotate."""
    holder = settings if "partial_rotary_factor" in settings else fields
    share = holder.number("partial_rotary_factor", 1.0)
    if share != 1.0 and not family.partial_rotation:
        raise holder.error("partial_rotary_factor", f"is not supported; {UPSTREAM_HINT}")
    rotated = int(head_dim * min(share, 1.0))
    if share > 1.0 or rotated % 2 or not rotated:
        raise holder.error(
            "partial_rotary_factor",
            f"must rotate an even number of {head_dim} dimensions, not {share:g} of them",
        )
    return share


def _llama3(settings: Fields, original: int) -> Llama3Scaling:
    low = settings.number("low_freq_factor")
    high = settings.number("high_freq_factor", above=low)
    return Llama3Scaling(settings.number("factor"), low, high, original)


def _longrope(settings: Fields, original: int, factor: float, waves: int) -> LongRopeScaling:
    return LongRopeScaling(
        short_factors=settings.numbers("short_factor", waves),
        long_factors=settings.numbers("long_factor", waves),
        attention_factor=settings.number(
            "attention_factor", longrope_attention_factor(factor, original)
        ),
        original_positions=original,
    )


def _yarn(settings: Fields, original: int, positions: int) -> YarnScaling:
    factor = settings.number("factor", positions / original)
    mscale = [
        settings.number(name) if name in settings else None for name in ("mscale", "mscale_all_dim")
    ]
    return YarnScaling(
        factor=factor,
        beta_fast=settings.number("beta_fast", 32.0),
        beta_slow=settings.number("beta_slow", 1.0),
        attention_factor=settings.number(
            "attention_factor", yarn_attention_factor(factor, *mscale)
        ),
        truncate=settings.flag("truncate", default=True),
        original_positions=original,
    )
