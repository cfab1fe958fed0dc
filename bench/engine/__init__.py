"""Benchmarks of the engine. `draftgate bench engine` runs `command.py`."""

from __future__ import annotations

from bench.engine.command import main

__all__ = ["main"]
