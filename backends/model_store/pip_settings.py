"""The package indexes of this machine, as pip is configured to use them.

Draftgate reads pip's files and variables instead of running pip, because images and environments of
uv have no pip. Later sources override earlier ones: the files of the system, of the user and of the
virtual environment, `PIP_CONFIG_FILE`, and the variables `PIP_*`
(https://pip.pypa.io/en/stable/topics/configuration/).
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator, Mapping
from configparser import ConfigParser, Error
from dataclasses import dataclass
from pathlib import Path
from typing import Final

_DEFAULT_INDEX: Final = "https://pypi.org/simple"

_SYSTEM_FILE: Final = Path("/etc/pip.conf")

_SECTIONS: Final = ("global", "download", "install")
"""The sections that concern downloads. The later ones take precedence."""

_TRUE: Final = frozenset({"1", "on", "t", "true", "y", "yes"})


@dataclass(frozen=True, slots=True)
class PipSettings:
    """The settings of pip that concern downloads.

    Attributes:
        indexes: the addresses of the indexes in their order, and none with `no-index`.
        certificate_file: a file with the certificates of CAs, or None for those of the system.
        proxy: the address of a proxy, or None for that of the environment.
        trusted_hosts: hosts whose certificates are not checked.
    """

    indexes: tuple[str, ...]
    certificate_file: str | None = None
    proxy: str | None = None
    trusted_hosts: frozenset[str] = frozenset()


def read_pip_settings(environ: Mapping[str, str] = os.environ) -> PipSettings:
    """Return the settings of pip. Unreadable and damaged files count as missing."""
    found: dict[str, str] = {}
    for path in _files(environ):
        found |= _read(path)
    for name, value in environ.items():
        if name.startswith("PIP_") and value:
            found[name.removeprefix("PIP_").lower().replace("_", "-")] = value
    offline = found.get("no-index", "").lower() in _TRUE
    further = found.get("extra-index-url", "").split()
    indexes = (found.get("index-url") or _DEFAULT_INDEX, *further)
    return PipSettings(
        () if offline else tuple(index.rstrip("/") for index in indexes),
        found.get("cert"),
        found.get("proxy"),
        frozenset(host.partition(":")[0] for host in found.get("trusted-host", "").split()),
    )


def _files(environ: Mapping[str, str]) -> Iterator[Path]:
    """Yield the paths of the configuration files, the last of which takes precedence."""
    own = environ.get("PIP_CONFIG_FILE")
    if own == os.devnull:
        return
    for folder in (environ.get("XDG_CONFIG_DIRS") or "/etc/xdg").split(os.pathsep):
        yield Path(folder) / "pip" / "pip.conf"
    yield _SYSTEM_FILE
    if own is None or not Path(own).exists():
        home = Path(environ.get("HOME") or Path.home())
        yield home / ".pip" / "pip.conf"
        yield Path(environ.get("XDG_CONFIG_HOME") or home / ".config") / "pip" / "pip.conf"
    yield Path(sys.prefix) / "pip.conf"
    if own is not None:
        yield Path(own)


def _read(path: Path) -> dict[str, str]:
    """Return the settings of a file by name."""
    parser = ConfigParser(interpolation=None)
    try:
        parser.read(path, encoding="utf-8")
    except (Error, OSError, UnicodeDecodeError):
        return {}
    names = (section for section in _SECTIONS if parser.has_section(section))
    items = (item for section in names for item in parser.items(section))
    return {name.replace("_", "-"): value.strip() for name, value in items if value.strip()}
