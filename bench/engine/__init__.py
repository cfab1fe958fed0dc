"""Benchmarks of the engine. `draftgate bench engine` runs the module `command`."""

from __future__ import annotations

from bench.engine.command import main

__all__ = ["main"]
