"""The training corpus: the standard library of the running Python.

The corpus needs no download and has the licence of the interpreter (PSF). Whole packages and their
tests are held out, so that training sees no near-copy of a held-out file.

This module imports neither torch nor transformers, because tests use :func:`held_out_files` for
prompts.
"""

from __future__ import annotations

import fnmatch
import hashlib
import sysconfig
from collections.abc import Iterable, Sequence
from functools import cache
from pathlib import Path

HELD_OUT_PACKAGES = ("asyncio", "http", "json", "sqlite3", "tomllib", "zoneinfo")
"""Top-level packages without training.

The packages differ in style: event loop, protocol, parser, database wrapper, and small well-known
pure-Python packages.
"""

HELD_OUT_PATTERNS = (
    *(f"{name}/*" for name in HELD_OUT_PACKAGES),
    *(f"test/test_{name}/*" for name in HELD_OUT_PACKAGES),
    *(f"test/test_{name}*.py" for name in HELD_OUT_PACKAGES),
)

EXCLUDED_PATTERNS = (
    "site-packages/*",
    "dist-packages/*",
    "lib-dynload/*",
    "config-*/*",
    "pydoc_data/*",
    "_sysconfigdata*",  # The build generates this file, which holds the build machine's paths.
    "encodings/cp*.py",  # Character tables contain numbers, not code.
    "encodings/mac_*.py",
    "encodings/iso*.py",
    "encodings/koi*.py",
    "encodings/kz*.py",
    "encodings/tis*.py",
    "encodings/hp_roman8.py",
    "encodings/palmos.py",
    "encodings/ptcp154.py",
)


def stdlib_root() -> Path:
    """Return the folder of the running interpreter's standard library."""
    return Path(sysconfig.get_paths()["stdlib"])


def _matches(name: str, patterns: Sequence[str]) -> bool:
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def read_text(path: Path) -> str | None:
    """Return a file's text exactly as stored, or None if the file is empty or not UTF-8."""
    try:
        text = path.read_bytes().decode("utf-8")
    except UnicodeDecodeError:
        return None
    return text if text.strip() else None


@cache
def _split() -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    """Return (training files, held-out files), each in order of relative path.

    The function collects held-out files first, so that it drops equal training files.
    """
    root = stdlib_root()
    names = sorted(path.relative_to(root).as_posix() for path in root.rglob("*.py"))
    names = [name for name in names if not _matches(name, EXCLUDED_PATTERNS)]
    held_out = [name for name in names if _matches(name, HELD_OUT_PATTERNS)]
    held = set(held_out)
    training = [name for name in names if name not in held]
    seen: set[str] = set()
    return _unique(root, training=training, held_out=held_out, seen=seen)


def _unique(
    root: Path, *, training: Sequence[str], held_out: Sequence[str], seen: set[str]
) -> tuple[tuple[Path, ...], tuple[Path, ...]]:
    kept_held_out = tuple(_keep_new(root, held_out, seen))
    kept_training = tuple(_keep_new(root, training, seen))
    return kept_training, kept_held_out


def _keep_new(root: Path, names: Iterable[str], seen: set[str]) -> Iterable[Path]:
    """Yield the readable files whose content is new, and add their digests to `seen`."""
    for name in names:
        text = read_text(root / name)
        if text is None:
            continue
        digest = hashlib.sha256(text.encode()).hexdigest()
        if digest not in seen:
            seen.add(digest)
            yield root / name


def training_files() -> list[Path]:
    """Return the training files in a fixed order."""
    return list(_split()[0])


def held_out_files() -> list[Path]:
    """Return the files that neither the models nor the tokenizer saw, in a fixed order."""
    return list(_split()[1])


def load(paths: Iterable[Path]) -> list[str]:
    """Return the texts of corpus files, one string per file."""
    return [text for path in paths if (text := read_text(path)) is not None]


def fingerprint(paths: Iterable[Path]) -> str:
    """Return the SHA-256 (hex) over the relative names and contents of files, in order."""
    root = stdlib_root()
    digest = hashlib.sha256()
    for path in paths:
        digest.update(path.relative_to(root).as_posix().encode() + b"\0")
        digest.update(path.read_bytes() + b"\0")
    return digest.hexdigest()


def shared_lines(training: Iterable[str], held_out: Iterable[str], *, run: int = 5) -> float:
    """Return the share of held-out runs of `run` lines that also occur in the training texts.

    The function strips lines and skips blank lines. Runs of five lines rarely match by imports and
    boilerplate, but still match copied functions.
    """

    def windows(text: str) -> list[int]:
        lines = [line.strip() for line in text.splitlines() if line.strip()]
        return [hash(tuple(lines[i : i + run])) for i in range(len(lines) - run + 1)]

    known = {window for text in training for window in windows(text)}
    found = [window in known for text in held_out for window in windows(text)]
    return sum(found) / max(1, len(found))
