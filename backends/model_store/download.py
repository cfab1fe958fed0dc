"""Downloads of files with a known size and checksum, which continue after an interruption."""

from __future__ import annotations

import hashlib
import os
import re
import ssl
import time
from collections.abc import Callable
from dataclasses import dataclass
from http import HTTPStatus
from pathlib import Path
from typing import TYPE_CHECKING, Final
from urllib.parse import urlsplit

from draftgate import __version__
from draftgate.addresses import mask_url
from draftgate.backends.errors import CheckpointError
from draftgate.backends.model_store.pip_settings import PipSettings

if TYPE_CHECKING:
    import httpx

_CONNECT_S: Final = 10.0
_READ_S: Final = 60.0
"""Time limits for a connection, and for the next bytes of a response, in seconds."""

_ATTEMPTS: Final = 4
"""Attempts in a row that may bring no bytes."""

_PAUSE_S: Final = 1.0
"""Pause before the second attempt, in seconds. Each further pause is twice as long."""

_RANGE_START: Final = re.compile(r"bytes (\d+)-")


@dataclass(frozen=True, slots=True)
class Target:
    """A file to download.

    Attributes:
        path: where the complete file will be. Until then, `partial` has its beginning.
        size_bytes: the size of the file.
        sha256: the SHA-256 of the file, in hexadecimal.
    """

    path: Path
    size_bytes: int
    sha256: str

    @property
    def partial(self) -> Path:
        """The file that the download continues."""
        return self.path.with_name(self.path.name + ".part")


def open_client(url: str, settings: PipSettings) -> httpx.Client:
    """Return a client for a server, with pip's certificates and proxy.

    Credentials come from the URL or from `~/.netrc`, and stay with their host. Certificates are
    those of the system and of `certifi`, unless pip's settings name a file.
    """
    # Imported here because the import takes a fifth of a second, and few commands download.
    import certifi
    import httpx

    context = ssl.create_default_context(cafile=settings.certificate_file)
    if settings.certificate_file is None:
        context.load_verify_locations(certifi.where())
    trusted = urlsplit(url).hostname in settings.trusted_hosts
    try:
        auth = None if urlsplit(url).username else httpx.NetRCAuth(os.environ.get("NETRC"))
    except (OSError, SyntaxError):  # no file, or a damaged one
        auth = None
    return httpx.Client(
        auth=auth,
        verify=False if trusted else context,
        proxy=settings.proxy,
        follow_redirects=True,
        timeout=httpx.Timeout(_READ_S, connect=_CONNECT_S),
        headers={"User-Agent": f"draftgate/{__version__}"},
    )


def download(
    client: httpx.Client,
    url: str,
    target: Target,
    progress: Callable[[int], None],
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Download a file, or the rest of a file whose download was interrupted.

    Args:
        progress: called with the number of bytes of the file that exist.
        sleep: waits for a number of seconds between two attempts.

    Raises:
        CheckpointError: the server does not send the file. What has arrived stays, and the next
            call continues there.
        OSError: the file cannot be written.
    """
    continued = _size(target.partial) > 0
    _complete(client, url, target, progress, sleep)
    if not _is_intact(target) and continued:
        # The beginning may have been damaged, or of another file.
        target.partial.unlink()
        _complete(client, url, target, progress, sleep)
    if not _is_intact(target):
        target.partial.unlink()
        raise CheckpointError(
            f"{mask_url(url)} is damaged: its SHA-256 is not {target.sha256}; try another index"
        )
    target.partial.replace(target.path)


def _complete(
    client: httpx.Client,
    url: str,
    target: Target,
    progress: Callable[[int], None],
    sleep: Callable[[float], None],
) -> None:
    """Download until the file has its size."""
    import httpx

    failures = 0
    while (before := _size(target.partial)) < target.size_bytes:
        try:
            _continue(client, url, target, progress)
            reason = "the server sent only a part of it"
        except httpx.TransportError as error:
            reason = str(error) or type(error).__name__
        failures = 0 if _size(target.partial) > before else failures + 1
        if failures == _ATTEMPTS:
            raise CheckpointError(
                f"cannot download {mask_url(url)}: {reason}; run the command again to continue"
            )
        if failures:
            sleep(_PAUSE_S * 2 ** (failures - 1))


def _continue(
    client: httpx.Client, url: str, target: Target, progress: Callable[[int], None]
) -> None:
    """Append what a server sends after the bytes that exist."""
    done = _size(target.partial)
    headers = {"Accept-Encoding": "identity"}
    if done:
        headers["Range"] = f"bytes={done}-"
    with client.stream("GET", url, headers=headers) as response:
        if response.status_code == HTTPStatus.REQUESTED_RANGE_NOT_SATISFIABLE:
            target.partial.unlink()
            return
        if response.status_code not in {HTTPStatus.OK, HTTPStatus.PARTIAL_CONTENT}:
            status = response.status_code
            raise CheckpointError(f"cannot download {mask_url(url)}: status {status}")
        # Without ranges, a server sends the file from its begin.
        begin = _RANGE_START.match(response.headers.get("Content-Range", ""))
        position = int(begin[1]) if begin and response.status_code != HTTPStatus.OK else 0
        with target.partial.open("r+b" if done else "wb") as file:
            file.truncate(min(position, done))
            file.seek(0, 2)
            for chunk in response.iter_raw():
                if file.tell() + len(chunk) > target.size_bytes:
                    raise CheckpointError(f"{mask_url(url)} is larger than the file to download")
                file.write(chunk)
                progress(file.tell())


def _is_intact(target: Target) -> bool:
    with target.partial.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest() == target.sha256


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0
