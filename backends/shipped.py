"""Where the shipped model lies: the engine loads it, the simulator reads its tokenizer."""

from __future__ import annotations

from pathlib import Path
from typing import Final

SHIPPED_MODEL: Final = Path(__file__).parent / "engine" / "demo" / "target"
"""Directory of the shipped target, in Hugging Face layout."""

SHIPPED_MODEL_ID: Final = "draftgate-demo"
"""The name clients use for it."""
