"""Shapes and training recipes of the towers."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Final

from training.towers.examples import COMMENT, DETAIL, NAME, SENTENCE, SUMMARY

KIND_WEIGHTS: Final = {SUMMARY: 4.0, DETAIL: 1.0, SENTENCE: 1.0, NAME: 1.0, COMMENT: 0.5}
"""Weights of the kinds in random draws. The test collection has summaries only, so they count more.
Half of all examples are comments, which are the noisiest."""


@dataclass(frozen=True)
class Shape:
    """The shape of a tower.

    Attributes:
        dense: size of the embedding if a dense layer follows the pooling, else 0.
    """

    hidden: int
    layers: int
    heads: int
    inner: int
    dense: int = 0


@dataclass(frozen=True)
class Recipe:
    """Shape and training of a tower. Learning rates are peak values.

    The second phase is short, because it has not lowered the loss of validation yet. With the small
    shape, 160 steps raised it from 2.179 to 2.195 nats, and with a matrix rate of 0.003 the loss of
    the large shape rose from 2.05 to 2.50 in 37 steps (one busy thread of a Zen 5, 2026-11-27). The
    tower then keeps the weights of the first phase, whose layers are the identity. For a longer run
    on an idle machine, raise `steps`.

    Attributes:
        share: share of the packages' files to train on, 0..1. The standard library counts wholly.
        lexical_steps: steps of the first phase, which trains word embeddings only.
        steps: steps of the second phase, which trains all weights.
    """

    shape: Shape
    share: float = 1.0
    lexical_steps: int = 2500
    lexical_batch: int = 512
    lexical_rate: float = 0.01
    steps: int = 40
    batch: int = 128
    matrix_rate: float = 0.001
    other_rate: float = 0.0002
    kind_weights: dict[str, float] = field(default_factory=lambda: dict(KIND_WEIGHTS))


@dataclass(frozen=True)
class QueryRecipe:
    """Shape and distillation of the query tower. Learning rates are peak values.

    Attributes:
        kind_weights: without names and comments, which the large tower would take longest to embed.
        passages: passages whose order the query tower should keep.
    """

    shape: Shape
    passages: int = 5000
    lexical_steps: int = 1000
    lexical_batch: int = 1024
    lexical_rate: float = 0.01
    steps: int = 800
    batch: int = 512
    matrix_rate: float = 0.004
    other_rate: float = 0.002
    kind_weights: dict[str, float] = field(
        default_factory=lambda: {**KIND_WEIGHTS, NAME: 0.0, COMMENT: 0.0}
    )


LARGE: Final = Shape(hidden=256, layers=6, heads=4, inner=256)
MEDIUM: Final = Shape(hidden=192, layers=3, heads=3, inner=384)
SMALL: Final = Shape(hidden=128, layers=2, heads=2, inner=256)

QUERIES: Final = QueryRecipe(Shape(hidden=128, layers=1, heads=4, inner=64, dense=LARGE.hidden))
"""One layer with half the width. For a query of 12 tokens, the engine takes 194 us, and 1,128 us
with the large shape. An inner size of 256 takes 235 us, which is more than a fifth. A width of 96
keeps 94.7% of the recall at 5 on validation instead of 97.7% (one thread of a Zen 5,
2026-11-27)."""

ARMS: Final = {
    "large": Recipe(LARGE),
    "medium": Recipe(MEDIUM),
    "small": Recipe(SMALL),
    "small-stdlib": Recipe(SMALL, share=0.0),
    "small-tenth": Recipe(SMALL, share=0.1),
    "small-third": Recipe(SMALL, share=0.33),
}
"""The arms of the scaling study: by size with all texts, and by texts with the small size."""

SHIPPED_ARM: Final = "large"
