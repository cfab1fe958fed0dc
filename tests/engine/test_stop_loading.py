"""Tests of an engine that is stopped while it loads."""

from __future__ import annotations

import signal
import subprocess
import sys

from draftgate.backends.engine.loop import EngineLoop

SERVE = [
    sys.executable, "-c", "from draftgate.gateway.cli import main; main()",
    "serve", "draftgate-demo", "--port", "0",
]  # fmt: skip

BUSY = """
import torch
from draftgate.backends.engine import load
def load_engine(config, progress):
    print("loading", flush=True)
    matrix = torch.ones(500, 500)
    while True:
        matrix = (matrix @ matrix).clamp(-1, 1)
load.load_engine = load_engine
"""
"""Code after which loading never ends and never reports progress, as a slow download would."""


class Reports:
    """Receives the reports of an engine's thread."""

    def __init__(self) -> None:
        self.shares: list[float] = []
        self.errors: list[BaseException] = []

    def loading(self, share: float) -> None:
        self.shares.append(share)

    def failed(self, error: BaseException) -> None:
        self.errors.append(error)


def test_loading_stops_at_its_next_progress() -> None:
    """A stopped loop ends loading at the next report of progress, without an error."""
    reports = Reports()

    def load(progress):
        while True:
            progress(0.5)
            if len(reports.shares) == 3:
                loop.stop()

    loop = EngineLoop(load, reports)
    loop.start()
    loop.join(60)
    assert not loop.is_alive()
    assert reports.shares == [0.5] * 3
    assert reports.errors == []


def test_sigterm_stops_a_node_whose_engine_never_stops_loading() -> None:
    """A node whose engine is in native code at SIGTERM stops in order and exits with status 0."""
    command = [*SERVE]
    command[2] = BUSY + command[2]
    with subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True
    ) as process:
        assert process.stdout.readline() == "loading\n"
        process.send_signal(signal.SIGTERM)
        _, log = process.communicate(timeout=60)
    assert process.returncode == 0
    assert log.rstrip().endswith("stopped")
    assert "Traceback" not in log
