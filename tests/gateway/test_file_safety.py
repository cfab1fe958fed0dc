"""Tests of files of keys and certificates that other users may change."""

from __future__ import annotations

import asyncio
import logging
import os
from pathlib import Path

import pytest

from draftgate.gateway.app import StartError, build_node
from draftgate.gateway.config import ServeConfig
from draftgate.gateway.file_safety import check_writers
from draftgate.gateway.tls import tls_listener
from tests.gateway.certificates import make_certificate
from tests.gateway.harness import client, running

KEYS = "keys:\n  - {name: one, key: sk-one}\n"
BAD = {
    "group": (0o620, 0o700, "its group"),
    "others": (0o602, 0o700, "every user"),
    "folder of a group": (0o600, 0o770, "its group"),
    "folder of others": (0o600, 0o707, "every user"),
}
GOOD = {"owner": (0o600, 0o700), "readers": (0o644, 0o755), "sticky folder": (0o640, 0o1777)}


@pytest.fixture
def keys(tmp_path: Path) -> Path:
    """A file in a folder that only its owner may change."""
    path = tmp_path / "folder" / "keys.yaml"
    path.parent.mkdir(mode=0o700)
    path.write_text(KEYS)
    path.chmod(0o600)
    return path


def set_modes(path: Path, file: int, folder: int) -> None:
    path.chmod(file)
    path.parent.chmod(folder)


@pytest.mark.parametrize("case", BAD)
def test_a_file_that_others_may_change_is_a_warning_or_an_error(
    keys: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """A node warns and starts. With `--strict`, it refuses to start with one line that names the
    path and the users that may change it."""
    file, folder, who = BAD[case]
    set_modes(keys, file, folder)
    config = ServeConfig(backend="sim", api_keys_file=str(keys))
    build_node(config)
    (record,) = caplog.records
    assert record.levelno == logging.WARNING
    with pytest.raises(StartError, match=f"{keys.parent}.* {who}"):
        build_node(ServeConfig(backend="sim", api_keys_file=str(keys), strict=True))


@pytest.mark.parametrize("case", GOOD)
def test_a_file_that_others_cannot_change_is_accepted(
    keys: Path, case: str, caplog: pytest.LogCaptureFixture
) -> None:
    """Other users may read the file, and create files beside it in a folder with the sticky bit."""
    set_modes(keys, *GOOD[case])
    build_node(ServeConfig(backend="sim", api_keys_file=str(keys), strict=True))
    assert not caplog.records


def test_a_link_is_as_safe_as_its_own_folder(keys: Path, tmp_path: Path) -> None:
    """A link in a folder of others can be replaced, although its file cannot be changed."""
    open_folder = tmp_path / "open"
    open_folder.mkdir()
    open_folder.chmod(0o777)
    link = open_folder / "link.yaml"
    link.symlink_to(keys)
    with pytest.raises(ValueError, match=str(open_folder)):
        check_writers([link], strict=True)
    open_folder.chmod(0o755)
    check_writers([link], strict=True)
    keys.chmod(0o666)
    with pytest.raises(ValueError, match=str(keys)):
        check_writers([link], strict=True)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root gives files away")
def test_the_owner_of_a_file_may_change_it(keys: Path) -> None:
    """A file that belongs to another user is refused, whatever its mode."""
    os.chown(keys, 12345, -1)
    with pytest.raises(ValueError, match="belongs to the user 12345"):
        check_writers([keys], strict=True)


async def test_a_running_strict_node_keeps_its_keys(keys: Path) -> None:
    """If others may change the file from now on, its new contents are not used."""
    async with running(api_keys_file=str(keys), strict=True) as gateway, client(gateway) as http:
        await asyncio.to_thread(keys.write_text, KEYS.replace("sk-one", "sk-evil"))
        await asyncio.to_thread(keys.chmod, 0o666)
        await gateway.node.key_files.check(gateway.node.keys.use_file)
        for key, status in (("sk-one", 200), ("sk-evil", 401)):
            headers = {"authorization": f"Bearer {key}"}
            assert (await http.get("/v1/models", headers=headers)).status_code == status


def test_certificates_are_checked_too(tmp_path: Path) -> None:
    """Whoever may change the private key of the server could use one of their own."""
    certificate = make_certificate(tmp_path, "first")
    settings = {"tls_certfile": str(certificate.cert), "tls_keyfile": str(certificate.key)}
    tmp_path.chmod(0o700)
    certificate.cert.chmod(0o644)
    certificate.key.chmod(0o600)
    assert tls_listener(ServeConfig(strict=True, **settings)) is not None
    certificate.key.chmod(0o660)
    with pytest.raises(ValueError, match=str(certificate.key)):
        tls_listener(ServeConfig(strict=True, **settings))
