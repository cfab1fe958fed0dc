"""Named blobs in a local folder, or at any URL of fsspec.

A blob is written as a whole, and is visible only once it is complete and on disk. A process that is
killed therefore leaves no part of a blob behind, and a blob that a reader has seen survives a loss
of power. Object stores guarantee the same for the end of an upload.

All functions wait for the storage, so call them in a thread.
"""

from __future__ import annotations

import os
import secrets
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any, BinaryIO, Final, Protocol, cast

_FSSPEC: Final = "pip install 'draftgate[files]'"


class Blobs(Protocol):
    """Blobs by name. A name consists of parts with slashes between them, as a path."""

    def put(self, name: str, chunks: Iterable[bytes]) -> None:
        """Write a blob, and replace an earlier one of this name.

        Raises:
            OSError: the storage failed. An earlier blob remains.
        """
        ...

    def open(self, name: str) -> BinaryIO:
        """Open a blob for reading.

        Raises:
            FileNotFoundError: the blob does not exist.
            OSError: the storage failed.
        """
        ...

    def names(self, folder: str) -> list[str]:
        """Return the sorted last parts of the names of all blobs in a folder.

        Raises:
            OSError: the storage failed.
        """
        ...

    def delete(self, name: str) -> None:
        """Delete a blob, if it exists.

        Raises:
            OSError: the storage failed.
        """
        ...


class LocalBlobs:
    """Blobs in a folder of this machine."""

    def __init__(self, root: Path) -> None:
        self._root = root

    def put(self, name: str, chunks: Iterable[bytes]) -> None:
        path = self._root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        temporary = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
        try:
            with temporary.open("wb") as file:
                file.writelines(chunks)
                file.flush()
                os.fsync(file.fileno())
            temporary.replace(path)
        except BaseException:
            temporary.unlink(missing_ok=True)
            raise
        _sync_folder(path.parent)

    def open(self, name: str) -> BinaryIO:
        return (self._root / name).open("rb")

    def names(self, folder: str) -> list[str]:
        with suppress(FileNotFoundError):
            return sorted(
                one.name for one in (self._root / folder).iterdir() if not one.name.startswith(".")
            )
        return []

    def delete(self, name: str) -> None:
        (self._root / name).unlink(missing_ok=True)


def _sync_folder(folder: Path) -> None:
    """Write the entries of a folder to disk, such as a new name."""
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


class RemoteBlobs:
    """Blobs at a URL of fsspec, such as `s3://bucket/folder`."""

    def __init__(self, url: str) -> None:
        """Open the file system of a URL.

        Raises:
            ValueError: fsspec, or its package for this protocol, is missing.
        """
        try:
            from fsspec.core import url_to_fs

            self._files, self._root = cast("tuple[Any, str]", url_to_fs(url))
        except ImportError as error:
            if error.name == "fsspec":
                raise ValueError(f"--files {url} needs fsspec: {_FSSPEC}") from None
            raise ValueError(f"--files {url}: {error}") from None

    def put(self, name: str, chunks: Iterable[bytes]) -> None:
        path = self._path(name)
        self._files.makedirs(path.rpartition("/")[0], exist_ok=True)
        with self._files.open(path, "wb") as file:
            for chunk in chunks:
                file.write(chunk)

    def open(self, name: str) -> BinaryIO:
        return cast(BinaryIO, self._files.open(self._path(name), "rb"))

    def names(self, folder: str) -> list[str]:
        path = self._path(folder)
        self._files.invalidate_cache(path)  # other gateways write there, too
        with suppress(FileNotFoundError):
            found = self._files.ls(path, detail=False)
            return sorted(one.rstrip("/").rpartition("/")[2] for one in found)
        return []

    def delete(self, name: str) -> None:
        with suppress(FileNotFoundError):
            self._files.rm_file(self._path(name))

    def _path(self, name: str) -> str:
        return f"{self._root.rstrip('/')}/{name}"


def open_blobs(place: str) -> Blobs:
    """Return the blobs in a folder, or at a URL.

    Raises:
        ValueError: the folder cannot be used, or a package for the URL is missing.
    """
    if "://" in place:
        return RemoteBlobs(place)
    root = Path(place).expanduser()
    try:
        root.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ValueError(f"--files {place}: {error.strerror or error}") from None
    return LocalBlobs(root)
