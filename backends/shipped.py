"""Where the shipped model lies: the engine loads it, the simulator reads its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SHIPPED_MODEL: Final = Path(__file__).parent / "engine" / "demo" / "target"
"""Directory of the shipped target, in Hugging Face layout."""

SHIPPED_DRAFT: Final = SHIPPED_MODEL.parent / "draft"
"""Directory of its draft model."""

SHIPPED_DRAFT_WINDOW: Final = 256
"""Tokens back that each of its layers looks: its loss rises beyond 1,024 (its card). Accepted of
drafts of 4 behind 4,000 tokens, looking back 128 / 256 / 512 / 1,024 / at all: greedy 56 / 59 / 60
/ 26 / 13 %, at 0.8 35 / 36 / 37 / 22 / 12 %; behind 100 to 240 tokens 77 and 49 % with any
(`bench/proposers.py`, 2026-11-21)."""

SHIPPED_MODEL_ID: Final = "draftgate-demo"
"""The name clients use for it."""
