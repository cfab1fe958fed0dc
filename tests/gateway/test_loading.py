"""Tests of the progress bar and the log lines during the loading of workers."""

from __future__ import annotations

import asyncio
import io
import logging
import os

import pytest
from rich.console import Console

from draftgate.gateway import loading
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.loading import loading_shown
from tests.gateway.harness import ScriptedBackend, scripted_fleet, until

CONFIG = ServeConfig(model="/models/[m]")


class Terminal(io.StringIO):
    """An in-memory terminal."""

    def isatty(self) -> bool:
        return True


@pytest.fixture
def console(monkeypatch: pytest.MonkeyPatch) -> Console:
    """A console with a terminal."""
    monkeypatch.setattr(loading, "REFRESH_S", 0.001)
    environ = {"TERM": "xterm", "COLUMNS": "100"}
    return Console(file=Terminal(), force_terminal=True, _environ={**os.environ, **environ})


async def test_a_terminal_gets_a_bar_that_follows_the_workers(
    console: Console, scripted: ScriptedBackend, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The terminal shows a bar with the progress and the model name, and clears the bar at the
    end."""
    monkeypatch.setattr(loading, "BAR_DELAY_S", 0.0)
    fleet = scripted_fleet(CONFIG, [scripted])
    await fleet.start("w")
    screen = console.file
    async with loading_shown(fleet, CONFIG, console):
        for share in (0.25, 0.75):
            scripted.progress = share
            await until(lambda share=share: f"{share:.0%}" in screen.getvalue())
    assert "loading /models/[m]" in screen.getvalue()
    assert "reading weights" in screen.getvalue()
    assert "compiling and testing operators" in screen.getvalue()
    assert screen.getvalue().endswith("\x1b[2K")  # the line is cleared


async def test_quick_loading_shows_nothing(console: Console, scripted: ScriptedBackend) -> None:
    """The console shows no bar if the workers load quickly."""
    async with loading_shown(scripted_fleet(CONFIG, [scripted]), CONFIG, console):
        await asyncio.sleep(0)
    assert console.file.getvalue() == ""


@pytest.mark.parametrize("share", [1.0, 0.5], ids=["loaded", "interrupted"])
async def test_loading_without_a_terminal_writes_log_lines(
    share: float, scripted: ScriptedBackend, caplog: pytest.LogCaptureFixture
) -> None:
    """The node logs one line at the start of loading and one line at the end without a terminal."""
    fleet = scripted_fleet(CONFIG, [scripted])
    console = Console(file=io.StringIO())
    with caplog.at_level(logging.INFO, logger="draftgate"):
        async with loading_shown(fleet, CONFIG, console):
            await fleet.start("w")
            scripted.progress = share
    assert console.file.getvalue() == ""
    lines = {record.message: record.draftgate_fields for record in caplog.records}
    assert list(lines) == (["loading", "loaded"] if share == 1.0 else ["loading"])
    assert lines["loading"] == {"backend": "engine", "model": "/models/[m]", "workers": 1}
    assert lines.get("loaded", {"seconds": 0})["seconds"] >= 0


async def test_loading_without_a_terminal_logs_each_phase_once(
    scripted: ScriptedBackend, caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The node logs each loading phase once, when the phase begins."""
    monkeypatch.setattr(loading, "REFRESH_S", 0.001)
    fleet = scripted_fleet(CONFIG, [scripted])
    scripted.progress = 0.0
    phases = ["reading weights", "compiling and testing operators", "measuring step costs"]
    with caplog.at_level(logging.INFO, logger="draftgate"):
        await fleet.start("w")
        async with loading_shown(fleet, CONFIG, Console(file=io.StringIO())):
            for share, phase in zip((0.3, 0.75, 0.9), phases, strict=True):
                scripted.progress = share
                await until(lambda phase=phase: phase in caplog.messages)
            scripted.progress = 1.0
    assert caplog.messages == ["loading", *phases, "loaded"]
