"""Runs the command line as `python -m draftgate.loadgen`."""

from __future__ import annotations

from draftgate.loadgen.cli import app

app(prog_name="python -m draftgate.loadgen")
