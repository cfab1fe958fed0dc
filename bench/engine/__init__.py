"""`draftgate bench engine`: everything about the engine's speed, in one run (`command.py`)."""

from __future__ import annotations

from bench.engine.command import main

__all__ = ["main"]
