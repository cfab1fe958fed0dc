"""Shapes and training recipes of the shipped models."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Phase:
    """A part of the run, which lasts until `until` (share of the budget, 0..1)."""

    until: float
    length: int
    batch_tokens: int


@dataclass(frozen=True)
class Recipe:
    """Shape and training of a model. Learning rates are peak values."""

    shape: dict[str, int]
    phases: tuple[Phase, ...]
    minutes: float
    matrix_rate: float
    other_rate: float
    teacher_share: float = 0.0


RECIPES = {
    "target": Recipe(
        shape={
            "hidden_size": 256,
            "num_hidden_layers": 6,
            "num_attention_heads": 8,
            "num_key_value_heads": 4,
            "head_dim": 32,
            "intermediate_size": 704,
        },
        # Most windows are short, because attention makes a token of an 8,192-token window 5 times
        # as expensive. Steps are small while the rate is high, because the run has only about 2,000
        # steps. The cooldown has larger steps, because less noise helps and Muon's cost (16% at
        # 4,096) is halved.
        phases=(
            Phase(0.4, 512, 4096),
            Phase(0.74, 512, 8192),
            Phase(0.88, 2048, 8192),
            Phase(1.0, 8192, 8192),
        ),
        minutes=160,  # with one thread. A restart at minute 75 raised the rate again.
        # Muon at 0.02 in its first author's units is 0.006 in the AdamW-matched units of this
        # recipe (width 256). AdamW at 0.004 is usual for models of this size.
        matrix_rate=0.006,
        other_rate=0.004,
    ),
    "draft": Recipe(
        shape={
            "hidden_size": 128,
            "num_hidden_layers": 2,
            "num_attention_heads": 4,
            "num_key_value_heads": 2,
            "head_dim": 32,
            "intermediate_size": 352,
        },
        phases=(Phase(0.9, 512, 4096), Phase(0.98, 2048, 8192), Phase(1.0, 8192, 8192)),
        minutes=55,  # with one thread. Restarts at minutes 14 and 25 raised the rate again.
        # The reasons for these rates are those of the target. AdamW's rate is higher in a narrower
        # model.
        matrix_rate=0.008,
        other_rate=0.006,
        # The loss uses mostly the target's distribution, because acceptance depends on that
        # distribution.
        teacher_share=0.9,
    ),
}


@dataclass(frozen=True)
class HeadRecipe:
    """Shape and training of an EAGLE-3 head. Learning rates are peak values.

    Attributes:
        taps: layers of the target whose input the head reads. The number of layers stands for the
            output of the last layer.
        depths: unrolled steps. The loss of depth s counts `depth_share` to the power of s.
    """

    taps: tuple[int, ...]
    inner: int
    draft_vocab_size: int
    depths: int
    depth_share: float
    length: int
    batch_tokens: int
    minutes: float
    matrix_rate: float
    other_rate: float
    seed: int = 20


HEAD = HeadRecipe(
    # EAGLE-3 taps the layers 2, n / 2 and n - 3, which coincide for six layers.
    taps=(2, 4, 6),
    inner=704,
    # Half of the vocabulary halves the LM head, the head's largest matrix.
    draft_vocab_size=2048,
    depths=3,
    depth_share=0.8,
    length=512,
    batch_tokens=4096,
    minutes=40,
    # The rates of the target's recipe, which has the same width.
    matrix_rate=0.006,
    other_rate=0.002,
)
