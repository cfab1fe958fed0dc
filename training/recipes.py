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
