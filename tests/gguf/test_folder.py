"""The cache of the folders of GGUF files."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from draftgate.backends.gguf import folder
from draftgate.backends.gguf.folder import settings_folder
from tests.gguf.files import tiny_model


def model(directory: Path, number: int = 0) -> Path:
    path = directory / f"model-{number}.gguf"
    path.write_bytes(tiny_model())
    return path


def test_a_later_start_finds_the_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An unchanged file is read once, and a changed one gets another folder."""
    path = model(tmp_path)
    first = settings_folder(path, tmp_path / "cache")
    with monkeypatch.context() as patch:
        patch.delattr(folder, "read_gguf")
        assert settings_folder(path, tmp_path / "cache") == first
    os.utime(path, ns=(0, 1))
    assert settings_folder(path, tmp_path / "cache") != first


def test_only_the_oldest_folders_are_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The cache keeps the folders that were used last, and everything that is not its own."""
    monkeypatch.setattr(folder, "_MAX_FOLDERS", 2)
    cache = tmp_path / "cache"
    foreign = [cache / "a-folder", cache / "0123", cache / "file"]
    for path in foreign[:2]:
        path.mkdir(parents=True)
    foreign[2].write_text("")
    made = []
    for number in range(4):
        made.append(settings_folder(model(tmp_path, number), cache))
        os.utime(made[-1], (number, number))
    assert [path.exists() for path in made] == [False, False, True, True]
    assert all(path.exists() for path in foreign)


def test_without_a_writable_cache_the_folder_is_temporary(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file is served although nothing can be cached, and nothing beside the folder is deleted."""
    temporary = tmp_path / "temporary"
    temporary.mkdir()
    monkeypatch.setattr(folder, "_MAX_FOLDERS", 0)
    monkeypatch.setattr(folder.tempfile, "tempdir", str(temporary))
    kept = temporary / "0123456789abcdef01234567"
    kept.mkdir()
    (tmp_path / "cache").write_text("no directory")
    found = settings_folder(model(tmp_path), tmp_path / "cache")
    assert found.parent == temporary
    assert (found / "tokenizer.json").is_file()
    assert kept.is_dir()


def test_a_folder_that_cannot_be_finished_is_deleted(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A full disk is an error that names the file, and leaves nothing that looks complete."""

    def full(*_args: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(folder, "_write", full)
    with pytest.raises(folder.CheckpointError, match=r"model-0\.gguf: .*No space left"):
        settings_folder(model(tmp_path), tmp_path / "cache")
    assert not list((tmp_path / "cache").iterdir())
