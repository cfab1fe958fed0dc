"""Builds the distributions and installs them into clean environments without a network."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import venv
import zipfile
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

ROOT = Path(__file__).resolve().parents[2]

_NOT_SOURCE = shutil.ignore_patterns(
    ".*", "build", "dist", "runs", "*.egg-info", "__pycache__", "results"
)


def copy_checkout(to: Path) -> Path:
    """Copy the checkout without its environment, builds and caches, and keep its links."""
    shutil.copytree(ROOT, to, symlinks=True, ignore=_NOT_SOURCE)
    return to


def build_wheel(source: Path, to: Path) -> Path:
    """Build the wheel from a source folder or a source distribution."""
    _run(
        *("-m", "pip", "wheel", "--quiet", "--disable-pip-version-check", "--no-index"),
        *("--no-deps", "--no-build-isolation", "--wheel-dir", str(to), str(source)),
    )
    (wheel,) = to.glob("*.whl")
    return wheel


def build_sdist(source: Path, to: Path) -> Path:
    """Build the source distribution."""
    to.mkdir()
    build = f"from setuptools import build_meta; build_meta.build_sdist({str(to)!r})"
    _run("-c", build, cwd=source)
    (archive,) = to.glob("*.tar.gz")
    return archive


def members(wheel: Path) -> dict[str, bytes]:
    """Return the contents of a wheel's files by name."""
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


class Environment:
    """A virtual environment with a wheel and exactly its required packages."""

    def __init__(self, home: Path, wheel: Path, extras: set[str]) -> None:
        """Install the wheel with these extras.

        The requirements are links to the packages of the running interpreter, because an install
        would take minutes and a network.
        """
        venv.create(home, with_pip=False, symlinks=True)
        self.python = home / "bin" / "python"
        (self.packages,) = (home / "lib").glob("python*/site-packages")
        _run(
            *("-m", "pip", "--python", str(self.python), "install", "--quiet"),
            *("--disable-pip-version-check", "--no-index", "--no-deps", str(wheel)),
        )
        self.installed = {path.name for path in self.packages.iterdir()}
        (metadata,) = self.packages.glob("draftgate-*.dist-info")
        self.requirements = _closure(Distribution.at(metadata), extras)
        for required in self.requirements.values():
            self._link(required)

    def _link(self, required: Distribution) -> None:
        tops = {file.parts[0] for file in required.files or () if file.parts[0] != ".."}
        for top in tops - {"__pycache__"}:
            target = self.packages / top
            if not target.exists():
                target.symlink_to(str(required.locate_file(top)))


def constraints() -> dict[str, str]:
    """Return the pinned version of each package."""
    lines = (ROOT / "constraints.txt").read_text(encoding="utf-8").splitlines()
    pins = [line.split("==") for line in lines if line and not line.startswith("#")]
    return {str(canonicalize_name(name)): version for name, version in pins}


def _closure(root: Distribution, extras: set[str]) -> dict[str, Distribution]:
    """Return the direct and transitive requirements of a distribution by canonical name."""
    found: dict[str, Distribution] = {}
    todo = [(root, frozenset(extras))]
    seen: set[tuple[str, frozenset[str]]] = set()
    while todo:
        owner, wanted = todo.pop()
        for text in owner.requires or ():
            requirement = Requirement(text)
            name, more = str(canonicalize_name(requirement.name)), frozenset(requirement.extras)
            marker = requirement.marker
            if marker and not any(marker.evaluate({"extra": one}) for one in wanted | {""}):
                continue
            if (name, more) in seen:
                continue
            seen.add((name, more))
            if name == "draftgate":
                todo.append((root, more))
                continue
            try:
                found[name] = distribution(requirement.name)
            except PackageNotFoundError as error:
                raise AssertionError(
                    f"{owner.name} requires {text}, which is not installed"
                ) from error
            assert re.match(r"[\w.]+", found[name].version)
            todo.append((found[name], more))
    return found


def _run(*arguments: str, cwd: Path = ROOT) -> None:
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=cwd, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout + done.stderr
