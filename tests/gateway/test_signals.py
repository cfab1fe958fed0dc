"""Tests of signals other than those that stop a node."""

from __future__ import annotations

import asyncio
import os
import signal
from pathlib import Path

import pytest

from draftgate.gateway import reloading
from draftgate.gateway.app import Signals
from tests.gateway.harness import client, eventually, running

NEVER_S = 1e9


@pytest.fixture(autouse=True)
def _no_checks(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a node notice no change by itself."""
    monkeypatch.setattr(reloading, "CHECK_S", NEVER_S)


def write_unnoticed(path: Path, text: str) -> None:
    """Change a file so that its state stays the same, as on a file system with coarse times."""
    before = path.stat()
    assert len(text) == before.st_size
    path.write_text(text)
    os.utime(path, ns=(before.st_atime_ns, before.st_mtime_ns))


async def test_sighup_reloads_and_no_other_signal_has_an_effect() -> None:
    """Only SIGTERM and SIGINT stop a process. SIGHUP calls for a reload each time."""
    reloads: asyncio.Queue[None] = asyncio.Queue()
    signals = Signals(lambda: reloads.put_nowait(None))
    for _ in range(2):
        for number in (signal.SIGUSR1, signal.SIGUSR2, signal.SIGHUP):
            os.kill(os.getpid(), number)
        await reloads.get()
    assert not signals.first.is_set()
    os.kill(os.getpid(), signal.SIGTERM)
    await signals.first.wait()
    assert reloads.empty()


async def test_a_reload_reads_keys_whose_file_seems_unchanged(tmp_path: Path) -> None:
    """A reload reads the file in any case, and applies its keys and quotas."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: one, key: sk-one, requests_per_minute: 1}\n")
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        write_unnoticed(keys, "keys:\n  - {name: two, key: sk-two, requests_per_minute: 7}\n")
        gateway.reload()

        async def accepted() -> bool:
            headers = {"authorization": "Bearer sk-two"}
            return (await http.get("/v1/models", headers=headers)).status_code == 200

        await eventually(accepted)
        account = gateway.node.accounts.find("sk-two")
        assert account is not None
        assert account.quota.requests_per_minute == 7


async def test_a_reload_of_an_invalid_file_keeps_the_keys(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """A reload logs what is wrong, and the node serves the previous keys."""
    keys = tmp_path / "keys.yaml"
    keys.write_text("keys:\n  - {name: one, key: sk-one}\n")
    async with running(api_keys_file=str(keys)) as gateway, client(gateway) as http:
        keys.write_text("keys: [\n")
        gateway.reload()

        async def logged() -> bool:
            return "cannot reload the API keys" in caplog.text

        await eventually(logged)
        headers = {"authorization": "Bearer sk-one"}
        assert (await http.get("/v1/models", headers=headers)).status_code == 200


async def test_a_reload_without_files_has_no_effect(caplog: pytest.LogCaptureFixture) -> None:
    """A node without keys and certificates serves on."""
    async with running() as gateway, client(gateway) as http:
        gateway.reload()
        assert (await http.get("/v1/models")).status_code == 200
    assert "cannot reload" not in caplog.text
