"""The asyncio edge: HTTP, configuration, dispatch, telemetry and the command line."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("draftgate")
except PackageNotFoundError:  # run from a source tree that was never installed
    __version__ = "0+unknown"
