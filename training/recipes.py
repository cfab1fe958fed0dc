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
    """Shape and training of one model; learning rates are peaks."""

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
        # Mostly short windows, because attention makes a token of an 8,192-token window 5 times
        # more expensive. Use small steps while the rate is high, because the run has only some
        # 2,000 of them. The cooldown has larger ones, because less noise helps and Muon's cost
        # (16% at 4,096) is halved.
        phases=(
            Phase(0.4, 512, 4096),
            Phase(0.74, 512, 8192),
            Phase(0.88, 2048, 8192),
            Phase(1.0, 8192, 8192),
        ),
        minutes=160,  # of one thread; resumed at 75, which raised the rate again
        # Muon at 0.02 in its first author's units is 0.006 in the AdamW-matched units used here
        # (width 256); AdamW at 0.004 is usual for models of this size.
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
        minutes=55,  # of one thread; resumed at 14 and at 25, which raised the rate again
        # As for the target; AdamW's rate grows with the smaller width.
        matrix_rate=0.008,
        other_rate=0.006,
        # Mostly the target's distribution, which is what acceptance depends on.
        teacher_share=0.9,
    ),
}
